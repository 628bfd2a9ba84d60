"""Many runs of `pretrain` from one file: a grid of options, run some at a time, each skipped, resumed or started."""

import contextlib
import fcntl
import itertools
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

from tqdm import tqdm

from common.errors import AnswerIsNo, UserError, one_line
from common.files import hold_folder, whole_file
from conversion.checkpoint import read_json

from .loading import TrainingError
from .options import as_command, read_options, underscored
from .pretrain import MODEL


PRETRAIN, FINETUNE = ((sys.executable, "-m", "training", command) for command in ("pretrain", "finetune"))
OWN = ("output", "output_dir", "resume", "resume_from_checkpoint")  # options that the sweep gives itself


@dataclass(frozen=True)
class Sweep:
    """Runs to be made.

    Args:
        output: the folder for a folder, a log (`.log`) and the options (`.json`) of every run.
        runs: the options of each by its name.
        last: what a run writes last of all, one of these.
    """

    output: Path
    runs: dict[str, dict[str, object]]
    last: tuple[str, ...] = (MODEL,)

    def log(self, name: str) -> Path:
        """Return where a run writes what it would print."""
        return self.output / f"{name}.log"

    def is_finished(self, name: str) -> bool:
        """Say whether a run has written what it writes last."""
        return any((self.output / name / last).exists() for last in self.last)

    def command_line(self, name: str) -> list[str]:
        """Return a run's options as its command takes them; with --resume it starts anew where there is nothing."""
        return [*as_command(self.runs[name]), f"--output={self.output / name}", "--resume"]


def read_sweep(path: Path) -> Sweep:
    """Read the runs in a YAML or JSON file.

    Raises:
        UserError: it cannot be read, or has something else than `output`, `options` and `grid`.
    """
    content = read_options(path)
    output, options, grid = content.get("output"), content.get("options", {}), content.get("grid", {})
    if content.keys() - {"output", "options", "grid"} or not isinstance(output, str):
        raise TrainingError(f"{path}: expected output, options and grid, found {', '.join(content)}.")
    for name, of_name in (("options", options), ("grid", grid)):
        if not isinstance(of_name, dict):
            raise TrainingError(f"{path}: {name}: expected 'name: value', found {str(of_name)[:40]!r}.")
    for axis, values in grid.items():
        named = isinstance(values, dict) and all(isinstance(chosen, dict) for chosen in values.values())
        if not values or not (named or isinstance(values, list)):
            raise TrainingError(f"{path}: {axis}: expected a list of values, or names with options, found {values!r}.")
    sweep = Sweep(Path(output), expand_grid(options, grid))
    for name, run in sweep.runs.items():
        if "/" in name:
            raise TrainingError(f"{path}: {name!r} cannot name a folder; give its options below a name of their own.")
        if given := [option for option in OWN if option in run]:
            raise TrainingError(f"{path}: {given[0]} is no option of a run: each has a folder below output.")
    return sweep


def expand_grid(options: dict[str, object], grid: dict[str, list | dict[str, dict]]) -> dict[str, dict[str, object]]:
    """Make the options of every run: those for all, and a choice from each axis. Lists under one name are joined.

    Example:
        ```python
        from training.sweep import expand_grid

        sizes = {"small": {"set": ["num_hidden_layers=2"]}, "large": {"set": ["num_hidden_layers=8"]}}
        runs = expand_grid({"set": ["vocab_size=512"]}, {"size": sizes, "mode": ["none", "full"]})
        print(runs["size-large_mode-full"])  # {"set": ["vocab_size=512", "num_hidden_layers=8"], "mode": "full"}
        ```
    """
    axes = [
        [(f"{axis}-{name}", values[name] if isinstance(values, dict) else {axis: name}) for name in values]
        for axis, values in grid.items()
    ]
    runs = {}
    for choices in itertools.product(*axes):
        run = {}
        for chosen in (options, *(chosen for _, chosen in choices)):
            for option, value in chosen.items():
                option = underscored(option)
                joined = isinstance(value, list) and isinstance(run.get(option), list)
                run[option] = run[option] + value if joined else value
        runs["_".join(name for name, _ in choices) or "run"] = run
    return runs


def run_sweep(
    sweep: Sweep,
    jobs: int,
    prepare: Callable[[list[str]], object],
    command: tuple[str, ...] = PRETRAIN,
    finished: Callable[[str], object] = lambda name: None,
) -> None:
    """Run what is not finished, `jobs` at a time, each with its share of the cores.

    Killed at any moment, it goes on when it is run again: finished runs are skipped, others resumed.

    Args:
        sweep: the runs.
        jobs: how many at a time.
        prepare: called with the options of each run that is not finished, before any starts, to refuse them.
        command: what makes a run.
        finished: called with the name of each run as it is finished, or is found to be.

    Raises:
        UserError: another sweep works in the folder, a run was begun with other options, or has wrong ones.
        AnswerIsNo: some runs failed, and the others are finished.
    """
    with hold_folder(sweep.output, "another sweep works there."), ending_on_terminate():
        for name, options in sweep.runs.items():
            check_options(sweep.output / f"{name}.json", options)
        for name in sweep.runs:
            if not sweep.is_finished(name):
                try:
                    prepare(sweep.command_line(name))
                except UserError as error:
                    raise TrainingError(f"run {name}: {error}") from error
        failed = run_all(sweep, jobs, command, finished)
    if failed:
        name, status = next(iter(failed.items()))
        *_, last = ["nothing", *filter(str.strip, sweep.log(name).read_text(errors="replace").splitlines())]
        found = f"{sweep.log(name)}, status {status}: {one_line(last)}"
        raise AnswerIsNo(f"{len(failed)} of {len(sweep.runs)} runs failed. {found}")
    print(f"{sweep.output}: {len(sweep.runs)} runs are finished")


def run_all(sweep: Sweep, jobs: int, command: tuple[str, ...], finished: Callable[[str], object]) -> dict[str, int]:
    """Run what is not finished; returns the exit status of what failed."""
    waiting, running, failed = list(sweep.runs), {}, {}
    try:
        with tqdm(total=len(waiting), desc="runs") as bar:
            while waiting or running:
                # Pass over what is finished, and start what there is room for
                for name in list(waiting):
                    if sweep.is_finished(name):
                        waiting.remove(name)
                        finished(name)
                        bar.update()
                    elif len(running) < jobs and (process := start_run(sweep, name, jobs, command)) is not None:
                        waiting.remove(name)
                        running[name] = process
                time.sleep(0.1)
                # See what has ended
                for name in [name for name, process in running.items() if process.poll() is not None]:
                    status = running.pop(name).returncode
                    if sweep.is_finished(name):
                        finished(name)
                    else:
                        failed[name] = status
                    bar.update()
    finally:
        for process in running.values():
            process.terminate()
            process.wait()
    return failed


def start_run(sweep: Sweep, name: str, jobs: int, command: tuple[str, ...]) -> subprocess.Popen | None:
    """Start a run; None where it is still at work for a sweep that was killed.

    Its log is locked. The run has the lock with its output, and so for as long as it lives, whatever becomes of us.
    """
    threads = {"OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // jobs))}
    with open(sweep.log(name), "ab") as log:
        try:
            fcntl.flock(log, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return None
        with whole_file(sweep.output / f"{name}.json") as file:
            file.write_text(json.dumps(sweep.runs[name], indent=1, default=str) + "\n")
        streams = {"stdin": subprocess.DEVNULL, "stdout": log, "stderr": subprocess.STDOUT}
        return subprocess.Popen([*command, *sweep.command_line(name)], env=threads | os.environ, **streams)


def check_options(path: Path, options: dict[str, object]) -> None:
    """Refuse other options than a run was begun with, which are in a file.

    Raises:
        TrainingError: names the options.
    """
    before = read_json(path) if path.exists() else options
    if differing := differing_options(before, options):
        raise TrainingError(f"{path}: this run was begun with another {', '.join(differing)}. Choose another output.")


def differing_options(before: dict[str, object], now: dict[str, object]) -> list[str]:
    """Name the options that differ, as JSON has them."""
    before, now = (json.loads(json.dumps(options, default=str)) for options in (before, now))
    return sorted(name for name in before.keys() | now.keys() if before.get(name) != now.get(name))


@contextlib.contextmanager
def ending_on_terminate() -> Iterator[None]:
    """Have SIGTERM end this process as Ctrl-C does, within the `with` block: its runs are ended, too."""
    before = signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
