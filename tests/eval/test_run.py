"""Models through the harness: every family, resuming, failures, the commands' messages and exit status."""

import fcntl
import json
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from contextlib import nullcontext
from pathlib import Path

import pytest
import torch
from lm_eval.models.huggingface import HFLM
from peft import LoraConfig, get_peft_model
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM
from typer.testing import CliRunner

import eval.run
from common.errors import UserError
from conversion.port import Blocks, port_checkpoint
from eval.__main__ import app
from eval.benchmarks import TASKS, EvalError
from eval.run import Settings, Subject, run_benchmarks, subjects_of
from eval.table import compare
from eval.tasks import sandbox
from tests.eval.samples import write_rows
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
    benchmarks, (outcome,) = run_benchmarks(subjects_of([save_model(name)], None), NAMES, SHORT, tmp_path, data_folder)
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
        port_checkpoint(source, tmp_path / name, blocks)
    subjects = subjects_of([source, *(str(tmp_path / name) for name in ports)], None)
    benchmarks, outcomes = run_benchmarks(subjects, NAMES, SHORT, tmp_path / "out", data_folder)
    arc, gsm8k, perplexity = compare(benchmarks, outcomes)
    assert arc.difference.test == gsm8k.difference.test == "the same item for item"
    assert abs(perplexity.difference.value) < 1e-4
    said = [
        {key: text for key, (text,) in items(outcome, "resps").items() if "gsm8k" in key[0]} for outcome in outcomes
    ]
    assert said[0] == said[1] == said[2]


@pytest.mark.parametrize(
    ("family", "batch_sizes"),
    [
        pytest.param("Llama", ("1", "1", "8", "auto"), marks=pytest.mark.exhaustive),
        ("KimiLinear", ("1", "8")),
    ],
)
def test_scores_do_not_depend_on_the_run_or_on_the_batch(family, batch_sizes, save_model, data_folder, tmp_path):
    subjects = subjects_of([save_model(family)], None)
    scored, said = [], []
    for index, batch_size in enumerate(batch_sizes):
        settings = Settings(**{**vars(SHORT), "batch_size": batch_size, "limit": None})
        _, (outcome,) = run_benchmarks(subjects, NAMES[:2], settings, tmp_path / str(index), data_folder)
        scored.append({name: found["results"][name] for name, found in outcome.results.items()})
        said.append({key: value for key, value in items(outcome, "resps").items() if "gsm8k" in key[0]})
    for found in scored[1:]:
        for name, results in scored[0].items():
            numbers = {key: value for key, value in results.items() if isinstance(value, float)}
            assert {key: found[name][key] for key in numbers} == numbers
    assert all(found == said[0] for found in said)


def test_what_has_finished_is_not_run_again(save_model, data_folder, tmp_path, monkeypatch):
    subjects = subjects_of([save_model()], None)
    _, (first,) = run_benchmarks(subjects, NAMES[:1], SHORT, tmp_path, data_folder)
    ran = []
    evaluate = eval.run.simple_evaluate

    def record(model, tasks, **arguments):
        ran.append(tasks)
        return evaluate(model, tasks=tasks, **arguments)

    monkeypatch.setattr(eval.run, "simple_evaluate", record)
    benchmarks, (both,) = run_benchmarks(subjects, NAMES[:2], SHORT, tmp_path, data_folder)
    assert len(ran) == 1
    monkeypatch.setattr(eval.run, "_load", None)  # nothing left: no model is loaded
    _, (again,) = run_benchmarks(subjects, NAMES[:2], SHORT, tmp_path, data_folder)
    assert again.results == both.results
    assert again.results[NAMES[0]] == json.loads(json.dumps(first.results[NAMES[0]]))
    (tmp_path / "Llama" / f"{NAMES[0]}.json").unlink()
    (tmp_path / "Llama" / f"{NAMES[0]}.incomplete").write_text("{")  # what a kill leaves
    monkeypatch.undo()
    _, (mended,) = run_benchmarks(subjects, NAMES[:2], SHORT, tmp_path, data_folder)
    assert compare(benchmarks, [mended]) == compare(benchmarks, [both])


def test_another_process_finds_what_this_one_left(save_model, data_folder, tmp_path, monkeypatch):
    """In another clone, too: settings are told apart by what tasks do, not by where they lie."""
    model, names = save_model(), ["attnres_gpqa_diamond", "attnres_mmlu_pro", "attnres_cmath"]
    clone = tmp_path / "clone"
    for package in ("common", "eval", "modeling_attnres"):
        shutil.copytree(ROOT / package, clone / package, ignore=shutil.ignore_patterns("*.json", "*.png"))
    command = [sys.executable, "-m", "eval", "run", "--model", model, "--tasks", ",".join(names), "--data", data_folder]
    environment = {**os.environ, "PYTHONPATH": str(clone), "PYTHONHASHSEED": "7"}
    subprocess.run([*command, *OPTIONS.split(), tmp_path / "out"], check=True, cwd=clone, env=environment)
    monkeypatch.setattr(eval.run, "_load", None)
    _, (outcome,) = run_benchmarks(subjects_of([model], None), names, SHORT, tmp_path / "out", data_folder)
    assert list(outcome.results) == names


@pytest.mark.parametrize(
    ("change", "key"),
    [
        ({"limit": 1}, "limit"),
        ({"gen_kwargs": "max_gen_toks=5"}, "gen_kwargs"),
        ({"chat_template": True}, "chat_template"),
        ({"model_args": "max_length=256,dtype=bfloat16"}, "model_args"),
        ({"batch_size": "2"}, "batch_size"),
        ({"device": "meta"}, "device"),
        ({"trust_remote_code": True}, "trust_remote_code"),
    ],
)
def test_results_of_other_settings_are_not_taken_for_these(save_model, data_folder, tmp_path, change, key):
    subjects = subjects_of([save_model()], None)
    run_benchmarks(subjects, NAMES[:1], SHORT, tmp_path, data_folder)
    with pytest.raises(EvalError, match=f"has results for another {key} "):
        run_benchmarks(subjects, NAMES[:1], Settings(**{**vars(SHORT), **change}), tmp_path, data_folder)


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "tokenizer.json", "modeling_of_its_own.py"])
def test_results_of_another_model_at_the_same_place_are_not_taken_for_its(save_model, data_folder, tmp_path, name):
    subjects = subjects_of([save_model()], None)
    run_benchmarks(subjects, NAMES[2:], SHORT, tmp_path)
    Path(subjects[0].model, "README.md").touch()  # a card written from these results is no other model
    run_benchmarks(subjects, NAMES[2:], SHORT, tmp_path)
    Path(subjects[0].model, name).touch()
    with pytest.raises(EvalError, match=rf"has results for another files: \S+/{name} ") as raised:
        run_benchmarks(subjects, NAMES[2:], SHORT, tmp_path)
    assert "\n" not in str(raised.value)


def test_results_of_another_adapter_are_not_taken_for_these(save_model, tmp_path, monkeypatch):
    model = save_model()
    adapt(model, tmp_path / "adapter")
    subjects = subjects_of([model], str(tmp_path / "adapter"))
    run_benchmarks(subjects, NAMES[2:], SHORT, tmp_path / "out")
    (tmp_path / "adapter" / "adapter_model.safetensors").touch()
    with pytest.raises(EvalError, match=r"another files: .*adapter_model\.safetensors"):
        run_benchmarks(subjects, NAMES[2:], SHORT, tmp_path / "out")


def test_results_of_another_commit_are_not_taken_for_these(save_model, tmp_path, monkeypatch):
    load, local = eval.run._load, subjects_of([save_model()], None)[0]
    monkeypatch.setattr(eval.run, "_load", lambda subject, settings: load(local, settings))
    for commit in ("a" * 40, "b" * 40):
        snapshot = f"/hub/snapshots/{commit}/config.json"
        monkeypatch.setattr(eval.run, "cached_file", lambda *_, snapshot=snapshot, **__: snapshot)
        refused = pytest.raises(EvalError, match=r"another files: owner/name \('a+', not 'b+'\)")
        with refused if commit[0] == "b" else nullcontext():
            run_benchmarks([Subject("name", "owner/name")], NAMES[2:], SHORT, tmp_path)


@pytest.mark.parametrize(("split", "column"), [("test", "answerKey"), ("train", "question")])
def test_results_of_other_rows_are_not_taken_for_these(save_model, data_folder, tmp_path, split, column):
    data = tmp_path / "data"
    shutil.copytree(data_folder / "allenai", data / "allenai")
    subjects = subjects_of([save_model()], None)
    run_benchmarks(subjects, NAMES[:1], SHORT, tmp_path / "out", data)
    file = data / f"allenai/ai2_arc/ARC-Challenge/{split}.jsonl"
    rows = [json.loads(line) for line in file.read_text().splitlines()]
    rows[0][column] = "A"
    write_rows(file, rows)
    with pytest.raises(EvalError, match="has results for another rows "):
        run_benchmarks(subjects, NAMES[:1], SHORT, tmp_path / "out", data)


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
    _, outcomes = run_benchmarks(subjects_of([broken, sound], None), NAMES[:1], SHORT, tmp_path, data_folder)
    assert list(outcomes[0].failures) == NAMES[:1]
    assert outcomes[1].failures == {}


def adapt(model, folder):
    tuned = get_peft_model(
        AutoModelForCausalLM.from_pretrained(model),
        LoraConfig(target_modules="all-linear", modules_to_save=["attn_res"]),
    )
    for name, parameter in tuned.named_parameters():
        if "lora_B" in name:
            parameter.data.normal_(std=0.5)
    tuned.save_pretrained(folder)


def test_an_adapter_is_one_more_column(save_model, tmp_path, monkeypatch):
    model = Path(save_model())
    adapt(model, tmp_path / "tuned" / "adapter")
    monkeypatch.chdir(model.parent)
    adapter = os.path.relpath(tmp_path / "tuned" / "adapter")
    config = Path(adapter, "adapter_config.json")
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "nowhere/../elsewhere"}))
    subjects = subjects_of([model.name], adapter)
    assert [subject.name for subject in subjects] == ["Llama", "Llama+tuned"]
    benchmarks, outcomes = run_benchmarks(subjects, NAMES[2:], SHORT, tmp_path / "out")
    (row,) = compare(benchmarks, outcomes)
    assert abs(row.difference.value) > 1e-3


def test_an_adapter_of_another_model_is_refused_before_anything_runs(save_model, tmp_path, monkeypatch):
    monkeypatch.setattr(eval.run, "_load", lambda *_: pytest.fail("a model was loaded"))
    model = save_model()
    adapt(model, tmp_path / "adapter")
    file = tmp_path / "adapter" / "adapter_model.safetensors"
    whole = load_file(file)
    query = "base_model.model.model.attn_res.query"
    wider = torch.zeros(whole[query].shape[0], whole[query].shape[1] + 1)
    extra = "base_model.model.model.layers.99.mlp.up_proj.lora_A.weight"
    for tensors, message in (
        (whole | {query: wider}, rf"{query} has shape .*, but {model} implies"),
        ({name: tensor for name, tensor in whole.items() if name != query}, f"{query} is missing, one of 1 "),
        (whole | {extra: torch.zeros(1)}, f"{extra} has no place in"),
    ):
        save_file(tensors, file)
        with pytest.raises(EvalError, match=f"^--adapter {tmp_path}/adapter: {message}"):
            run_benchmarks(subjects_of([model], str(tmp_path / "adapter")), NAMES[2:], SHORT, tmp_path / "out")
    file.write_bytes(b"none")
    with pytest.raises(UserError, match=f"^--adapter {tmp_path}/adapter cannot be read: "):
        run_benchmarks(subjects_of([model], str(tmp_path / "adapter")), NAMES[2:], SHORT, tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("adapter", [False, True])
def test_no_code_beside_one_of_our_checkpoints_is_run(save_model, tmp_path, adapter):
    """Such a folder has code, for use without this library; here the library is used."""
    port_checkpoint(save_model("Llama", "source", base=True), tmp_path / "ported", Blocks(number=3))
    for file in (tmp_path / "ported").glob("*.py"):
        file.write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n" + file.read_text())
    words = []
    if adapter:
        adapt(tmp_path / "ported", tmp_path / "tuned")
        words = ["--adapter", tmp_path / "tuned"]
    (tmp_path / "ran").unlink(missing_ok=True)
    result = invoke(
        "run", "--model", tmp_path / "ported", *words, "--tasks", NAMES[2], *OPTIONS.split(), tmp_path / "out"
    )
    assert result.exit_code == 0, result.output
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("place", ["config.json", "tokenizer_config.json"])
def test_code_of_others_is_run_when_that_is_asked_for(save_model, tmp_path, place):
    model = Path(save_model("Llama", "foreign", base=True))
    (model / "own.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\nraise OSError('own code')\n")
    content = json.loads((model / place).read_text())
    if place == "config.json":
        content |= {"model_type": "foreign", "auto_map": {"AutoConfig": "own.Config"}}
    else:
        content |= {"tokenizer_class": "Own", "auto_map": {"AutoTokenizer": ["own.Own", None]}}
    (model / place).write_text(json.dumps(content))
    arguments = ["run", "--model", model, "--tasks", NAMES[2], *OPTIONS.split(), tmp_path / "out"]
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert f"error: {model} is loaded by code that lies beside it: --trust-remote-code" in result.stderr
    assert not (tmp_path / "ran").exists()
    assert not (tmp_path / "out").exists()
    invoke(*arguments, "--trust-remote-code")
    assert (tmp_path / "ran").exists()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ("--tasks attnres_humaneval", "run code that the model writes: allow it with --confirm-run-unsafe-code"),
        ("--tasks attnres_humaneval_chat --confirm-run-unsafe-code", "attnres_humaneval_chat: asked as in a chat"),
        ("--tasks attnres_nothing", "'attnres_nothing' is no task; ours are attnres_arc_challenge"),
        ("--tasks attnres_gsm8k --data EMPTY", "openai/gsm8k/main/test(.jsonl, .csv, .parquet)"),
        ("--tasks attnres_gsm8k --model /nowhere", "/nowhere holds no config.json"),
        ("--tasks attnres_gsm8k --adapter EMPTY", "holds no adapter_config.json"),
        ("--tasks attnres_gsm8k --adapter a/b --backend vllm", "--adapter works with the back end hf"),
        ("--tasks attnres_gsm8k --model MODEL", "Two models have the same name: Llama, Llama"),
        ("--tasks attnres_gsm8k --model ADAPTER", "holds no config.json; it is an adapter: --adapter"),
        ("--tasks attnres_gsm8k --model FIFO", "model.safetensors is no regular file"),
        ("--tasks attnres_gsm8k --model UNPRINTABLE", "characters that cannot be printed"),
        ("--tasks attnres_gsm8k --model-args nonsense", "--model-args: found 'nonsense', expected KEY=VALUE"),
        ("--tasks attnres_gsm8k --model-args pretrained=x", "--model-args: pretrained is set by --model"),
        (
            "--tasks attnres_gsm8k --model-args trust_remote_code=True",
            "trust_remote_code is set by --trust-remote-code",
        ),
        ("--tasks attnres_gsm8k --gen-kwargs =1", "--gen-kwargs: found '=1', expected KEY=VALUE"),
        ("--tasks attnres_gsm8k --batch-size 0", "--batch-size: found '0', expected a number, auto, or auto:N"),
        ("--tasks attnres_gsm8k --batch-size auto:x", "--batch-size: found 'auto:x'"),
        ("--tasks attnres_gsm8k --device fridge", "--device fridge cannot be read: "),
        ("--tasks attnres_gsm8k --backend fridge", "--backend fridge cannot be read: "),
        ("--tasks attnres_gsm8k --limit 0", "Invalid value for '--limit'"),
        ("--tasks attnres_gsm8k --output MODEL/config.json", "config.json"),
    ],
)
def test_mistakes_are_told_before_a_model_is_loaded(save_model, data_folder, tmp_path, monkeypatch, arguments, says):
    monkeypatch.setattr(eval.run, "_load", None)
    model, empty = save_model(), tmp_path / "empty"
    folders = {"MODEL": model, "EMPTY": str(empty), "ADAPTER": str(tmp_path / "adapter")}
    folders |= {"FIFO": str(tmp_path / "fifo"), "UNPRINTABLE": str(tmp_path / "a\nb")}
    for name in ("empty", "adapter", "fifo", "a\nb"):
        (tmp_path / name).mkdir()
    (tmp_path / "adapter" / "adapter_config.json").touch()
    shutil.copy(Path(model, "config.json"), tmp_path / "fifo")
    shutil.copy(Path(model, "config.json"), tmp_path / "a\nb")
    os.mkfifo(tmp_path / "fifo" / "model.safetensors")
    words = [re.sub("[A-Z]{4,}", lambda found: folders[found[0]], word) for word in arguments.split()]
    data = [] if "--data" in words else ["--data", data_folder]
    output = [] if "--output" in words else ["--output", tmp_path / "out"]
    result = invoke("run", "--model", model, *words, *data, *output)
    assert result.exit_code == 2, result.output
    assert says in result.stderr
    assert result.stderr.count("\n") == 1 or "Usage" in result.stderr or "missing" in result.stderr
    assert not list(tmp_path.glob("out/**/*.*"))


GARBAGE = {
    "a list": lambda content: [content],
    "nothing": lambda content: None,
    "no settings": lambda content: {"lm_eval": content["lm_eval"]},
    "settings of a wrong type": lambda content: content | {"settings": []},
    "no samples": lambda content: content | {"lm_eval": {"results": content["lm_eval"]["results"]}},
    "samples of a wrong type": lambda content: (
        content | {"lm_eval": content["lm_eval"] | {"samples": {NAMES[2]: [[1]]}}}
    ),
    "no score": lambda content: content | {"lm_eval": content["lm_eval"] | {"results": {NAMES[2]: {}}}},
}


def test_results_of_a_wrong_shape_are_refused_and_left(save_model, tmp_path):
    arguments = ["run", "--model", save_model(), "--tasks", NAMES[2], *OPTIONS.split(), tmp_path]
    assert invoke(*arguments).exit_code == 0
    file = tmp_path / "Llama" / f"{NAMES[2]}.json"
    content = json.loads(file.read_text())
    texts = {name: json.dumps(change(content)) for name, change in GARBAGE.items()}
    texts |= {"no JSON": "{", "no text": "\ud800", "deep": "[" * 10**5, "empty": ""}
    for name, text in texts.items():
        file.write_bytes(text.encode(errors="surrogatepass"))
        result = invoke(*arguments)
        assert (result.exit_code, result.stderr.count("\n")) == (2, 1), (name, result.output)
        assert str(file) in result.stderr, name
        assert file.read_bytes() == text.encode(errors="surrogatepass")
    file.unlink()
    os.mkfifo(file)
    assert "is no regular file" in invoke(*arguments).stderr


@pytest.mark.parametrize("what", ["--model-args=dtype=float99", "--model-args=fridge=1"])
def test_where_nothing_could_be_run_the_status_is_2(save_model, tmp_path, what):
    result = invoke("run", "--model", save_model(), "--tasks", NAMES[2], what, "--device", "cpu", "--output", tmp_path)
    assert result.exit_code == 2
    assert "error: Nothing could be run. Llama: " in result.stderr
    assert "Traceback" not in result.output
    assert not list(tmp_path.rglob("*.*"))


def test_a_disk_that_is_full_leaves_nothing_partial(save_model, tmp_path):
    model = save_model()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        result = invoke("run", "--model", model, "--tasks", NAMES[2], *OPTIONS.split(), tmp_path)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert result.exit_code == 2
    assert "error: " in result.stderr
    assert "File too large" in result.stderr
    assert not list(tmp_path.rglob("*.*"))


def test_two_at_one_place_do_not_mix(save_model, tmp_path):
    arguments = ["run", "--model", save_model(), "--tasks", NAMES[2], *OPTIONS.split(), tmp_path]
    folder = tmp_path / "Llama"
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    fcntl.flock(descriptor, fcntl.LOCK_EX)  # as the first one does
    result = invoke(*arguments, "--cache")
    assert result.exit_code == 2
    assert result.stderr.strip() == (
        f"error: {folder}: another process is evaluating this model; choose another --output."
    )
    assert list(folder.iterdir()) == []
    os.close(descriptor)
    assert invoke(*arguments).exit_code == 0


@pytest.mark.slow
def test_a_run_that_is_killed_is_picked_up(save_model, data_folder, tmp_path):
    """Killed as it starts, and between benchmarks."""
    model, names = save_model(), ",".join(NAMES[1:])
    command = [sys.executable, "-m", "eval", "run", "--model", model, "--tasks", names, "--data", str(data_folder)]
    command += [*OPTIONS.split(), str(tmp_path / "out"), "--cache"]
    quiet = {"cwd": ROOT, "stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL}
    moments = [lambda: (tmp_path / "out/Llama").exists(), lambda: list(tmp_path.glob("out/Llama/*.json"))]
    for moment in moments:
        process = subprocess.Popen(command, **quiet)
        while process.poll() is None and not moment():
            time.sleep(0.01)
        process.kill()
        process.wait()
    result = invoke(*command[3:])
    assert result.exit_code == 0, result.output
    fresh = invoke(*command[3:-2], tmp_path / "fresh")
    assert (tmp_path / "out/table.md").read_text() == (tmp_path / "fresh/table.md").read_text()
    assert fresh.exit_code == 0
    assert not list(tmp_path.rglob(".*"))


def test_code_runs_without_isolation_only_when_that_is_confirmed(save_model, data_folder, tmp_path, monkeypatch):
    arguments = ["run", "--model", save_model(), "--tasks", "attnres_humaneval", "--data", data_folder]
    arguments += [*OPTIONS.split(), tmp_path / "out", "--confirm-run-unsafe-code"]
    monkeypatch.setattr(sandbox, "_isolation", lambda: (None, "unshare: not today"))
    monkeypatch.setattr(sandbox, "_without_isolation", lambda why: None)
    load, seen = eval.run._load, []

    def load_and_look(subject, settings):
        seen.append(os.environ[sandbox.CONFIRM])
        return load(subject, settings)

    monkeypatch.setattr(eval.run, "_load", None)
    result = invoke(*arguments)
    assert result.exit_code == 2
    assert "error: This system gives generated code no isolation (unshare: not today)" in result.stderr
    assert not (tmp_path / "out").exists()
    monkeypatch.setattr(eval.run, "_load", load_and_look)
    result = invoke(*arguments, "--confirm-no-isolation")
    assert result.exit_code == 0, result.output
    assert seen == ["1"]
    assert sandbox.CONFIRM not in os.environ


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
        *("--model_args", f"pretrained={save_model(base=True)},max_length=256", "--device", "cpu"),
        *("--tasks", "attnres_perplexity", "--output_path", str(tmp_path)),
    ]
    process = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path)
    assert process.returncode == 0, process.stderr
    assert "bits_per_byte" in process.stdout


def test_responses_are_kept_within_a_task(save_model, data_folder, tmp_path, monkeypatch):
    settings = Settings(**{**vars(SHORT), "cache": True})
    subjects = subjects_of([save_model()], None)
    benchmarks, (first,) = run_benchmarks(subjects, NAMES[:2], settings, tmp_path, data_folder)
    for name in NAMES[:2]:
        (tmp_path / "Llama" / f"{name}.json").unlink()
    monkeypatch.setattr(HFLM, "_model_call", None)
    monkeypatch.setattr(HFLM, "_model_generate", None)
    _, (again,) = run_benchmarks(subjects, NAMES[:2], settings, tmp_path, data_folder)
    assert compare(benchmarks, [again]) == compare(benchmarks, [first])


def test_responses_are_those_of_the_model_that_is_there(save_model, tmp_path):
    settings = Settings(**{**vars(SHORT), "cache": True})
    model = save_model()
    subjects = subjects_of([model], None)
    benchmarks, (first,) = run_benchmarks(subjects, NAMES[2:], settings, tmp_path / "out")
    retrained = AutoModelForCausalLM.from_pretrained(model)
    retrained.lm_head.weight.data.mul_(2)
    retrained.save_pretrained(model)
    (tmp_path / "out/Llama" / f"{NAMES[2]}.json").unlink()
    _, (again,) = run_benchmarks(subjects, NAMES[2:], settings, tmp_path / "out")
    _, (fresh,) = run_benchmarks(subjects, NAMES[2:], SHORT, tmp_path / "fresh")
    assert compare(benchmarks, [again]) == compare(benchmarks, [fresh]) != compare(benchmarks, [first])


def test_damaged_responses_are_named(save_model, tmp_path):
    arguments = ["run", "--model", save_model(), "--tasks", NAMES[2], *OPTIONS.split(), tmp_path, "--cache"]
    assert invoke(*arguments).exit_code == 0
    (tmp_path / "Llama" / f"{NAMES[2]}.json").unlink()
    (responses,) = tmp_path.glob("Llama/responses*")
    for content in (responses.read_bytes()[:5000], b"garbage" * 1000):
        responses.write_bytes(content)
        result = invoke(*arguments)
        assert result.exit_code == 2
        assert f"{responses} cannot be read: " in result.stderr
        assert responses.read_bytes() == content
