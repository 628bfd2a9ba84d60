"""Gather the runs of run.sh: a table, results.json, pictures. Usage: python -m training.reports.smollm2.report WORK"""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path
from statistics import mean, stdev

from rich.console import Console
from rich.table import Table

from common.errors import run_command
from common.files import whole_file
from training.diagnose import diagnose_model


HERE = Path(__file__).parent
VARIANTS = {
    "LoRA": "lora",
    "LoRA, standard residuals": "lora-standard-residuals",
    "depth queries": "depth",
    "LoRA + depth queries": "lora-and-depth",
}
SEEDS = (1, 2, 3)


def main(work: Path) -> None:
    """Write the report from the folder that run.sh wrote."""
    runs = {
        name: [json.loads((work / f"{folder}-{seed}/result.json").read_text()) for seed in SEEDS]
        for name, folder in VARIANTS.items()
    }
    # One row per variant, in the table and in results.json
    table = Table("trained", "held-out loss before", "after (mean of 3 seeds)", "change", "against LoRA, seed by seed")
    with_lora = [run["held_out_loss"]["after"] for run in runs["LoRA"]]
    results = {}
    for name, of_seeds in runs.items():
        before = [run["held_out_loss"]["before"] for run in of_seeds]
        after = [run["held_out_loss"]["after"] for run in of_seeds]
        results[name] = {
            "before": before,
            "after": after,
            "change": [a - b for a, b in zip(after, before)],
            "curves": [[entry["loss"] for entry in run["log"] if "loss" in entry] for run in of_seeds],
        }
        table.add_row(
            name,
            f"{mean(before):.4f}",
            f"{mean(after):.4f} ± {stdev(after):.4f}",
            f"{mean(after) - mean(before):+.4f}",
            ", ".join(f"{one - other:+.4f}" for one, other in zip(after, with_lora)),
        )
    Console(width=110).print(table)
    with whole_file(HERE / "results.json") as file:
        file.write_text(json.dumps(results, indent=1) + "\n")
    # Pictures before and after training
    for name, adapter in (("before", None), ("after", Path("lora-and-depth-1/adapter"))):
        with tempfile.TemporaryDirectory() as folder:
            with contextlib.chdir(work):  # the pictures name what they show, not where it lay
                diagnose_model("ported", Path(folder) / "out", text=Path("library.txt"), adapter=adapter, tokens=256)
            for picture in ("depth_weights.png", "by_layer.png"):
                shutil.copy(Path(folder) / "out" / picture, HERE / f"{name}_{picture}")


if __name__ == "__main__":
    run_command(main, "python -m training.reports.smollm2.report WORK")
