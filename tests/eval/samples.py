"""A few rows of each data set, in its own columns, and a model that answers as it is told."""

import json
import re
from pathlib import Path

from lm_eval.api.model import LM

from eval import data
from eval.benchmarks import build, names_of, task_manager


LETTERS = "ABCD"


def _subject(question: str, answer: str, *, choices: str | None, index: bool):
    """Multiple-choice rows: the answers of the rows to be scored are B, C, B, B, so who always says B has 3 of 4."""

    def rows(split: str) -> list[dict]:
        found = []
        for i, right in enumerate((1, 2, 1, 1) if split in ("test", "val") else (0, 1, 2, 3, 0, 1)):
            texts = [f"{split} {i} {letter}" for letter in LETTERS]
            options = {choices: texts} if choices else dict(zip(LETTERS, texts))
            found.append({question: f"What is {split} {i}?", **options, answer: right if index else LETTERS[right]})
        return found

    return rows


def _mmlu_pro(split: str) -> list[dict]:
    subjects = (
        "biology business chemistry economics engineering health history law math other philosophy physics psychology"
    )
    return [
        {
            "question": f"{split} {subject} {i}?",
            "options": [f"option {j}" for j in range(10)],
            "answer": "J",
            "cot_content": f"A: Let's think step by step. Thought {i}. The answer is (J).",
            "category": subject,
        }
        for subject in [*subjects.split(), "computer science"]
        for i in range(6 if split == "validation" else 2)
    ]


def _gpqa(split: str) -> list[dict]:
    wrong = {f"Incorrect Answer {n}": f"wrong {n}" for n in (1, 2, 3)}
    return [{"Question": f"question {i}", "Correct Answer": "right", **wrong} for i in range(8)]


def _bbh(split: str) -> list[dict]:
    return [{"input": f"task {i} of four?", "target": str(i)} for i in range(4)]


def _arc(split: str) -> list[dict]:
    choices = {"text": ["yes", "by no means whatever"], "label": ["A", "B"]}
    return [
        {"question": f"{split} {i}?", "choices": choices, "answerKey": "BABB"[i % 4]}
        for i in range(4 if split == "test" else 30)
    ]


def _hellaswag(split: str) -> list[dict]:
    return [
        {
            "activity_label": "Cooking",
            "ctx_a": f"A cook {i} takes a pan.",
            "ctx_b": "the cook",
            "endings": ["waits.", "puts [header] it on the stove and lights the fire."],
            "label": "1011"[i % 4],
        }
        for i in range(4 if split == "validation" else 12)
    ]


def _triviaqa(split: str) -> list[dict]:
    return [
        {"question": f"{split} question {i}", "answer": {"value": "Rome", "aliases": ["Rome", "The City"]}}
        for i in range(4 if split == "validation" else 8)
    ]


def _gsm8k(split: str) -> list[dict]:
    return [{"question": f"How many are {i} and 1000?", "answer": f"It is so. #### {1000 + i:,}"} for i in range(4)]


def _mgsm(split: str) -> list[dict]:
    worked = "Step-by-Step Answer: It is 7. The answer is 7." if split == "train" else None
    prefix = "Question: " if worked else ""
    return [
        {"question": f"{prefix}{split} sum {i}", "answer": worked, "answer_number": i + 7}
        for i in range(8 if worked else 2)
    ]


def _math(split: str) -> list[dict]:
    solutions = ["\\boxed{\\frac{1}{2}}", "\\boxed{3}", "\\boxed{x+1}", "\\boxed{[2,5)}"]
    return [{"problem": f"problem {i}", "solution": f"So {solution}."} for i, solution in enumerate(solutions)]


def _cmath(split: str) -> list[dict]:
    return [{"question": f"第{i}题", "golden": golden} for i, golden in enumerate(["15", "4.5", "1200", "7"])]


def _humaneval(split: str) -> list[dict]:
    return [
        {
            "prompt": f'def add{i}(a, b):\n    """Add."""\n',
            "test": "def check(candidate):\n    assert candidate(2, 3) == 5\n",
            "entry_point": f"add{i}",
        }
        for i in range(4)
    ]


def _mbpp(split: str) -> list[dict]:
    return [
        {
            "task_id": i,
            "text": f"Write add{i}.",
            "code": f"def add{i}(a, b): return a + b",
            "test_list": [f"assert add{i}({j}, 1) == {j + 1} + base" for j in range(3)],
            "test_setup_code": "base = 0",
        }
        for i in (range(1, 7) if split == "prompt" else range(11, 15))
    ]


ROWS = {
    "cais/mmlu": _subject("question", "answer", choices="choices", index=True),
    "TIGER-Lab/MMLU-Pro": _mmlu_pro,
    "Idavidrein/gpqa": _gpqa,
    "SaylorTwift/bbh": _bbh,
    "allenai/ai2_arc": _arc,
    "Rowan/hellaswag": _hellaswag,
    "mandarjoshi/trivia_qa": _triviaqa,
    "openai/gsm8k": _gsm8k,
    "juletxara/mgsm": _mgsm,
    "EleutherAI/hendrycks_math": _math,
    "weitianwen/cmath": _cmath,
    "openai/openai_humaneval": _humaneval,
    "google-research-datasets/mbpp": _mbpp,
    "haonan-li/cmmlu": _subject("Question", "Answer", choices=None, index=False),
    "ceval/ceval-exam": _subject("question", "answer", choices=None, index=False),
}


def write_rows(file: Path, rows: list[dict]) -> None:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf-8")


def write_samples(folder: Path) -> None:
    """Write every file that `attnres_paper` asks for."""
    manager = task_manager()
    with data.local(folder) as missing:
        try:
            build(manager, names_of(manager, ["attnres_paper"]), missing)
        except data.DataError:
            stems = [Path(re.sub(r"\(.*\)$", "", name)) for name in missing]
    stems.append(folder / "openai/openai_humaneval/test")  # the package's would be used
    for stem in stems:
        path = "/".join(stem.relative_to(folder).parts[:2])
        write_rows(stem.with_name(stem.name + ".jsonl"), ROWS[path](stem.name))


class Scripted(LM):
    """A model that does what functions say; remembers all it was asked.

    Args:
        likelihood: from (context, continuation) to a log-likelihood.
        answer: from a prompt to a text.
    """

    def __init__(self, likelihood=None, answer=None):
        super().__init__()
        self._likelihood, self._answer = likelihood, answer
        self.prompts: list[str] = []
        self.generation: list[dict] = []

    def loglikelihood(self, requests):
        self.prompts += [request.args[0] for request in requests]
        return [(self._likelihood(*request.args), False) for request in requests]

    def loglikelihood_rolling(self, requests):
        return [self._likelihood("", *request.args) for request in requests]

    def generate_until(self, requests):
        self.prompts += [request.args[0] for request in requests]
        self.generation += [request.args[1] for request in requests]
        return [self._answer(request.args[0]) for request in requests]
