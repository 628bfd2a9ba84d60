"""The 15 benchmarks of the paper on a few rows each, scored by hand; their shots, stop strings and filters."""

import re

import pytest
from datasets import Dataset
from lm_eval import simple_evaluate

from eval import data
from eval.benchmarks import TASKS, build, names_of, task_manager
from eval.run import Outcome, Subject
from eval.table import compare
from eval.tasks import cmath, gpqa, perplexity, sandbox
from tests.eval.samples import Scripted


pytestmark = pytest.mark.xdist_group("eval tasks")


def prefers(*continuations):
    """A likelihood: these continuations before all others."""
    return lambda context, continuation: 0.0 if continuation.strip() in continuations else -1.0


def right_if_even(context, continuation):
    """GPQA: the right choice for questions of even number, else a wrong one."""
    asked = context.rpartition("Question: ")[2]
    number = int(re.match(r"question (\d+)", asked)[1])
    wanted = "right" if number % 2 == 0 else "wrong 2"
    return 0.0 if f"{continuation.strip()} {wanted}\n" in asked else -1.0


def last_number(prompt):
    return int(re.findall(r"\d+", prompt)[-1])


def mmlu_pro(prompt):
    asked = prompt.rpartition("Question:")[2]
    return "The answer is (J)." if " 0?" in asked else "the answer is (A), not (J)"


def triviaqa(prompt):
    return ("  the city", "Paris", "ROME!", "In Rome")[last_number(prompt)]


def mgsm(prompt):
    return "3 + 4 = 7." if last_number(prompt) == 0 else "It is 12"


def bbh(prompt):
    number = int(re.findall(r"task (\d) of four", prompt)[-1])
    return ("No idea.", "So the answer is 7.", "So the answer is 2.", "so the answer is 3.")[number]


def gsm8k(prompt):
    number = int(re.findall(r"How many are (\d) and", prompt)[-1])
    return ("1 + 1 is $1,000.", "The answer is 1,001.", "The answer is 5.", "I do not know.")[number]


def minerva(prompt):
    number = int(re.findall(r"problem (\d)", prompt)[-1])
    answers = ("$0.5$", "$3$", "$1 + x$", "$(2,5)$")
    return f"So. Final Answer: The final answer is {answers[number]}. I hope it is correct."


def chinese(prompt):
    number = int(re.findall(r"第(\d)题", prompt)[-1])
    return ("一共15颗。答案是15。", "所以答案是 9/2 米", "１，２００元", "答案是8，不是7")[number]


def humaneval(prompt):
    number = int(re.search(r"add(\d)", prompt)[1])
    return ("    return a + b", "    return a - b", "    return b + a\n", "    raise SystemExit(0)")[number]


def mbpp(prompt):
    name = re.findall(r"Write (add\d+)\.", prompt)[-1]
    return f"def {name}(a, b):\n    return a + b" if name != "add12" else "print('passed')"


def short_before_long(context, continuation):
    """A likelihood: the short choice before the long one, but not per character."""
    return -3.0 if continuation.strip() in ("yes", "waits.") else -6.0


# name: what the model does, the score in percent by hand, what a shot looks like in a prompt, shots, stop strings
CASES = {
    "mmlu": (Scripted(prefers("B")), 75, r"Answer: [ABCD]\n", 5, None),
    "mmlu_pro": (Scripted(answer=mmlu_pro), 50, r"The answer is \(J\)\.", 5, ["Question:"]),
    "gpqa_diamond": (Scripted(right_if_even), 50, r"Answer: \([ABCD]\)\n", 5, None),
    "bbh": (Scripted(answer=bbh), 50, r"[Ss]o the answer is ", 3, ["</s>", "Q", "\n\n"]),
    "arc_challenge": (Scripted(short_before_long), 75, r"Answer: (yes|by no)", 25, None),
    "hellaswag": (Scripted(short_before_long), 75, r"(waits|fire)\.\n\n", 10, None),
    "triviaqa": (Scripted(answer=triviaqa), 50, r"Answer: \S", 5, ["\n", ".", ","]),
    "gsm8k": (Scripted(answer=gsm8k), 50, r"The answer is \d+\.\n\n", 8, ["Q:", "</s>", "<|im_end|>"]),
    "mgsm": (Scripted(answer=mgsm), 50, r"The answer is 7\.", 8, None),
    "minerva_math": (Scripted(answer=minerva), 75, r"I hope it is correct\.", 4, ["Problem:"]),
    "cmath": (Scripted(answer=chinese), 75, r"答案是[\d.]+。", 3, ["问题：", "\n\n"]),
    "humaneval": (Scripted(answer=humaneval), 50, r"check\(", 0, ["\nclass", "\ndef", "\n#", "\nif", "\nprint"]),
    "mbpp": (Scripted(answer=mbpp), 75, r"\[DONE\]", 3, ["[DONE]"]),
    "cmmlu": (Scripted(prefers("B")), 75, r"答案： [ABCD]\n", 5, None),
    "ceval": (Scripted(prefers("B")), 75, r"答案： [ABCD]\n", 5, None),
}


def evaluate(model, benchmark):
    """The benchmark's row in a table of this model alone."""
    results = simple_evaluate(
        model,
        tasks=[benchmark.request()],
        task_manager=task_manager(),
        confirm_run_unsafe_code=True,
        bootstrap_iters=0,
    )
    (row,) = compare([benchmark], [Outcome(Subject("scripted", "scripted"), {benchmark.name: results})])
    return row


def built(manager, folder, name):
    with data.local(folder) as missing:
        return build(manager, names_of(manager, [name]), missing)[0]


@pytest.mark.parametrize("name", CASES)
def test_a_benchmark_scores_shows_and_stops_as_documented(manager, data_folder, name):
    model, by_hand, shot, shots, until = CASES[name]
    benchmark = built(manager, data_folder, f"attnres_{name}")
    row = evaluate(model, benchmark)
    assert row.scores[0].value == pytest.approx(by_hand)
    assert row.shots == shots
    assert {len(re.findall(shot, prompt)) for prompt in model.prompts} == {shots}
    if until is not None:
        assert all(arguments["until"] == until for arguments in model.generation)


def test_the_paper_has_15_benchmarks_with_its_figures(manager):
    names = names_of(manager, ["attnres_paper"])
    assert [name.removeprefix("attnres_") for name in names] == list(CASES)
    figures = {name: manager.task_index[name].cfg["metadata"]["paper"] for name in names}
    assert all(0 < paper["baseline"] <= paper["attnres"] < 100 for paper in figures.values())
    assert sum(paper["attnres"] - paper["baseline"] for paper in figures.values()) == pytest.approx(28.2)


def test_core_is_knowledge_reasoning_and_code(manager):
    assert names_of(manager, ["attnres_core"]) == ["attnres_mmlu", "attnres_gpqa_diamond", "attnres_humaneval"]


def test_every_task_file_is_reachable(manager):
    ours = {path.stem for path in TASKS.glob("*.yaml")}
    listed = {
        *names_of(manager, ["attnres_paper", "attnres_core", "attnres_perplexity", "attnres_humaneval_chat"]),
        "attnres_paper",
        "attnres_core",
    }
    assert ours == listed


def test_gpqa_shuffles_a_question_once_and_for_all(manager, data_folder):
    task = built(manager, data_folder, "attnres_gpqa_diamond").tasks["gpqa_diamond_n_shot"]
    first, again = list(task.eval_docs), list(task.eval_docs)
    assert first == again
    assert len({doc["answer"] for doc in first}) > 1
    for doc in first:
        choices = [doc[f"choice{i}"] for i in range(1, 5)]
        assert sorted(choices) == ["right", "wrong 1", "wrong 2", "wrong 3"]
        assert choices["ABCD".index(doc["answer"][1])] == "right"


@pytest.mark.parametrize(
    ("text", "answer", "golden", "right"),
    [
        ("3+4=7。答案是7", "7", "7", True),
        ("答案是：１２．５元", "12.5", "12.50", True),
        ("先算 9，答案是1,200。然后 5", "1,200", "1200", True),
        ("没有说：2, 3", "3", "2", False),
        ("答案是9/2", "9/2", "4.5", True),
        ("答案是1/0", "1/0", "1", False),
        ("不知道", "", "7", False),
        ("答案是不知道，7", "7", "7", True),
    ],
)
def test_cmath_reads_the_answer(text, answer, golden, right):
    assert cmath.answers([[text]], [{}]) == [[answer]]
    assert cmath.exact_match(references=[golden], predictions=[answer]) == right


def humaneval_in_a_chat(prompt):
    number = int(re.search(r"add(\d)", prompt)[1])
    return (
        "Sure!\n\n```python\ndef add0(a, b):\n    return a + b\n```\n\nTry it:\n\n```\nadd0(1, 2)\n```",
        "```\n    return a + b\n```",
        "```python\ndef add2(a, b):\n    return a - b\n```",
        "It adds: return a + b",
    )[number]


def test_humaneval_in_a_chat_runs_what_is_in_the_fence(manager, data_folder):
    model = Scripted(answer=humaneval_in_a_chat)
    benchmark = built(manager, data_folder, "attnres_humaneval_chat")
    row = evaluate(model, benchmark)
    assert row.scores[0].value == pytest.approx(50)
    assert benchmark.paper is None
    assert all(arguments["until"] == [] for arguments in model.generation)  # an answer has blank lines and comments
    assert all(f"```python\ndef add{i}(a, b):" in prompt for i, prompt in enumerate(model.prompts))


@pytest.mark.parametrize(
    ("answer", "code"),
    [
        ("So:\n```python\nx = 1\n```\nand\n```\ny = 2\n```", "x = 1\n"),
        ("1. So:\n   ```py\n   x = 1\n   ```", "   x = 1\n"),
        ("```\nx = 1\n\ny = '``'  # ```\n```", "x = 1\n\ny = '``'  # ```\n"),
        ("```python\nx = 1\ny", "x = 1\ny"),
        ("x = 1", "x = 1"),
        ("```x``` is it", "```x``` is it"),
    ],
)
def test_the_first_fence_of_an_answer(answer, code):
    assert sandbox.fenced_code(answer) == code


def test_perplexity_is_that_of_each_topics_bytes(manager, tmp_path):
    benchmark = built(manager, tmp_path, "attnres_perplexity")
    model = Scripted(lambda _, text: -2.0 * len(text.encode()))  # two nats a byte
    row = evaluate(model, benchmark)
    assert row.scores[0].value == pytest.approx(2 / 0.6931471805599453)
    assert row.scores[0].items == len(perplexity.python_reference()["test"]) > 50


def test_gpqa_keeps_the_harness_cleaning():
    row = {"Question": "q", "Correct Answer": " a  b ", **{f"Incorrect Answer {n}": "c" for n in (1, 2, 3)}}
    assert "a b" in gpqa.with_choices(Dataset.from_list([row]))[0].values()


def test_the_readme_says_what_the_tasks_do(manager, data_folder):
    lines = (TASKS.parent / "README.md").read_text(encoding="utf-8").splitlines()
    table = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in lines if "| `attnres_" in line]
    names = names_of(manager, ["attnres_paper"])
    assert [row[1] for row in table] == names
    with data.local(data_folder) as missing:
        benchmarks = build(manager, names, missing)
    for row, benchmark in zip(table, benchmarks, strict=True):
        facts = (benchmark.title, str(benchmark.shots), benchmark.metric, *map(str, benchmark.paper))
        assert (row[0], *row[3:7]) == facts
        if (built_on := row[2].rstrip("*")) != "(ours)":
            assert all(task.startswith(built_on) for task in benchmark.tasks)
