"""The options of `finetune`: in either spelling, in a file, in its help, and refused in one line."""

import json
import sys
from pathlib import Path

import pytest

from common.errors import UserError
from training.__main__ import finetune_options
from training.finetune import Recipe, check_arguments
from training.options import Arguments

from .conftest import refused, succeed
from .test_finetune import QUICK


NEEDED = {"model": "ported", "data": "notes.txt", "output": "tuned"}


def parse(*options) -> tuple[Recipe, Arguments]:
    return finetune_options().parse(list(map(str, options)))[:2]


def as_options(fields: dict) -> list[str]:
    return [part for name, value in fields.items() for part in (f"--{name}", str(value))]


def write(path: Path, fields: dict) -> Path:
    """JSON is YAML, too."""
    path.write_text(json.dumps(fields))
    return path


@pytest.mark.parametrize("mark", ["-", "_"])
def test_both_spellings_say_the_same(mark):
    options = {"depth_lr": 0.5, "held_out": 0.25, "max_steps": 7, "learning_rate": 0.125}
    spelled = {name.replace("_", mark): value for name, value in options.items()}
    recipe, arguments = parse(*as_options(NEEDED | spelled), f"--trust{mark}remote{mark}code", f"--no{mark}packed")
    assert recipe == Recipe(
        model="ported", data=[Path("notes.txt")], depth_lr=0.5, held_out=0.25, packed=False, trust_remote_code=True
    )
    assert (arguments.max_steps, arguments.learning_rate, arguments.output_dir) == (7, 0.125, "tuned")


@pytest.mark.parametrize(
    ("flags", "expected"),
    [
        ([], {"depth": None, "control": False, "dora": False, "packed": True}),
        (["--depth", "--control", "--dora"], {"depth": True, "control": True, "dora": True}),
        (["--no-depth", "--no-packed"], {"depth": False, "packed": False}),
        (["--depth", "False", "--packed", "False"], {"depth": False, "packed": False}),
        (["--data", "b", "c", "--data", "d"], {"data": [Path(name) for name in ("notes.txt", "b", "c", "d")]}),
        (["--quantise", "4bit", "--lora", "experts"], {"quantise": "4bit", "lora": "experts"}),
    ],
)
def test_flags_and_choices(flags, expected):
    recipe, _ = parse(*as_options(NEEDED), *flags)
    assert {name: getattr(recipe, name) for name in expected} == expected


def test_the_defaults_of_arguments_are_ours_on_the_command_line_and_in_python():
    recipe, parsed = parse(*as_options(NEEDED))
    made = Arguments(output_dir="tuned")
    assert recipe == Recipe(model="ported", data=[Path("notes.txt")])
    for name, expected in {
        "logging_nan_inf_filter": False,
        "remove_unused_columns": False,
        "resume_from_checkpoint": False,
        "fsdp": False,
    }.items():
        assert getattr(parsed, name) is getattr(made, name) is expected
    assert parse(*as_options(NEEDED), "--resume")[1].resume_from_checkpoint is True
    assert parse(*as_options(NEEDED), "--remove_unused_columns", "True")[1].remove_unused_columns is True


@pytest.mark.parametrize("name", ["recipe.yaml", "recipe.yml", "recipe.json"])
def test_a_file_of_options_is_what_they_are_on_the_command_line(name, tmp_path):
    fields = NEEDED | {
        "data": ["a.txt", "b.txt"],
        "depth-lr": 0.5,
        "depth": False,
        "packed": False,
        "quantise": None,
        "resume": True,
        "fsdp": False,
        "activation_checkpointing": True,
        "activation_checkpointing_kwargs": {"use_reentrant": False},
    }
    recipe, arguments = parse(write(tmp_path / name, fields))
    assert recipe == Recipe(
        model="ported", data=[Path("a.txt"), Path("b.txt")], depth_lr=0.5, depth=False, packed=False
    )
    assert (arguments.output_dir, arguments.resume_from_checkpoint, arguments.fsdp) == ("tuned", True, False)
    assert arguments.activation_checkpointing_kwargs == {"use_reentrant": False}


def test_yaml_as_people_write_it(tmp_path):
    (tmp_path / "recipe.yaml").write_text(
        "# what YAML takes for a text\nmodel: ported\ndata: notes.txt\noutput: tuned\ndepth_lr: 1e-3\nbf16: no\n"
    )
    recipe, arguments = parse(tmp_path / "recipe.yaml")
    assert (recipe.depth_lr, arguments.bf16) == (1e-3, False)


def test_options_override_the_file_before_them(tmp_path):
    file = write(tmp_path / "recipe.yaml", NEEDED | {"rank": 4, "depth": True, "max-steps": 3, "seed": 5})
    recipe, arguments = parse(file, "--data", "other.txt", "--no-depth", "--max_steps", 9, "--output=elsewhere")
    assert recipe == Recipe(model="ported", data=[Path("other.txt")], rank=4, depth=False)
    assert (arguments.max_steps, arguments.seed, arguments.output_dir) == (9, 5, "elsewhere")


BROKEN_FILES = {
    "an unknown option": ("recipe.yaml", "model: a\ndata: b\noutput: c\nrnak: 8", "recipe.yaml.*unknown: --rnak=8"),
    "a wrong type": ("recipe.yaml", "rank: many", "recipe.yaml.*argument --rank: invalid int value: 'many'"),
    "a wrong choice": ("recipe.json", '{"lora": "all"}', "recipe.json.*argument --lora: invalid choice: 'all'"),
    "nothing needed": ("recipe.yaml", "rank: 8", "recipe.yaml.*required: --model, --data, --output"),
    "a list": ("recipe.yaml", "- rank", r"recipe.yaml: expected options as 'name: value', found \"\['rank'\]\""),
    "nothing": ("recipe.yaml", "", "recipe.yaml: expected options"),
    "no YAML": ("recipe.yaml", "rank: [8", "recipe.yaml cannot be read"),
    "no JSON": ("recipe.json", "rank: 8", "recipe.json as JSON cannot be read"),
    "a key that comes twice": ("recipe.json", '{"rank": 1, "rank": 2}', "recipe.json: 'rank' is named twice"),
    "an object of Python": ("recipe.yaml", "rank: !!python/object/apply:os.getpid []", "recipe.yaml cannot be read"),
}


@pytest.mark.parametrize("name", BROKEN_FILES)
def test_files_that_are_no_options_are_named(name, tmp_path):
    file, content, message = BROKEN_FILES[name]
    (tmp_path / file).write_text(content)
    refused(message, "finetune", tmp_path / file)
    refused("missing.yaml is missing", "finetune", tmp_path / "missing.yaml")
    refused("folder.yaml is no file but a folder", "finetune", folder(tmp_path / "folder.yaml"))


def folder(path: Path) -> Path:
    path.mkdir()
    return path


def test_options_that_are_wrong_are_refused_in_one_line():
    needed = as_options(NEEDED)
    refused("required: --model, --data, --output", "finetune")
    refused("argument --rank: invalid int value: 'many'", "finetune", *needed, "--rank", "many")
    refused("argument --lora: invalid choice: 'all'", "finetune", *needed, "--lora", "all")
    refused("argument --depth_lr/--depth-lr: invalid float", "finetune", *needed, "--depth-lr", "fast")
    refused("unknown: --max_step 3", "finetune", *needed, "--max_step", 3)  # no abbreviations
    refused("unknown: stray", "finetune", *needed, "--dora", "True", "stray")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--bf16-full-eval", True, "--use-cpu", True], "--bf16_full_eval: it would round the weights that are saved"),
        (["--save-only-model", True], "--save_only_model: no run could go on from such checkpoints"),
        (["--resume", True, "--train-sampling-strategy", "group_by_length"], "rows would come in another order"),
        (["--lr-scheduler-type", "warmup_stable_decay"], "--lr_scheduler_type warmup_stable_decay .*num_decay_steps"),
        (["--lr-scheduler-kwargs", '{"min_rate": 0.1}'], "--lr_scheduler_type linear .*min_rate"),
        (["--lora", "experts"], "has no experts"),
        (["--lora", "experts", "--dora", True], "--dora: PEFT adapts experts by LoRA alone"),
        (["--lora", "none", "--no-depth"], "leaves nothing to train"),
    ],
)
def test_what_would_fail_late_is_refused_before_data_is_read(options, message, save_model, tmp_path):
    given = ["--model", save_model(), "--data", tmp_path / "missing.txt", "--output", tmp_path / "out", *options]
    with pytest.raises(UserError, match=message):
        check_arguments(*parse(*given))


def test_the_options_of_another_program_are_not_read(tmp_path, monkeypatch):
    """transformers would take them from a file that is called as the program."""
    (tmp_path / "program.args").write_text("--rank 99")
    monkeypatch.setattr(sys, "argv", [str(tmp_path / "program.py")])
    assert parse(*as_options(NEEDED))[0].rank == 16


def test_help_is_whole(monkeypatch):
    """First ours, then transformers', each with a text, and an example at the end."""
    monkeypatch.setenv("COLUMNS", "300")
    text = succeed("finetune", "--help")
    places = [text.index(f"\n  --{name} ") for name in ("model", "data", "lora", "rank", "max_steps", "seed")]
    assert places == sorted(places)
    assert "--depth_lr DEPTH_LR, --depth-lr DEPTH_LR" in text
    assert "--no_depth, --no-depth" in text
    assert text.rstrip().split("\n")[-1].startswith("Example: python -m training finetune ")
    for action in finetune_options()._actions:
        assert action.help, action.option_strings


def test_finetuning_from_a_file(save_model, text_file, tmp_path):
    output = tmp_path / "out"
    fields = QUICK | {"model": str(save_model()), "data": str(text_file), "output": str(output), "length": 32}
    assert "held-out loss" in succeed("finetune", write(tmp_path / "recipe.yaml", fields), "--max-steps", 1)
    result = json.loads((output / "result.json").read_text())
    assert result["steps"] == 1
    assert result["recipe"]["length"] == 32
