"""Experiments: what is recorded is not made again, and what can be made follows from the records."""

import json
import sys

import pytest

from common.errors import AnswerIsNo
from training.experiment import Experiment, carry_out


# Writes its seed as its result, or fails while there is a file `broken`.
FAKE = """
import pathlib, sys
options = dict(one.removeprefix("--").partition("=")[::2] for one in sys.argv[1:])
folder = pathlib.Path(options["output"])
if (folder.parent.parent / "broken").exists():
    sys.exit("broken")
(folder / "adapter").mkdir(parents=True)
(folder / "adapter" / "seed").write_text(options["seed"])
"""


@pytest.fixture
def experiment(tmp_path):
    """Seeds 3, 1 and 2; and then, with all of them recorded, the best one in the measure again."""

    def plan(records):
        runs = {f"first_{seed}": {"seed": seed} for seed in (3, 1, 2)}
        if runs.keys() <= records.keys():
            best = min(runs, key=lambda name: records[name]["loss"])
            runs[f"again_{runs[best]['seed']}"] = runs[best]
        return runs

    def measure(name, folder):
        return {"loss": int((folder / "adapter" / "seed").read_text()) / 2}

    return Experiment(tmp_path / "runs.jsonl", tmp_path / "runs", (sys.executable, "-c", FAKE), plan, list, measure)


def lines(experiment):
    return [json.loads(line) for line in experiment.records.read_text().splitlines()]


def test_runs_are_made_as_planned_recorded_and_removed(experiment):
    carry_out(experiment, jobs=2)
    expected = {"first_3": 1.5, "first_1": 0.5, "first_2": 1.0, "again_1": 0.5}
    assert lines(experiment) == [{"name": name, "loss": loss} for name, loss in expected.items()]
    assert not any(path.is_dir() for path in experiment.runs.iterdir())
    assert experiment.planned() == {}


def test_it_goes_on_where_it_was_stopped(experiment, tmp_path):
    carry_out(experiment, jobs=2, most=1)
    assert [record["name"] for record in lines(experiment)] == ["first_3"]
    # A run that ended, but was not recorded, is not made again
    (experiment.runs / "first_1" / "adapter").mkdir(parents=True)
    (experiment.runs / "first_1" / "adapter" / "seed").write_text("10")
    (tmp_path / "broken").touch()
    with pytest.raises(AnswerIsNo, match="1 of 2 runs failed"):
        carry_out(experiment, jobs=2)
    (tmp_path / "broken").unlink()
    carry_out(experiment, jobs=2)
    assert {record["name"]: record["loss"] for record in lines(experiment)} == {
        **{"first_3": 1.5, "first_1": 5.0, "first_2": 1.0},
        "again_2": 1.0,
    }
