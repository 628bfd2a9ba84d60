"""Sweeps: what is run, what is passed over, what a kill leaves. A command of a few lines stands in for pretrain."""

import json
import multiprocessing
import os
import signal
import sys
import threading
import time

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import AnswerIsNo, UserError
from tests.conftest import ROOT
from tests.training.conftest import refused, succeed
from training.__main__ import pretrain_options
from training.loading import TrainingError, make_config
from training.pretrain import Pretraining, check_arguments, read_fields
from training.scaling import count_active_parameters
from training.sweep import Sweep, expand_grid, read_sweep, run_sweep


# Writes its options to its folder, a line for every start; is done when there is a file `go` in the folder above.
FAKE = """
import json, os, pathlib, sys, time
options = dict(one.removeprefix("--").partition("=")[::2] for one in sys.argv[1:])
folder = pathlib.Path(options["output"])
folder.mkdir(exist_ok=True)
with open(folder / "starts", "a") as file:
    file.write(json.dumps(options | {"threads": os.environ["OMP_NUM_THREADS"], "pid": os.getpid()}) + "\\n")
if options["seed"] == "13":
    sys.exit("unlucky")
while not (folder.parent / "go").exists():
    time.sleep(0.02)
(folder / "model").mkdir()
"""
COMMAND = (sys.executable, "-c", FAKE)


def starts(folder) -> list[dict]:
    """What a run was started with, each time."""
    file = folder / "starts"
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


def wait_until(condition) -> None:
    for _ in range(1000):
        if condition():
            return
        time.sleep(0.02)
    raise AssertionError("it never came")


@pytest.fixture
def make_sweep(tmp_path):
    """A sweep over seeds, whose runs end at once unless `waiting`."""

    def make(*seeds, waiting=False, **options):
        (tmp_path / "out").mkdir(exist_ok=True)
        if not waiting:
            (tmp_path / "out" / "go").touch()
        return Sweep(tmp_path / "out", expand_grid(options, {"seed": list(seeds)}))

    return make


def test_a_grid_is_every_combination():
    grid = {"size": {"a": {"set": ["x=1"]}, "b": {"set": ["x=2"], "length": 8}}, "mode": ["none", "full"]}
    assert expand_grid({"length": 4, "set": ["y=0"]}, grid) == {
        "size-a_mode-none": {"length": 4, "set": ["y=0", "x=1"], "mode": "none"},
        "size-a_mode-full": {"length": 4, "set": ["y=0", "x=1"], "mode": "full"},
        "size-b_mode-none": {"length": 8, "set": ["y=0", "x=2"], "mode": "none"},
        "size-b_mode-full": {"length": 8, "set": ["y=0", "x=2"], "mode": "full"},
    }
    assert expand_grid({"length": 4}, {}) == {"run": {"length": 4}}


def test_every_run_is_made_once(make_sweep, monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    sweep = make_sweep(0, 1, 2, length=4)
    run_sweep(sweep, 2, list, COMMAND)
    for seed in range(3):
        (found,) = starts(sweep.output / f"seed-{seed}")
        assert found.pop("pid")
        threads = str(max(1, os.cpu_count() // 2))
        folder = str(sweep.output / f"seed-{seed}")
        assert found == {"length": "4", "seed": str(seed), "output": folder, "resume": "", "threads": threads}
    run_sweep(sweep, 1, list, COMMAND)
    assert len(starts(sweep.output / "seed-0")) == 1
    more = make_sweep(0, 1, 2, 3, length=4)
    run_sweep(more, 1, list, COMMAND)
    assert [len(starts(more.output / f"seed-{seed}")) for seed in range(4)] == [1, 1, 1, 1]


def test_a_run_that_fails_is_named_when_the_others_are_done(make_sweep):
    sweep = make_sweep(13, 1)
    with pytest.raises(AnswerIsNo, match=r"1 of 2 runs failed. .*seed-13.log, status 1: unlucky"):
        run_sweep(sweep, 1, list, COMMAND)
    assert sweep.is_finished("seed-1")
    with pytest.raises(AnswerIsNo):
        run_sweep(sweep, 1, list, COMMAND)
    assert len(starts(sweep.output / "seed-13")) == 2


def test_a_wrong_run_is_refused_before_anything_starts(make_sweep):
    sweep = make_sweep(0, 1)

    def prepare(line):
        if "--seed=1" in line:
            raise UserError("not this one")

    with pytest.raises(TrainingError, match="run seed-1: not this one"):
        run_sweep(sweep, 1, prepare, COMMAND)
    assert [path.name for path in sweep.output.iterdir()] == ["go"]


def test_other_options_are_refused_before_anything_starts(make_sweep):
    run_sweep(make_sweep(0, length=4), 1, list, COMMAND)
    sweep = make_sweep(1, 0, length=8)
    with pytest.raises(TrainingError, match=r"seed-0.json: this run was begun with another length"):
        run_sweep(sweep, 1, list, COMMAND)
    assert not (sweep.output / "seed-1").exists()


@pytest.fixture
def sweep_process(make_sweep):
    """A sweep in a process of its own, whose first run is at work."""
    sweep = make_sweep(0, 1, waiting=True)
    process = multiprocessing.get_context("fork").Process(target=run_sweep, args=(sweep, 1, list, COMMAND))
    process.start()
    try:
        wait_until(lambda: starts(sweep.output / "seed-0"))
        yield sweep, process
    finally:
        (sweep.output / "go").touch()
        process.kill()
        process.join()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may be waiting for its parent to ask."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def test_terminated_it_ends_its_runs_and_goes_on(sweep_process):
    sweep, process = sweep_process
    with pytest.raises(UserError, match="another sweep works there"):
        run_sweep(sweep, 1, list, COMMAND)
    process.terminate()
    process.join()
    assert process.exitcode == 128 + signal.SIGTERM
    (first,) = starts(sweep.output / "seed-0")
    assert not is_alive(first["pid"])
    assert not starts(sweep.output / "seed-1")
    (sweep.output / "go").touch()
    run_sweep(sweep, 1, list, COMMAND)
    assert [len(starts(sweep.output / f"seed-{seed}")) for seed in (0, 1)] == [2, 1]


def test_killed_its_run_goes_on_and_is_waited_for(sweep_process):
    sweep, process = sweep_process
    process.kill()
    process.join()
    (first,) = starts(sweep.output / "seed-0")
    assert is_alive(first["pid"])
    threading.Timer(0.5, (sweep.output / "go").touch).start()
    run_sweep(sweep, 1, list, COMMAND)
    assert [len(starts(sweep.output / f"seed-{seed}")) for seed in (0, 1)] == [1, 1]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ({"options": {}}, "expected output, options and grid, found options"),
        ({"output": "out", "gird": {}}, "expected output, options and grid, found output, gird"),
        ({"output": "out", "grid": [1]}, "grid: expected 'name: value'"),
        ({"output": "out", "grid": {"seed": 3}}, "seed: expected a list of values, or names with options, found 3"),
        ({"output": "out", "grid": {"seed": []}}, "seed: expected a list"),
        ({"output": "out", "grid": {"size": {"small": 3}}}, "size: expected a list"),
        ({"output": "out", "grid": {"data": ["a/b"]}}, "'data-a/b' cannot name a folder"),
        ({"output": "out", "options": {"output-dir": "x"}}, "output_dir is no option of a run"),
        ({"output": "out", "options": {"resume": True}}, "resume is no option of a run"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, content, message):
    path = tmp_path / "runs.json"
    path.write_text(json.dumps(content))
    refused(f"runs.json: {message}", "sweep", path)


def test_a_file_of_runs_is_read(tmp_path):
    path = tmp_path / "runs.yaml"
    path.write_text("output: out\noptions:\n  learning-rate: 1e-3\ngrid:\n  mode: [none, full]\n  seed: [0, 1]\n")
    sweep = read_sweep(path)
    assert list(sweep.runs) == ["mode-none_seed-0", "mode-none_seed-1", "mode-full_seed-0", "mode-full_seed-1"]
    assert sweep.runs["mode-full_seed-1"] == {"learning_rate": "1e-3", "mode": "full", "seed": 1}


# The files that come with the project, and the real command

SWEEPS = sorted((ROOT / "training/sweeps").glob("*.yaml"))


@pytest.mark.parametrize("path", SWEEPS, ids=lambda path: path.stem)
def test_every_run_of_a_file_has_options_that_pretrain_takes(path, tmp_path):
    sweep = read_sweep(path)
    for name in sweep.runs:
        recipe, arguments, _ = pretrain_options().parse([*sweep.command_line(name), f"--output={tmp_path / name}"])
        check_arguments(recipe, arguments)


def configs_of(file: str) -> dict:
    """The config of each run of the first seed."""
    found = {}
    for name, options in read_sweep(ROOT / "training/sweeps" / file).runs.items():
        if options["seed"] == 0:
            recipe = Pretraining(config=options["config"], data=[], mode=options["mode"], fields=options["set"])
            found[name] = make_config(recipe.config, read_fields(recipe))
    return found


def test_blocks_are_as_many_as_they_are_called():
    for name, config in configs_of("blocks.yaml").items():
        blocks = name.removeprefix("blocks-").partition("_")[0]
        if blocks.isdecimal():
            assert len(config.attn_res_layout.starts) == int(blocks)
        else:
            assert config.attn_res_mode == blocks


def test_shapes_are_equal_in_size_and_named_by_their_ratio():
    sizes = set()
    for name, config in configs_of("shape.yaml").items():
        assert name.startswith(f"shape-{config.hidden_size / config.num_hidden_layers:.0f}_mode-{config.attn_res_mode}")
        with torch.device("meta"):
            sizes.add(count_active_parameters(AutoModelForCausalLM.from_config(config)))
    assert len(sizes) == 5  # the modes' are the same
    assert max(sizes) / min(sizes) < 1.02


@pytest.mark.slow
def test_the_runs_of_a_sweep_are_what_scaling_reads(text_file, save_model, tmp_path):
    model = save_model(num_hidden_layers=2)
    options = {"config": str(model), "data": [str(text_file)], "shards": str(tmp_path / "shards"), "held_out": 0.2}
    options |= {"length": 16, "learning_rate": 1e-2, "save_strategy": "no", "per_device_train_batch_size": 4}
    grid = {"steps": {"few": {"max_steps": 2}, "more": {"max_steps": 4}}, "mode": ["none"]}
    file = tmp_path / "runs.json"
    file.write_text(json.dumps({"output": str(tmp_path / "out"), "options": options, "grid": grid}))
    assert "2 runs are finished" in succeed("sweep", file, "--jobs", 2)
    assert "2 runs are finished" in succeed("sweep", file)
    result = json.loads((tmp_path / "out/steps-more_mode-none/result.json").read_text())
    assert result["run"]["tokens"] == 4 * 4 * 16
    assert result["run"]["loss"] == result["held_out_loss"]["after"]
    succeed("scaling", tmp_path / "out", "--output", tmp_path / "pictures")
    file.write_text(json.dumps({"output": str(tmp_path / "new"), "options": options | {"length": 1}, "grid": grid}))
    refused("run steps-few_mode-none: --length must be at least 2", "sweep", file)
    assert not (tmp_path / "new").exists()
