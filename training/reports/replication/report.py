"""Compare the runs in runs.jsonl with the baseline, seed by seed, and draw them.

    python -m training.reports.replication.report

Prints what is recorded so far, the rates that were tried and the arms at their best; writes results.json and, beside
it, curves, magnitudes and gradients by layer, and the depth weights of one run of each arm.
"""

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from common.errors import AnswerIsNo, run_command
from common.files import whole_file
from training.experiment import paired_interval, read_records
from training.pictures import draw_by_layer, draw_depth_weights, draw_losses

from .experiment import rates_to_try, read_experiment, run_name


HERE = Path(__file__).parent
BASELINE = "none"


def losses_by_rate(records: dict[str, dict], seed: int) -> dict[str, dict[float, float]]:
    """Return what each arm came to with a seed, at each rate; and runs of arms that were given up."""
    arms = {}
    for record in records.values():
        if record["seed"] == seed:
            arms.setdefault(record["arm"], {})[record["rate"]] = record["loss"]
    return arms


def runs_at_best_rate(records: dict[str, dict], experiment: dict) -> dict[str, dict[int, dict]]:
    """Return by seed the runs of each arm whose best rate is known, at that rate."""
    chosen = {}
    for arm in experiment["arms"]:
        _, best = rates_to_try(arm, experiment, records)
        if best is not None:
            names = {seed: run_name(arm, best, seed) for seed in experiment["seeds"]}
            chosen[arm] = {seed: records[name] for seed, name in names.items() if name in records}
    return chosen


def compare(arm: dict[int, dict], baseline: dict[int, dict]) -> dict:
    """Compare an arm with the baseline, paired by seed."""
    seeds = sorted(arm.keys() & baseline.keys())
    differences = [arm[seed]["loss"] - baseline[seed]["loss"] for seed in seeds]
    mean, half = paired_interval(differences)
    return {
        "rate": arm[seeds[0]]["rate"],
        "seeds": seeds,
        "loss": float(np.mean([arm[seed]["loss"] for seed in seeds])),
        "by seed": np.round(differences, 4).tolist(),
        "difference": mean,
        "half of the interval": half,
    }


def make_rates_table(by_rate: dict[str, dict[float, float]]) -> Table:
    """Make a row per arm, a column per rate."""
    rates = sorted({rate for losses in by_rate.values() for rate in losses})
    table = Table("first seed, by rate", *(f"{rate:g}" for rate in rates))
    for arm, losses in by_rate.items():
        table.add_row(arm, *(f"{losses[rate]:.4f}" if rate in losses else "" for rate in rates))
    return table


def make_table(results: dict[str, dict]) -> Table:
    """Make a row per arm."""
    table = Table("arm", "rate", "loss", f"difference to {BASELINE}", "by seed")
    for arm, result in results.items():
        half = result["half of the interval"]
        interval = "" if half is None else f" ± {half:.4f}"
        difference = f"{result['difference']:+.4f}{interval}"
        by_seed = " ".join(f"{one:+.3f}" for one in result["by seed"])
        table.add_row(arm, f"{result['rate']:g}", f"{result['loss']:.4f}", difference, by_seed)
    return table


def draw(chosen: dict[str, dict[int, dict]]) -> None:
    """Draw one run of each arm: the curve, magnitudes and gradients by layer, and the depth weights."""
    ones = {arm: next(iter(runs.values())) for arm, runs in chosen.items()}
    caption = f"16 layers × 64, {ones[BASELINE]['tokens'] / 1e6:.2f} million tokens"
    draw_losses({arm: run["curve"] for arm, run in ones.items()}, HERE / "curves.png", caption)
    quantities = ones[BASELINE]["by layer"]
    by_layer = {quantity: {arm: run["by layer"][quantity] for arm, run in ones.items()} for quantity in quantities}
    draw_by_layer(by_layer, HERE / "by_layer.png", caption)
    for arm, run in ones.items():
        if "weights" in run:
            draw_depth_weights(run["weights"], HERE / f"depth_weights-{arm}.png", f"{arm}, {caption}")


def main() -> None:
    """Compare the runs in runs.jsonl with the baseline: print tables, write results.json and pictures beside it."""
    records, experiment = read_records(HERE / "runs.jsonl"), read_experiment()
    console, chosen = Console(width=120), runs_at_best_rate(records, experiment)
    console.print(make_rates_table(losses_by_rate(records, experiment["seeds"][0])))
    if BASELINE not in chosen:
        raise AnswerIsNo(f"There is nothing to compare with: the best rate of {BASELINE!r} is not known yet.")
    results = {arm: compare(runs, chosen[BASELINE]) for arm, runs in chosen.items()}
    console.print(make_table(results))
    with whole_file(HERE / "results.json") as file:
        file.write_text(json.dumps(results, indent=1) + "\n")
    draw(chosen)


if __name__ == "__main__":
    run_command(main, "python -m training.reports.replication.report")
