"""Compare the runs in runs.jsonl with the baseline, seed by seed, and draw them.

    python -m training.reports.replication.report

Prints a table of what is recorded so far; writes results.json and, beside it, curves, magnitudes and gradients by
layer, and the depth weights of one run of each arm.
"""

import json
from collections import defaultdict
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table
from scipy import stats

from training.pictures import draw_by_layer, draw_depth_weights, draw_losses


HERE = Path(__file__).parent
BASELINE = "none"


def runs_at_best_rate(records: list[dict]) -> dict[str, dict[int, dict]]:
    """Return each arm's runs by seed, at the rate that was best with the first seed."""
    first = min(record["seed"] for record in records)
    arms = defaultdict(list)
    for record in records:
        arms[record["arm"]].append(record)
    chosen = {}
    for arm, runs in arms.items():
        best = min((run for run in runs if run["seed"] == first), key=lambda run: run["loss"])["rate"]
        chosen[arm] = {run["seed"]: run for run in runs if run["rate"] == best}
    return chosen


def compare(arm: dict[int, dict], baseline: dict[int, dict]) -> dict:
    """Compare an arm with the baseline, paired by seed; the interval of 95 % is by Student's t."""
    seeds = sorted(arm.keys() & baseline.keys())
    differences = np.array([arm[seed]["loss"] - baseline[seed]["loss"] for seed in seeds])
    half = stats.t.ppf(0.975, len(seeds) - 1) * stats.sem(differences) if len(seeds) > 1 else None
    one = next(iter(arm.values()))
    return {
        "rate": one["rate"],
        "seeds": seeds,
        "loss": float(np.mean([run["loss"] for run in arm.values()])),
        "difference": float(differences.mean()) if seeds else None,
        "half of the interval": None if half is None else float(half),
        "seconds per run": float(np.median([run["seconds"] for run in arm.values()])),
    }


def make_table(results: dict[str, dict]) -> Table:
    """Make a row per arm."""
    table = Table("arm", "rate", "seeds", "loss", f"difference to {BASELINE}")
    for arm, result in results.items():
        half = result["half of the interval"]
        interval = "" if half is None else f" ± {half:.4f}"
        difference = "" if result["difference"] is None else f"{result['difference']:+.4f}{interval}"
        table.add_row(arm, f"{result['rate']:g}", str(len(result["seeds"])), f"{result['loss']:.4f}", difference)
    return table


def draw(chosen: dict[str, dict[int, dict]]) -> None:
    """Draw one run of each arm: the curve, magnitudes and gradients by layer, and the depth weights."""
    ones = {arm: next(iter(runs.values())) for arm, runs in chosen.items()}
    caption = "16 layers × 64, 3.3 million tokens"
    draw_losses({arm: run["curve"] for arm, run in ones.items()}, HERE / "curves.png", caption)
    quantities = ones[BASELINE]["by layer"]
    by_layer = {quantity: {arm: run["by layer"][quantity] for arm, run in ones.items()} for quantity in quantities}
    draw_by_layer(by_layer, HERE / "by_layer.png", caption)
    for arm, run in ones.items():
        if "weights" in run:
            draw_depth_weights(run["weights"], HERE / f"depth_weights-{arm}.png", f"{arm}, {caption}")


def main() -> None:
    """Print the table, and write results.json and pictures."""
    records = [json.loads(line) for line in (HERE / "runs.jsonl").read_text().splitlines()]
    chosen = runs_at_best_rate(records)
    results = {arm: compare(runs, chosen[BASELINE]) for arm, runs in chosen.items()}
    Console(width=120).print(make_table(results))
    (HERE / "results.json").write_text(json.dumps(results, indent=1) + "\n")
    draw(chosen)


if __name__ == "__main__":
    main()
