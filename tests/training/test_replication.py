"""The replication: what it plans from what is recorded, and what its report says of made-up losses."""

import numpy as np
import pytest
import yaml
from scipy import stats

from training.reports.replication.experiment import HERE, plan_runs, run_name
from training.reports.replication.report import compare, runs_at_best_rate


EXPERIMENT = yaml.safe_load((HERE / "experiment.yaml").read_text())
FIRST, *OTHERS = EXPERIMENT["seeds"]


def carry_out(loss):
    """Plan, and record what is planned, until there is nothing left; returns the options of all runs by name."""
    records, made = {}, {}
    while runs := {name: options for name, options in plan_runs(records).items() if name not in records}:
        made |= runs
        records |= {name: {"loss": loss(options["mode"], options["learning_rate"])} for name, options in runs.items()}
    return made


@pytest.mark.parametrize(
    ("best", "tried"),
    [
        (0.006, [0.003, 0.006, 0.012]),
        (0.003, [0.0015, 0.003, 0.006, 0.012]),
        (0.0008, [0.000375, 0.00075, 0.0015, 0.003, 0.006, 0.012]),
        (0.02, [0.003, 0.006, 0.012, 0.024, 0.048]),
    ],
)
def test_rates_go_on_until_the_best_lies_between_two_others(best, tried):
    """Standard residuals are best at 0.006, all others at `best`."""
    made = carry_out(lambda mode, rate: abs(np.log(rate / (0.006 if mode == "none" else best))))
    nearest = min(tried, key=lambda rate: abs(np.log(rate / best)))
    for arm in EXPERIMENT["arms"]:
        rates, chosen = ([0.003, 0.006, 0.012], 0.006) if arm == "none" else (tried, nearest)
        expected = {run_name(arm, rate, FIRST) for rate in rates} | {run_name(arm, chosen, seed) for seed in OTHERS}
        of_arm = run_name(arm, 1, 0).removesuffix("_1_0")
        assert {name for name in made if name.rsplit("_", 2)[0] == of_arm} == expected


def test_arms_differ_from_the_baseline_by_what_the_file_says():
    made = plan_runs({})
    baseline = made[run_name("none", 0.003, FIRST)]
    for arm, options in EXPERIMENT["arms"].items():
        run = made[run_name(arm, 0.003, FIRST)]
        assert {name: run[name] for name in run if run[name] != baseline[name]} == {
            name: value for name, value in options.items() if value != baseline[name]
        }


def test_the_report_pairs_seeds_at_the_best_rates():
    generator = np.random.default_rng(0)
    records, losses = {}, {}
    for arm, best in (("none", 0.006), ("full, 4 heads", 0.003), ("static", 0.0015)):
        for rate in (0.0015, 0.003, 0.006, 0.012):
            for seed in (2, 0, 1) if rate == best else (0,):
                loss = 4 + abs(np.log(rate / best)) + (0.1 if arm == "none" else 0) + 0.02 * generator.normal()
                run = {"arm": arm, "rate": rate, "seed": seed, "loss": loss}
                records[run_name(arm, rate, seed)] = run
                losses.setdefault((arm, rate), {})[seed] = loss
    chosen = runs_at_best_rate(records, EXPERIMENT)
    assert chosen.keys() == {"none", "full, 4 heads"}  # of static weights a lower rate may be better yet
    found = compare(chosen["full, 4 heads"], chosen["none"])
    pairs = [(losses["full, 4 heads", 0.003][seed], losses["none", 0.006][seed]) for seed in (0, 1, 2)]
    low, high = stats.ttest_rel(*zip(*pairs)).confidence_interval()
    assert (found["rate"], found["seeds"]) == (0.003, [0, 1, 2])
    assert found["by seed"] == pytest.approx([one - other for one, other in pairs], abs=1e-4)
    assert found["loss"] == pytest.approx(np.mean([one for one, _ in pairs]))
    assert found["difference"] == pytest.approx((low + high) / 2)
    assert found["half of the interval"] == pytest.approx((high - low) / 2)
    # Until the baseline's best rate is known there is nothing to compare with
    first = {name: record for name, record in records.items() if name != run_name("none", 0.012, 0)}
    assert "none" not in runs_at_best_rate(first, EXPERIMENT)
