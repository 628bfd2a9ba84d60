"""Train every arm of experiment.yaml: its rates with the first seed, then its best rate with the other seeds.

    python -m training.reports.replication.corpus results/replication/corpus.jsonl
    python -m training.reports.replication.experiment --jobs 2

Killed at any moment it goes on: what runs.jsonl beside this file records is not run again, and what was begun is
resumed. A record has the losses, the curve, the depth weights, and magnitudes and gradients by layer of one run.
"""

import json
from pathlib import Path
from typing import Annotated

import torch
import typer
import yaml
from transformers import AutoModelForCausalLM

from common.errors import run_command
from training.__main__ import pretrain_options
from training.depth import mean_depth_weights, site_statistics
from training.diagnose import layer_curves
from training.experiment import Experiment, carry_out
from training.pretrain import Pretraining, open_corpus, prepare_run
from training.sweep import PRETRAIN


HERE = Path(__file__).parent
PROBE_ROWS = 8  # held-out rows that depth weights and gradients are measured on


def read_experiment() -> dict:
    """Read experiment.yaml; each arm has all options of its runs but the rate and the seed."""
    experiment = yaml.safe_load((HERE / "experiment.yaml").read_text())
    experiment["arms"] = {arm: experiment["options"] | options for arm, options in experiment["arms"].items()}
    return experiment


def run_name(arm: str, rate: float, seed: int) -> str:
    return f"{arm.replace(', ', '-').replace(' ', '-')}_{rate:g}_{seed}"


def rates_to_try(arm: str, experiment: dict, records: dict[str, dict]) -> tuple[list[float], float | None]:
    """Return the rates an arm is tried at with the first seed, and the best one, once it lies between two others."""
    rates, seed = sorted(experiment["rates"]), experiment["seeds"][0]
    while all(run_name(arm, rate, seed) in records for rate in rates):
        best = min(rates, key=lambda rate: records[run_name(arm, rate, seed)]["loss"])
        if rates[0] < best < rates[-1]:
            return rates, best
        rates = [rates[0] / 2, *rates] if best == rates[0] else [*rates, rates[-1] * 2]
    return rates, None


def plan_runs(records: dict[str, dict]) -> dict[str, dict]:
    """Return the options of the runs that can be made now, by name: an arm's other seeds wait for its best rate."""
    experiment = read_experiment()
    first, *others = experiment["seeds"]
    runs = {}
    for arm, options in experiment["arms"].items():
        rates, best = rates_to_try(arm, experiment, records)
        wanted = [(rate, first) for rate in rates]
        if best is not None:
            wanted += [(best, seed) for seed in others]
        for rate, seed in wanted:
            runs[run_name(arm, rate, seed)] = options | {"learning_rate": rate, "seed": seed}
    return runs


def measure_run(name: str, folder: Path) -> dict:
    """Measure a finished run."""
    result = json.loads((folder / "result.json").read_text())
    log = result["log"]
    recipe = Pretraining(
        **{key: result["recipe"][key] for key in ("config", "data", "tokenizer", "length", "held_out")}
    )
    recipe.shards = Path(result["recipe"]["shards"])
    model = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    rows = open_corpus(recipe, folder, model.config).rows("held_out", recipe.length)
    ids = torch.stack([torch.as_tensor(rows[index]["input_ids"]) for index in range(PROBE_ROWS)]).long()
    record = {
        "arm": name.rsplit("_", 2)[0],
        "rate": float(name.split("_")[-2]),
        "seed": int(name.split("_")[-1]),
        "loss": result["held_out_loss"]["after"],
        "tokens": result["run"]["tokens"],
        "parameters": result["run"]["parameters"],
        "seconds": next(entry["train_runtime"] for entry in log if "train_runtime" in entry),
        "curve": [[entry["step"], round(entry["loss"], 4)] for entry in log if "loss" in entry],
        "by layer": layer_curves(model, ids),
    }
    if model.config.attn_res_mode != "none":
        weights = mean_depth_weights(model, ids)
        record["weights"] = [[round(weight, 5) for weight in of_site.tolist()] for of_site in weights]
        record["reach"] = [round(one.reach, 3) for one in site_statistics(model.config, weights)]
    return record


def main(jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2) -> None:
    """Make the runs of experiment.yaml and record them in runs.jsonl, until there are none; it goes on after a stop."""
    parser, options = pretrain_options(), read_experiment()["options"]
    experiment = Experiment(
        HERE / "runs.jsonl",
        Path("results/replication/runs"),
        command=PRETRAIN,
        data=[Path(path) for path in options["data"]],
        options=options,
        plan=plan_runs,
        prepare=lambda given: prepare_run(*parser.parse(given)),
        measure=measure_run,
    )
    carry_out(experiment, jobs)


if __name__ == "__main__":
    run_command(main, "python -m training.reports.replication.experiment --jobs 2")
