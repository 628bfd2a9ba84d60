"""A run that ends at any moment goes on or starts anew, as the same run and no other, and alone in its folder."""

import fcntl
import json
import os
import shutil
import signal
from pathlib import Path

import pytest
import torch
from transformers import Trainer

from training import trainer
from training.__main__ import app
from training.checkpoints import all_checkpoints, last_complete_checkpoint

from .conftest import refused, succeed
from .test_finetune import command, losses, saved


SAVING = {"save_strategy": "steps", "save_steps": 2, "max_steps": 5}


def result(output):
    return json.loads((output / "result.json").read_text())


def die(*args, **kwargs):
    os.kill(os.getpid(), signal.SIGKILL)


def die_at(step, method):
    """`method` of a trainer, that kills the process at a step."""

    def dies(self, *args, **kwargs):
        if self.state.global_step == step:
            die()
        return method(self, *args, **kwargs)

    return dies


def die_at_the_second_checkpoint(output, *args):
    if len(all_checkpoints(Path(output))) > 1:
        die()


def run_and_die(monkeypatch, target, name, replacement, args):
    """Run a command in a child process that kills itself where `name` of `target` is called."""
    child = os.fork()
    if child == 0:
        monkeypatch.setattr(target, name, replacement)
        try:
            app(list(map(str, args)), standalone_mode=False)
        finally:
            os._exit(0)
    assert os.waitpid(child, 0)[1] == signal.SIGKILL


KILLS = {  # where, and what is said of it
    "as the first checkpoint is written": (
        (Trainer, "_save_rng_state", die),
        "no checkpoint is complete, starting anew",
    ),
    "as it is to be marked": (
        (trainer, "PartialState", die),
        "no checkpoint is complete, starting anew",
    ),
    "between checkpoints": (
        (Trainer, "training_step", die_at(3, Trainer.training_step)),
        "continuing from checkpoint-2",
    ),
    "as an older checkpoint is removed": (
        (trainer, "rotate_checkpoints", die_at_the_second_checkpoint),
        "continuing from checkpoint-4",
    ),
    "between adapter and result": (
        (trainer, "whole_file", die),
        "continuing from checkpoint-5",
    ),
    "between result and its adapter": (
        (trainer.complete_or_absent.__wrapped__.__globals__["os"], "rename", die),
        "continuing from checkpoint-5",
    ),
}


def test_a_killed_run_goes_on_to_the_same_result(save_model, text_file, tmp_path, monkeypatch):
    model, whole = save_model(), tmp_path / "whole"
    succeed(*command(model, text_file, whole, **SAVING))
    for moment, (where, said) in KILLS.items():
        output = tmp_path / moment
        args = command(model, text_file, output, save_total_limit=1, **SAVING)
        run_and_die(monkeypatch, *where, args)
        assert not (output / "adapter").exists()
        if last_complete_checkpoint(output) is not None:
            refused("holds checkpoints. Continue with --resume", *args)
            args += ["--resume"]
        assert f"{output}: {said}\n" in succeed(*args)
        assert losses(result(output)) == pytest.approx(losses(result(whole)), rel=1e-6)
        assert result(output)["held_out_loss"] == pytest.approx(result(whole)["held_out_loss"], rel=1e-6)
        for name, value in saved(whole).items():
            torch.testing.assert_close(saved(output)[name], value, rtol=1e-6, atol=1e-7)
        assert {path.name for path in output.iterdir()} == {"adapter", "checkpoint-5", "recipe.json", "result.json"}
        refused("this run is finished", *args)


@pytest.mark.parametrize("flags", [[], ["--resume"]])
def test_a_run_whose_first_checkpoint_did_not_fit_starts_anew(flags, save_model, text_file, tmp_path, monkeypatch):
    args = command(save_model(), text_file, tmp_path / "out", **SAVING)
    for error in (OSError(28, "No space left on device"), RuntimeError("PytorchStreamWriter failed writing file")):
        with monkeypatch.context() as patch:
            patch.setattr(Trainer, "_save_rng_state", lambda *_, error=error: (_ for _ in ()).throw(error))
            refused(r"stopped at step 2: .* No checkpoint is complete\.", *args, *flags)
    assert "no checkpoint is complete, starting anew" in succeed(*args, *flags)


OTHERS = {
    "rank": (["--rank", "8"], "rank is 8, expected 16"),
    "targets": (["--lora", "attention"], "lora is 'attention', expected 'all-linear'"),
    "no depth": (["--no-depth"], "depth is False, expected True"),
    "held out": (["--held-out", "0.2"], "held_out is 0.2, expected 0.05"),
    "seed": (["--seed", "7"], "seed is 7, expected 42"),
    "learning rate": (["--learning_rate", "1e-4"], "learning_rate is 0.0001, expected 0.001"),
    "steps": (["--max_steps", "9"], "max_steps is 9, expected 5"),
    "schedule": (["--lr_scheduler_type", "cosine"], "lr_scheduler_type is 'cosine', expected 'constant'"),
}


def test_another_run_does_not_continue_this_one(save_model, text_file, tmp_path, monkeypatch):
    model, output = save_model(), tmp_path / "out"
    args = command(model, text_file, output, **SAVING)
    run_and_die(monkeypatch, trainer, "whole_file", die, args)
    for flags, message in OTHERS.values():
        refused(f"--resume: {message} as .*recipe.json has it", *args, "--resume", *flags)
    other = command(save_model("Mixtral"), text_file, output, **SAVING)
    refused("--resume: model is '.*Mixtral', expected '.*Llama'", *other, "--resume")
    shutil.copy(text_file, tmp_path / "moved.jsonl")
    moved = [tmp_path / "moved.jsonl" if part == str(text_file) else part for part in args]
    text_file.write_text(text_file.read_text().replace("w1 ", "w2 "))
    refused("--resume: data is .*, expected", *args, "--resume")
    assert "continuing from checkpoint-5" in succeed(*moved, "--resume")  # the same texts, elsewhere


@pytest.mark.parametrize("name", ["adapter_model.safetensors", "optimizer.pt", "scheduler.pt", "trainer_state.json"])
def test_a_checkpoint_that_was_damaged_later_is_named(name, save_model, text_file, tmp_path, monkeypatch):
    args = command(save_model(), text_file, tmp_path / "out", **SAVING)
    run_and_die(monkeypatch, trainer, "whole_file", die, args)
    file = tmp_path / "out/checkpoint-5" / name
    file.write_bytes(file.read_bytes()[:50])
    refused("out/checkpoint-5", *args, "--resume")


def test_checkpoints_of_others_are_left_alone(save_model, text_file, tmp_path):
    """Such as those of a Trainer that knows no marks."""
    output = tmp_path / "out"
    (output / "checkpoint-500").mkdir(parents=True)
    for flags in ([], ["--resume"]):
        refused("holds checkpoint-500 of something else", *command(save_model(), text_file, output, *flags))
    assert [path.name for path in output.iterdir()] == ["checkpoint-500"]


def test_a_folder_has_one_run(save_model, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("training.finetune.read_rows", lambda *_, **__: pytest.fail("data was read"))
    (tmp_path / "out").mkdir()
    other = os.open(tmp_path / "out", os.O_RDONLY)
    fcntl.flock(other, fcntl.LOCK_EX)
    refused("out: another process trains there", *command(save_model(), text_file, tmp_path / "out"))
    os.close(other)


def test_an_older_checkpoint_goes_when_the_new_one_is_marked(save_model, text_file, tmp_path, monkeypatch):
    seen, rotate = [], trainer.rotate_checkpoints

    def watch(*args):
        seen.append([(path.name, (path / "complete").exists()) for path in all_checkpoints(tmp_path / "out")])
        return rotate(*args)

    monkeypatch.setattr(trainer, "rotate_checkpoints", watch)
    succeed(*command(save_model(), text_file, tmp_path / "out", save_total_limit=1, **SAVING))
    marked = [(f"checkpoint-{step}", True) for step in (2, 4, 5)]
    assert seen == [marked[:1], marked[:2], marked[1:]]


def test_result_and_adapter_appear_together(save_model, text_file, tmp_path, monkeypatch):
    """Where the adapter does not fit, there is no result either."""
    args = command(save_model(), text_file, tmp_path / "out")
    with monkeypatch.context() as patch:
        full = OSError(28, "No space left on device")
        patch.setattr("peft.PeftModel.save_pretrained", lambda *_, **__: (_ for _ in ()).throw(full))
        refused("stopped at step 3: No space left on device. No checkpoint is complete", *args)
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["recipe.json"]
