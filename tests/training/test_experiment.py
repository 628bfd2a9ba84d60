"""Experiments: what is recorded is not made again, and what can be made follows from the records."""

import dataclasses
import hashlib
import json
import sys

import numpy as np
import pytest
from scipy import stats

from common.errors import AnswerIsNo, UserError
from training.experiment import MADE_OF, Experiment, carry_out, paired_interval, read_records


# Writes its seed as its result, or fails while there is a file `broken` with its seed.
FAKE = """
import pathlib, sys
options = dict(one.removeprefix("--").partition("=")[::2] for one in sys.argv[1:])
folder = pathlib.Path(options["output"])
broken = folder.parent.parent / "broken"
if broken.exists() and broken.read_text() == options["seed"]:
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

    data = tmp_path / "data.txt"
    data.write_text("some text")
    command = (sys.executable, "-c", FAKE)
    return Experiment(tmp_path / "runs.jsonl", tmp_path / "runs", command, [data], {"length": 4}, plan, list, measure)


def lines(experiment):
    records = read_records(experiment.records).values()
    return [{name: value for name, value in record.items() if name != "options"} for record in records]


def test_runs_are_made_as_planned_recorded_and_removed(experiment):
    carry_out(experiment, jobs=1)
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
    (tmp_path / "broken").write_text("1")
    carry_out(experiment, jobs=2, most=1)
    assert [record["name"] for record in lines(experiment)] == ["first_3", "first_1"]
    carry_out(experiment, jobs=2)
    assert {record["name"]: record["loss"] for record in lines(experiment)} == {
        **{"first_3": 1.5, "first_1": 5.0, "first_2": 1.0},
        "again_2": 1.0,
    }


def test_a_run_that_fails_keeps_no_other_from_being_made(experiment, tmp_path):
    (tmp_path / "broken").write_text("3")
    for _ in range(2):
        with pytest.raises(AnswerIsNo, match=r"1 of \d runs failed"):
            carry_out(experiment, jobs=1)
        assert [record["name"] for record in lines(experiment)] == ["first_1", "first_2"]
    (tmp_path / "broken").unlink()
    carry_out(experiment, jobs=1)
    assert [record["name"] for record in lines(experiment)] == ["first_1", "first_2", "first_3", "again_1"]


def test_runs_of_other_data_or_options_are_not_added(experiment):
    carry_out(experiment, jobs=1, most=1)
    made_of = json.loads(experiment.records.read_text().splitlines()[0])
    digest = hashlib.sha256(b"some text").hexdigest()
    assert made_of == {"name": MADE_OF, "data": {"data.txt": digest}, "options": {"length": 4}}
    before = experiment.records.read_bytes()
    with pytest.raises(UserError, match=r"another length: 4, not 8\. Move it away to start anew"):
        carry_out(dataclasses.replace(experiment, options={"length": 8}), jobs=1)
    experiment.data[0].write_text("other text")
    with pytest.raises(UserError, match=f"another data.txt: {digest}, not [0-9a-f]{{64}}. Move it away"):
        carry_out(experiment, jobs=1)
    assert experiment.records.read_bytes() == before


def test_a_recorded_run_of_other_options_is_not_taken_for_the_planned_one(experiment):
    carry_out(experiment, jobs=1, most=1)
    changed = dataclasses.replace(experiment, plan=lambda records: {"first_3": {"seed": 4}})
    with pytest.raises(UserError, match="first_3 was run with seed = 3, not 4"):
        carry_out(changed, jobs=1)


def test_the_interval_is_that_of_a_paired_t_test():
    one, other = np.random.default_rng(0).normal(size=(2, 5))
    mean, half = paired_interval(one - other)
    low, high = stats.ttest_rel(one, other).confidence_interval()
    assert (mean - half, mean + half) == pytest.approx((low, high))
    assert paired_interval([0.5]) == (0.5, None)
