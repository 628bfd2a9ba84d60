"""Experiments whose records are committed: runs are planned from what is recorded, made, measured and removed."""

import json
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from scipy import stats

from .finetune import ADAPTER
from .pretrain import MODEL
from .sweep import Sweep, run_sweep


@dataclass(frozen=True)
class Experiment:
    """Runs, and where they are recorded.

    Args:
        records: the JSON Lines file that a record of every run is added to.
        runs: the folder in which runs are made.
        command: what makes one: `PRETRAIN` or `FINETUNE`.
        plan: returns, from the records by name, the options by name of the runs that can be made now.
        prepare: refuses a run's options, before any starts.
        measure: returns the record of a finished run, from its name and its folder.
    """

    records: Path
    runs: Path
    command: tuple[str, ...]
    plan: Callable[[dict[str, dict]], dict[str, dict]]
    prepare: Callable[[list[str]], object]
    measure: Callable[[str, Path], dict]

    def read_records(self) -> dict[str, dict]:
        """Read what is done, by name."""
        lines = self.records.read_text().splitlines() if self.records.exists() else []
        return {record["name"]: record for record in map(json.loads, lines)}

    def add_record(self, record: dict) -> None:
        """Add a record to the file."""
        with self.records.open("a") as file:
            file.write(json.dumps(record) + "\n")

    def planned(self) -> dict[str, dict]:
        """Return the options of the runs that can be made now and are not recorded, by name."""
        records = self.read_records()
        return {name: options for name, options in self.plan(records).items() if name not in records}


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
        UserError: as `run_sweep`.
    """
    made = 0
    while (runs := experiment.planned()) and (most is None or made < most):
        names = list(runs)[: jobs if most is None else min(jobs, most - made)]
        print(f"{len(runs)} runs can be made; now {', '.join(names)}", flush=True)
        sweep = Sweep(experiment.runs, {name: runs[name] for name in names}, last=(MODEL, ADAPTER))
        run_sweep(sweep, jobs, experiment.prepare, experiment.command)
        for name in names:
            experiment.add_record({"name": name} | experiment.measure(name, experiment.runs / name))
            shutil.rmtree(experiment.runs / name)
        made += len(names)
