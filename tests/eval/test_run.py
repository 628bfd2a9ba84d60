"""Models through the harness: every family, resuming, failures, the commands' messages and exit status."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import eval.run
from conversion.port import Blocks, port
from eval.__main__ import app
from eval.benchmarks import TASKS, EvalError
from eval.run import Settings, run, subjects_of
from eval.table import compare
from tests.families import FAMILIES


pytestmark = pytest.mark.xdist_group("eval tasks")

ROOT = TASKS.parents[1]
NAMES = ["attnres_arc_challenge", "attnres_gsm8k", "attnres_perplexity"]
SHORT = Settings(limit=2, gen_kwargs="max_gen_toks=4", model_args="max_length=256", device="cpu")
OPTIONS = "--limit 2 --gen-kwargs max_gen_toks=4 --model-args max_length=256 --device cpu --output"


def invoke(*arguments):
    return CliRunner().invoke(app, list(map(str, arguments)))


def items(outcome, *keys):
    """What a model said to each request, or how it was scored."""
    return {
        (task, sample["doc_id"], sample["filter"]): [sample[key] for key in keys]
        for results in outcome.results.values()
        for task, samples in results["samples"].items()
        for sample in samples
    }


@pytest.mark.parametrize("name", [family.name for family in FAMILIES])
def test_a_model_of_every_family_runs(name, save_model, data_folder, tmp_path):
    benchmarks, (outcome,) = run(subjects_of([save_model(name)], None), NAMES, SHORT, tmp_path, data_folder)
    assert outcome.failures == {}
    arc, gsm8k, perplexity = compare(benchmarks, [outcome])
    assert (arc.scores[0].items, gsm8k.scores[0].items, perplexity.scores[0].items) == (2, 2, 2)
    assert 4 < perplexity.scores[0].value < 16  # an untrained model: about 8 bits a byte
    said = [text for (text,) in items(outcome, "resps").values() if isinstance(text[0][0], str)]
    assert said
    assert sorted(path.name for path in tmp_path.rglob("*.*")) == [f"{name}.json" for name in NAMES]


def test_a_port_agrees_with_its_source_item_for_item(save_model, data_folder, tmp_path, tokenizer):
    source = save_model("Llama", "source", base=True)
    ports = {"block": Blocks(number=3), "full": Blocks("full")}
    for name, blocks in ports.items():
        port(source, tmp_path / name, blocks)
    subjects = subjects_of([source, *(str(tmp_path / name) for name in ports)], None)
    benchmarks, outcomes = run(subjects, NAMES, SHORT, tmp_path / "out", data_folder)
    arc, gsm8k, perplexity = compare(benchmarks, outcomes)
    assert arc.difference.test == gsm8k.difference.test == "the same item for item"
    assert abs(perplexity.difference.value) < 1e-4
    said = [
        {key: text for key, (text,) in items(outcome, "resps").items() if "gsm8k" in key[0]} for outcome in outcomes
    ]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize(("family", "batch_sizes"), [("Llama", ("1", "1", "8", "auto")), ("KimiLinear", ("1", "8"))])
def test_scores_do_not_depend_on_the_run_or_on_the_batch(family, batch_sizes, save_model, data_folder, tmp_path):
    subjects = subjects_of([save_model(family)], None)
    scored, said = [], []
    for index, batch_size in enumerate(batch_sizes):
        settings = Settings(**{**vars(SHORT), "batch_size": batch_size, "limit": None})
        _, (outcome,) = run(subjects, NAMES[:2], settings, tmp_path / str(index), data_folder)
        scored.append({name: found["results"][name] for name, found in outcome.results.items()})
        said.append({key: value for key, value in items(outcome, "resps").items() if "gsm8k" in key[0]})
    for found in scored[1:]:
        for name, results in scored[0].items():
            numbers = {key: value for key, value in results.items() if isinstance(value, float)}
            assert {key: found[name][key] for key in numbers} == numbers
    assert all(found == said[0] for found in said)


def test_what_has_finished_is_not_run_again(save_model, data_folder, tmp_path, monkeypatch):
    subjects = subjects_of([save_model()], None)
    _, (first,) = run(subjects, NAMES[:1], SHORT, tmp_path, data_folder)
    ran = []
    evaluate = eval.run.simple_evaluate
    monkeypatch.setattr(
        eval.run, "simple_evaluate", lambda *a, tasks, **k: (ran.append(tasks), evaluate(*a, tasks=tasks, **k))[1]
    )
    benchmarks, (both,) = run(subjects, NAMES[:2], SHORT, tmp_path, data_folder)
    assert len(ran) == 1
    monkeypatch.setattr(eval.run, "get_model", None)  # nothing left: no model is loaded
    _, (again,) = run(subjects, NAMES[:2], SHORT, tmp_path, data_folder)
    assert again.results == both.results
    assert again.results[NAMES[0]] == json.loads(json.dumps(first.results[NAMES[0]]))
    (tmp_path / "Llama" / f"{NAMES[0]}.json").unlink()
    (tmp_path / "Llama" / f"{NAMES[0]}.incomplete").write_text("{")  # what a kill leaves
    monkeypatch.undo()
    _, (mended,) = run(subjects, NAMES[:2], SHORT, tmp_path, data_folder)
    assert compare(benchmarks, [mended]) == compare(benchmarks, [both])


def test_another_process_finds_what_this_one_left(save_model, data_folder, tmp_path, monkeypatch):
    """In another clone, too: settings are told apart by what tasks do, not by where they lie."""
    model, names = save_model(), ["attnres_gpqa_diamond", "attnres_mmlu_pro", "attnres_cmath"]
    clone = tmp_path / "clone"
    for package in ("eval", "conversion", "model_cards", "modeling_attnres"):
        shutil.copytree(ROOT / package, clone / package, ignore=shutil.ignore_patterns("*.json", "*.png"))
    command = [sys.executable, "-m", "eval", "run", "--model", model, "--tasks", ",".join(names), "--data", data_folder]
    environment = {**os.environ, "PYTHONPATH": str(clone), "PYTHONHASHSEED": "7"}
    subprocess.run([*command, *OPTIONS.split(), tmp_path / "out"], check=True, cwd=clone, env=environment)
    monkeypatch.setattr(eval.run, "get_model", None)
    _, (outcome,) = run(subjects_of([model], None), names, SHORT, tmp_path / "out", data_folder)
    assert list(outcome.results) == names


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"limit": 1}, "limit"),
        ({"gen_kwargs": "max_gen_toks=5"}, "gen_kwargs"),
        ({"chat_template": True}, "chat_template"),
    ],
)
def test_results_of_other_settings_are_not_taken_for_these(save_model, data_folder, tmp_path, change, key):
    subjects = subjects_of([save_model()], None)
    run(subjects, NAMES[:1], SHORT, tmp_path, data_folder)
    with pytest.raises(EvalError, match=f"has results for another {key} "):
        run(subjects, NAMES[:1], Settings(**{**vars(SHORT), **change}), tmp_path, data_folder)
    Path(subjects[0].model, "config.json").touch()  # another model at the same place
    with pytest.raises(EvalError, match="has results for another files "):
        run(subjects, NAMES[:1], SHORT, tmp_path, data_folder)


def test_a_failure_leaves_the_others_and_the_status_says_so(save_model, data_folder, tmp_path, monkeypatch):
    evaluate = eval.run.simple_evaluate

    def fail(model, tasks, **kwargs):
        if tasks[0].name == NAMES[1]:
            raise RuntimeError("out of memory")
        return evaluate(model, tasks=tasks, **kwargs)

    model = save_model()
    arguments = [
        "run",
        "--model",
        model,
        "--tasks",
        ",".join(NAMES[:2]),
        "--data",
        data_folder,
        *OPTIONS.split(),
        tmp_path,
    ]
    monkeypatch.setattr(eval.run, "simple_evaluate", fail)
    result = invoke(*arguments)
    assert result.exit_code == 1
    assert "failed: RuntimeError: out of memory" in result.stdout
    assert "| ARC-Challenge |" in result.stdout
    monkeypatch.undo()
    result = invoke(*arguments)
    assert result.exit_code == 0
    assert "failed" not in result.stdout
    assert (tmp_path / "table.md").read_text() in result.stdout


def test_a_model_that_cannot_be_loaded_fails_and_the_next_one_runs(save_model, data_folder, tmp_path):
    broken, sound = save_model(name="broken"), save_model(name="sound")
    Path(broken, "model.safetensors").write_bytes(b"no weights")
    _, outcomes = run(subjects_of([broken, sound], None), NAMES[:1], SHORT, tmp_path, data_folder)
    assert list(outcomes[0].failures) == NAMES[:1]
    assert outcomes[1].failures == {}


def test_an_adapter_is_one_more_column(save_model, data_folder, tmp_path):
    model = save_model()
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(target_modules="all-linear", modules_to_save=["attn_res"]),
    )
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    tuned.save_pretrained(tmp_path / "tuned" / "adapter")
    subjects = subjects_of([model], str(tmp_path / "tuned" / "adapter"))
    assert [subject.name for subject in subjects] == ["Llama", "Llama+tuned"]
    benchmarks, outcomes = run(subjects, NAMES[2:], SHORT, tmp_path / "out", data_folder)
    (row,) = compare(benchmarks, outcomes)
    assert abs(row.difference.value) > 1e-3


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--tasks attnres_humaneval", "run code that the model writes: allow it with --confirm-run-unsafe-code"),
        ("--tasks attnres_nothing", "'attnres_nothing' is no task; ours are attnres_arc_challenge"),
        ("--tasks attnres_gsm8k --data EMPTY", "openai/gsm8k/main/test(.jsonl, .csv, .parquet)"),
        ("--tasks attnres_gsm8k --model /nowhere", "/nowhere holds no config.json"),
        ("--tasks attnres_gsm8k --adapter EMPTY", "holds no adapter_config.json"),
        ("--tasks attnres_gsm8k --adapter a/b --backend vllm", "--adapter works with the back end hf"),
        ("--tasks attnres_gsm8k --model MODEL", "Two models have the same name: Llama, Llama"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(save_model, data_folder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.setattr(eval.run, "get_model", None)
    model, empty = save_model(), tmp_path / "empty"
    empty.mkdir()
    words = [{"EMPTY": str(empty), "MODEL": model}.get(word, word) for word in arguments.split()]
    data = [] if "--data" in words else ["--data", data_folder]
    result = invoke("run", "--model", model, *words, *data, "--output", tmp_path / "out")
    assert result.exit_code == 2
    assert says in result.stderr
    assert not (tmp_path / "out").exists()


def test_fetch_says_what_could_not_be_had_and_what_was(tmp_path):
    result = invoke("fetch", "--tasks", "attnres_humaneval", "--data", tmp_path)
    assert result.exit_code == 0
    assert "openai_humaneval/test.parquet" in result.stdout
    result = invoke("fetch", "--tasks", "attnres_cmath", "--data", tmp_path)  # no hub in tests
    assert result.exit_code == 2
    assert "attnres_cmath: Couldn't reach 'weitianwen/cmath' on the Hub" in result.stderr


@pytest.mark.slow
def test_the_harness_alone_runs_our_tasks(save_model, tmp_path):
    command = [
        *(sys.executable, "-m", "lm_eval", "run", "--model", "hf", "--include_path", str(TASKS), "--limit", "2"),
        *("--model_args", f"pretrained={save_model()},trust_remote_code=True,max_length=256", "--device", "cpu"),
        *("--tasks", "attnres_perplexity", "--output_path", str(tmp_path)),
    ]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "bits_per_byte" in process.stdout


def test_responses_are_kept_within_a_task(save_model, data_folder, tmp_path, monkeypatch):
    settings = Settings(**{**vars(SHORT), "cache": True})
    subjects = subjects_of([save_model()], None)
    benchmarks, (first,) = run(subjects, NAMES[:2], settings, tmp_path, data_folder)
    for name in NAMES[:2]:
        (tmp_path / "Llama" / f"{name}.json").unlink()
    monkeypatch.setattr(HFLM, "_model_call", None)
    monkeypatch.setattr(HFLM, "_model_generate", None)
    _, (again,) = run(subjects, NAMES[:2], settings, tmp_path, data_folder)
    assert compare(benchmarks, [again]) == compare(benchmarks, [first])
