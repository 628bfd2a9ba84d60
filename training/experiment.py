"""Experiments whose records are committed: runs are planned from what is recorded, made, measured and removed."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from scipy import stats

from common.files import whole_file

from .checkpoints import hash_file
from .finetune import ADAPTER
from .loading import TrainingError
from .pretrain import MODEL
from .sweep import Sweep, differing_options, run_sweep


MADE_OF = "made of"  # the name of the first record


@dataclass(frozen=True)
class Experiment:
    """Runs, and where they are recorded.

    Args:
        records: the JSON Lines file that a record of every run is added to, after one of what all are made of.
        runs: the folder in which runs are made.
        command: what makes one: `PRETRAIN` or `FINETUNE`.
        data: the files that runs are made of.
        options: those that all runs have.
        plan: returns, from the records by name, the options by name of the runs that can be made now.
        prepare: refuses a run's options, before any starts.
        measure: returns the record of a finished run, from its name and its folder.
    """

    records: Path
    runs: Path
    command: tuple[str, ...]
    data: Sequence[Path]
    options: dict[str, object]
    plan: Callable[[dict[str, dict]], dict[str, dict]]
    prepare: Callable[[list[str]], object]
    measure: Callable[[str, Path], dict]

    def add_record(self, record: dict) -> None:
        """Add a record to the file, which is whole at any moment."""
        before = self.records.read_text() if self.records.exists() else ""
        with whole_file(self.records) as file:
            file.write_text(before + json.dumps(record) + "\n")

    def hold_to_records(self) -> None:
        """Record what the runs are made of, or see that it is what records were made of.

        Raises:
            UserError: data cannot be read, or what is recorded was made of other data or options.
        """
        data = {path.name: hash_file(path) for path in self.data}
        found = {"data": data, "options": self.options}
        recorded = read_all(self.records).get(MADE_OF)
        if recorded is None:
            self.add_record({"name": MADE_OF} | found)
            return
        for kind, values in found.items():
            for name in differing_options(recorded[kind], values):
                before, now = (str(of.get(name))[:80] for of in (recorded[kind], values))
                raise TrainingError(
                    f"{self.records}: its runs were made with another {name}: {before}, not {now}. Move it away to "
                    "start anew."
                )

    def planned(self) -> dict[str, dict]:
        """Return the options of the runs that can be made now and are not recorded, by name.

        Raises:
            TrainingError: a run that is recorded had other options.
        """
        records, waiting = read_records(self.records), {}
        for name, options in self.plan(records).items():
            if name not in records:
                waiting[name] = options
                continue
            before = records[name]["options"]
            for field in differing_options(before, options):
                raise TrainingError(
                    f"{self.records}: {name} was run with {field} = {before.get(field)}, not {options.get(field)}. "
                    "Name it otherwise, or remove its record."
                )
        return waiting

    def record_run(self, runs: dict[str, dict], name: str) -> None:
        """Measure a finished run, record it with its options and remove it."""
        self.add_record({"name": name, "options": runs[name]} | self.measure(name, self.runs / name))
        shutil.rmtree(self.runs / name)


def read_all(path: Path) -> dict[str, dict]:
    """Read a file of records, by name."""
    lines = path.read_text().splitlines() if path.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def read_records(path: Path) -> dict[str, dict]:
    """Read the records of runs, by name: all but that of what they are made of."""
    return {name: record for name, record in read_all(path).items() if name != MADE_OF}


def paired_interval(differences: Sequence[float] | np.ndarray) -> tuple[float, float | None]:
    """Return the mean of paired differences and half of its 95 % interval by Student's t; one pair has no interval."""
    count = len(differences)
    half = float(stats.t.ppf(0.975, count - 1) * stats.sem(differences)) if count > 1 else None
    return float(np.mean(differences)), half


def carry_out(experiment: Experiment, jobs: int, most: int | None = None) -> None:
    """Make runs, `jobs` at a time, until there are none; killed at any moment, it goes on when it is called again.

    Args:
        experiment: what is run.
        jobs: how many at a time.
        most: stop after so many.

    Raises:
        UserError: as `run_sweep`, and where what is recorded was made of something else.
        AnswerIsNo: some runs failed; the others that could be made then are recorded.
    """
    experiment.hold_to_records()
    made = 0
    while (runs := experiment.planned()) and (most is None or made < most):
        names = list(runs)[: None if most is None else most - made]
        print(f"{len(runs)} runs can be made: {', '.join(runs)}", flush=True)
        sweep = Sweep(experiment.runs, {name: runs[name] for name in names}, last=(MODEL, ADAPTER))
        run_sweep(sweep, jobs, experiment.prepare, experiment.command, partial(experiment.record_run, runs))
        made += len(names)
