"""Sweeps: what is run, what is passed over, what a kill leaves. A command of a few lines stands in for pretrain."""

import json
import os
import signal
import subprocess
import sys
import time

import pytest

from common.errors import AnswerIsNo, UserError
from tests.conftest import ROOT
from tests.training.conftest import refused
from training.loading import TrainingError
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
(folder / "result.json").write_text("{}")
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
    run_sweep(sweep, jobs=2, command=COMMAND)
    for seed in range(3):
        (found,) = starts(sweep.output / f"seed-{seed}")
        assert found.pop("pid")
        threads = str(max(1, os.cpu_count() // 2))
        folder = str(sweep.output / f"seed-{seed}")
        assert found == {"length": "4", "seed": str(seed), "output": folder, "resume": "", "threads": threads}
    run_sweep(sweep, command=COMMAND)
    assert len(starts(sweep.output / "seed-0")) == 1
    more = make_sweep(0, 1, 2, 3, length=4)
    run_sweep(more, command=COMMAND)
    assert [len(starts(more.output / f"seed-{seed}")) for seed in range(4)] == [1, 1, 1, 1]


def test_a_result_beside_something_half_written_is_no_result(make_sweep):
    sweep = make_sweep(0)
    folder = sweep.output / "seed-0"
    (folder / ".model.incomplete").mkdir(parents=True)
    (folder / "result.json").write_text("{}")
    with pytest.raises(AnswerIsNo, match="1 of 1 runs failed"):  # the command here leaves it lying
        run_sweep(sweep, command=COMMAND)
    assert len(starts(folder)) == 1


def test_a_run_that_fails_is_named_when_the_others_are_done(make_sweep):
    sweep = make_sweep(13, 1)
    with pytest.raises(AnswerIsNo, match=r"1 of 2 runs failed. .*seed-13.log, status 1: unlucky"):
        run_sweep(sweep, command=COMMAND)
    assert sweep.is_finished("seed-1")
    with pytest.raises(AnswerIsNo):
        run_sweep(sweep, command=COMMAND)
    assert len(starts(sweep.output / "seed-13")) == 2


def test_other_options_are_refused_before_anything_starts(make_sweep):
    run_sweep(make_sweep(0, length=4), command=COMMAND)
    sweep = make_sweep(1, 0, length=8)
    with pytest.raises(TrainingError, match=r"seed-0.json: this run was begun with another length"):
        run_sweep(sweep, command=COMMAND)
    assert not (sweep.output / "seed-1").exists()


SWEEP_PROCESS = """
import sys
from pathlib import Path
from training.sweep import Sweep, expand_grid, run_sweep
run_sweep(Sweep(Path(sys.argv[1]), expand_grid({}, {"seed": [0, 1]})), 1, (sys.executable, "-c", sys.argv[2]))
"""


@pytest.fixture
def sweep_process(make_sweep):
    """A sweep in a process of its own, whose first run is at work."""
    sweep = make_sweep(0, 1, waiting=True)
    process = subprocess.Popen(
        [sys.executable, "-c", SWEEP_PROCESS, str(sweep.output), FAKE],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stderr=subprocess.DEVNULL,
    )
    try:
        wait_until(lambda: starts(sweep.output / "seed-0"))
        yield sweep, process
    finally:
        (sweep.output / "go").touch()
        process.kill()
        process.wait()


def is_alive(pid: int) -> bool:
    """Whether a process runs; one that has ended may be waiting for its parent to ask."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            return file.read().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


@pytest.mark.slow
def test_terminated_it_ends_its_runs_and_goes_on(sweep_process):
    sweep, process = sweep_process
    with pytest.raises(UserError, match="another sweep works there"):
        run_sweep(sweep, command=COMMAND)
    process.terminate()
    assert process.wait(timeout=20) == 128 + signal.SIGTERM
    (first,) = starts(sweep.output / "seed-0")
    assert not is_alive(first["pid"])
    assert not starts(sweep.output / "seed-1")
    (sweep.output / "go").touch()
    run_sweep(sweep, command=COMMAND)
    assert [len(starts(sweep.output / f"seed-{seed}")) for seed in (0, 1)] == [2, 1]


@pytest.mark.slow
def test_killed_its_run_goes_on_and_is_waited_for(sweep_process):
    sweep, process = sweep_process
    process.kill()
    process.wait()
    (first,) = starts(sweep.output / "seed-0")
    assert is_alive(first["pid"])
    (sweep.output / "go").touch()
    run_sweep(sweep, command=COMMAND)
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
