"""Compare the runs in runs.jsonl with plain training, seed by seed and row by row.

python -m training.reports.retrofit.report
"""

import json
from pathlib import Path

import numpy as np
from rich.console import Console
from rich.table import Table

from common.errors import run_command
from common.files import whole_file
from training.experiment import paired_interval, read_records

from .experiment import HELD_OUT, PLAIN, SOURCE, UNLIKE, read_experiment


HERE = Path(__file__).parent
PARTS = {HELD_OUT: "held out", UNLIKE: "unlike the training data"}


def compare(arm: dict[int, dict], plain: dict[int, dict], part: str) -> dict:
    """Compare the rows of an arm's runs with those of plain training, both by seed."""
    seeds = sorted(arm.keys() & plain.keys())
    with_depth, without = (np.array([of[seed][part] for seed in seeds]) for of in (arm, plain))
    differences = with_depth - without  # [seeds, rows]
    return {
        "loss": float(with_depth.mean()),
        "plain": float(without.mean()),
        "by seed": differences.mean(1).round(5).tolist(),
        "over seeds": paired_interval(differences.mean(1)),
        "over rows": paired_interval(differences.mean(0)),
    }


def compare_all(records: dict[str, dict], experiment: dict) -> dict[str, dict]:
    """Compare every arm that has runs to be compared; where depth alone is trained, plain is the source itself."""
    results = {}
    for trained, settings in experiment["trained"].items():
        of_forms = {form: {} for form in (PLAIN, *experiment["forms"])}
        rates = {}
        for name, record in records.items():
            if name != SOURCE and record["trained"] == trained and HELD_OUT in record["rows"]:
                of_forms[record["form"]][record["seed"]] = record["rows"]
                rates[record["form"]] = {"rate": record["rate"], "depth rate": record["rate"] * record["factor"]}
        plain = of_forms.pop(PLAIN)
        if settings["lora"] == "none":
            plain = dict.fromkeys(experiment["seeds"], records[SOURCE]["rows"])
        for form, arm in of_forms.items():
            if arm.keys() & plain.keys():
                results[f"{trained}, {form}"] = rates[form] | {part: compare(arm, plain, part) for part in PARTS}
    return results


def make_table(results: dict[str, dict]) -> Table:
    """Make a row per arm: differences from plain training, negative where the arm is better."""
    table = Table(
        "trained, form",
        "depth rate",
        "loss",
        "plain",
        *(f"{of}, {name}" for name in PARTS.values() for of in ("seeds", "rows")),
    )
    for name, result in results.items():
        differences = [
            f"{mean:+.4f}" + ("" if half is None else f" ± {half:.4f}")
            for part in PARTS
            for mean, half in (result[part]["over seeds"], result[part]["over rows"])
        ]
        held_out = result["held_out"]
        table.add_row(
            name, f"{result['depth rate']:g}", f"{held_out['loss']:.4f}", f"{held_out['plain']:.4f}", *differences
        )
    return table


def main() -> None:
    """Compare the runs in runs.jsonl with plain training: print a table, write results.json beside it."""
    results = compare_all(read_records(HERE / "runs.jsonl"), read_experiment())
    Console(width=150).print(make_table(results))
    print(
        f"{len(results)} arms against plain training; ±: half of a 95 % interval, of which by chance alone one in 20 "
        f"leaves zero out. There are {4 * len(results)} here."
    )
    with whole_file(HERE / "results.json") as file:
        file.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    run_command(main, "python -m training.reports.retrofit.report")
