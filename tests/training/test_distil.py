"""Distillation: its loss, going on after a stop, and a student of the base family that loads without this library."""

import json
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from tests.families import BY_NAME
from training.data import hold_out, read_documents
from training.distil import Distillation, distil_model
from training.options import Arguments

from .conftest import refused, succeed, words


QUICK = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
    "disable_tqdm": True,
    "save_strategy": "no",
    "use_cpu": True,
}


@pytest.fixture
def base(tokenizer, tmp_path):
    """The folder of a student: a tiny Llama with its tokenizer."""
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    return tmp_path / "base"


@pytest.fixture
def teacher(save_model):
    """The folder of a tiny model with Attention Residuals of other weights, its queries not zero."""
    return save_model(seed=3)


def command(base, teacher, data, output, *flags, **arguments):
    options = QUICK | arguments
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    start = ["distil", "--model", base, "--teacher", teacher, "--data", data, "--output", output, "--length", "32"]
    return [*start, *flags, *given]


def run(*args, **kwargs):
    succeed(*command(*args, **kwargs))
    return json.loads((Path(args[3]) / "result.json").read_text())


def losses(result):
    return [entry["loss"] for entry in result["log"] if "loss" in entry]


def plain_loss(student, teacher, rows, temperature, cross_entropy):
    """The loss of rows without padding or packing, token by token, in float64."""
    total, tokens = 0.0, 0
    for ids in rows:
        with torch.no_grad():
            own, taught = (model(torch.tensor([ids])).logits[0, :-1] for model in (student, teacher))
        for place, (one, other) in enumerate(zip(own, taught, strict=True)):
            p, q = (other / temperature).softmax(-1), (one / temperature).softmax(-1)
            total += temperature**2 * (p * (p.log() - q.log())).sum().item()
            total -= cross_entropy * one.log_softmax(-1)[ids[place + 1]].item()
            tokens += 1
    return total / tokens


@pytest.mark.parametrize(("temperature", "cross_entropy"), [(1.0, 0.0), (2.5, 0.3)])
@pytest.mark.parametrize("accumulated", [1, 4])
def test_the_loss_is_the_divergence_from_the_teacher(
    temperature, cross_entropy, accumulated, base, teacher, tokenizer, tmp_path
):
    """Of the first step, over texts of different lengths in one batch or in several."""
    texts = [words(5 + 3 * seed, seed) for seed in range(4)]
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, words(12, 9)]))
    student, taught = (AutoModelForCausalLM.from_pretrained(path, dtype=torch.float64) for path in (base, teacher))
    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    expected = plain_loss(student, taught, rows, temperature, cross_entropy)
    held_out = 13 / (sum(map(len, rows)) + 13)  # the last text
    flags = ["--no-packed", "--held-out", held_out, "--temperature", temperature, "--cross-entropy", cross_entropy]
    how = {"per_device_train_batch_size": 4 // accumulated, "gradient_accumulation_steps": accumulated}
    found = run(base, teacher, data, tmp_path / "out", *flags, "--lora", "full", max_steps=1, **how)
    assert found["rows"] == {"training": 4, "held_out": 1}
    assert losses(found) == [pytest.approx(expected, rel=1e-5)]


@pytest.mark.parametrize("lora", ["full", "all-linear"])
def test_a_student_comes_near_its_teacher(lora, base, teacher, text_file, tmp_path):
    result = run(base, teacher, text_file, tmp_path / "out", "--lora", lora, max_steps=30, learning_rate=1e-2)
    assert losses(result)[-1] < 0.7 * losses(result)[0]
    model = tmp_path / "out/model"
    before, after = (load_file(path / "model.safetensors") for path in (base, model))
    assert before.keys() == after.keys()
    assert any(not torch.equal(before[name], after[name]) for name in before)
    assert json.loads((model / "config.json").read_text())["model_type"] == "llama"
    for name, path in (("before", base), ("after", model), ("teacher", teacher)):
        assert result["held_out_loss"][name] == pytest.approx(held_out_loss(path, text_file), rel=1e-5)


def test_a_student_loads_without_this_library(base, teacher, text_file, tmp_path, run_isolated):
    run(base, teacher, text_file, tmp_path / "out", max_steps=1)
    model = str(tmp_path / "out/model")
    printed = run_isolated(
        "from transformers import AutoModelForCausalLM, AutoTokenizer\n"
        f"model = AutoModelForCausalLM.from_pretrained({model!r}, trust_remote_code=False)\n"
        f"tokenizer = AutoTokenizer.from_pretrained({model!r})\n"
        "print(type(model).__name__, tokenizer.decode([7]))"
    )
    assert "LlamaForCausalLM w1" in printed


def held_out_loss(model, data):
    """The loss of the text that is held out, a piece at a time, in float64."""
    _, documents = hold_out(read_documents([data], AutoTokenizer.from_pretrained(model)), 0.05)
    pieces = [piece.ids for document in documents for piece in document.cut(32)]
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    with torch.no_grad():
        chances = [exact(torch.tensor([ids])).logits[0, :-1].log_softmax(-1) for ids in pieces]
    return -torch.cat([chance[range(len(ids) - 1), ids[1:]] for chance, ids in zip(chances, pieces)]).mean().item()


@pytest.mark.parametrize("lora", ["full", "attention"])
def test_a_run_that_was_stopped_goes_on(lora, base, teacher, text_file, tmp_path):
    saving = {"save_strategy": "steps", "save_steps": 1}
    expected = run(base, teacher, text_file, tmp_path / "whole", "--lora", lora, **saving)
    whole = tmp_path / "whole"
    shutil.copytree(whole, tmp_path / "stopped")
    for name in ("model", "checkpoint-2", "checkpoint-3"):
        shutil.rmtree(tmp_path / "stopped" / name)
    found = run(base, teacher, text_file, tmp_path / "stopped", "--lora", lora, "--resume", **saving)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)
    stopped, uninterrupted = (load_file(tmp_path / name / "model/model.safetensors") for name in ("stopped", "whole"))
    for name, value in uninterrupted.items():
        torch.testing.assert_close(stopped[name], value, rtol=1e-5, atol=1e-6)
    shutil.rmtree(tmp_path / "stopped/model")
    other = command(base, teacher, text_file, tmp_path / "stopped", "--lora", lora, "--temperature", "2", "--resume")
    refused("--resume: temperature is 2.0, expected 1.0", *other)


def test_what_cannot_work_is_refused_before_a_model_is_loaded(
    base, teacher, save_model, text_file, tmp_path, monkeypatch
):
    monkeypatch.setattr("training.distil.load_weights", lambda *_, **__: pytest.fail("a model was loaded"))

    def refuse(message, *flags, base=base, teacher=teacher, **arguments):
        refused(message, *command(base, teacher, text_file, tmp_path / "out", *flags, **arguments))

    refuse("has Attention Residuals; expected a model of the base family", base=teacher)
    refuse("vocab_size 200, expected 99", teacher=save_model("Qwen3Moe", vocab_size=200))
    refuse("argument --lora: invalid choice: 'none'", "--lora", "none")
    refuse("--temperature must be above 0, got 0.0", "--temperature", "0")
    refuse("--cross-entropy must be 0 or more, got -1.0", "--cross-entropy", "-1")
    refuse("--dora: a kind of LoRA, and --lora full has none", "--lora", "full", "--dora")
    assert not (tmp_path / "out").exists()


def test_tokenizers_that_differ_are_refused(base, teacher, text_file, tmp_path):
    file = teacher / "tokenizer.json"
    file.write_text(file.read_text().replace('"w1"', '"w1000"'))
    refused("its tokenizer has other tokens", *command(base, teacher, text_file, tmp_path / "out"))
    assert not (tmp_path / "out").exists()


def test_the_function_is_the_command(base, teacher, text_file, tmp_path):
    by_command = run(base, teacher, text_file, tmp_path / "command", "--lora", "full")
    recipe = Distillation(model=str(base), teacher=str(teacher), data=[text_file], lora="full", length=32)
    by_function = distil_model(recipe, Arguments(output_dir=str(tmp_path / "function"), **QUICK))
    assert losses(by_function) == losses(by_command)
