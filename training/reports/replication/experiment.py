"""Train every arm of experiment.yaml: its rates with the first seed, then its best rate with the other seeds.

    python training/reports/replication/corpus.py results/replication/corpus.jsonl
    python training/reports/replication/experiment.py --jobs 2

Killed at any moment it goes on: what runs.jsonl beside this file records is not run again, and what was begun is
resumed. A record has the losses, the curve, the depth weights, and magnitudes and gradients by layer of one run.
"""

import argparse
import json
import shutil
from pathlib import Path

import torch
import yaml
from transformers import AutoModelForCausalLM

from training.__main__ import pretrain_options
from training.depth import mean_depth_weights, site_statistics
from training.diagnose import layer_curves
from training.pretrain import Pretraining, open_corpus, prepare_run
from training.sweep import Sweep, run_sweep


HERE = Path(__file__).parent
RUNS, RECORDS = Path("results/replication/runs"), HERE / "runs.jsonl"
PROBE_ROWS = 8  # held-out rows that depth weights and gradients are measured on


def run_name(arm: str, rate: float, seed: int) -> str:
    return f"{arm.replace(', ', '-').replace(' ', '-')}_{rate:g}_{seed}"


def read_records() -> dict[str, dict]:
    """Read what is done, by name."""
    lines = RECORDS.read_text().splitlines() if RECORDS.exists() else []
    return {record["name"]: record for record in map(json.loads, lines)}


def planned_runs(experiment: dict, records: dict[str, dict]) -> dict[str, dict]:
    """Return the options of the runs that can be made now, by name: an arm's other seeds wait for its rates."""
    first, *others = experiment["seeds"]
    runs = {}
    for arm, options in experiment["arms"].items():
        rates = {rate: run_name(arm, rate, first) for rate in experiment["rates"]}
        wanted = [(rate, first) for rate in rates]
        if all(name in records for name in rates.values()):
            best = min(rates, key=lambda rate: records[rates[rate]]["loss"])
            wanted += [(best, seed) for seed in others]
        for rate, seed in wanted:
            name = run_name(arm, rate, seed)
            if name not in records:
                runs[name] = experiment["options"] | options | {"learning_rate": rate, "seed": seed}
    return runs


def record_run(name: str) -> dict:
    """Measure a finished run."""
    folder = RUNS / name
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
        "name": name,
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


def make_runs(names: list[str], runs: dict[str, dict], jobs: int) -> None:
    """Make some runs, record and remove each."""
    parser, chosen = pretrain_options(), {name: runs[name] for name in names}
    run_sweep(Sweep(RUNS, chosen), jobs, lambda options: prepare_run(*parser.parse(options)))
    with RECORDS.open("a") as file:
        for name in names:
            file.write(json.dumps(record_run(name)) + "\n")
    for name in names:
        shutil.rmtree(RUNS / name)


def main(jobs: int) -> None:
    """Make runs, `jobs` at a time, until there are none."""
    experiment = yaml.safe_load((HERE / "experiment.yaml").read_text())
    while runs := planned_runs(experiment, read_records()):
        names = list(runs)[:jobs]
        print(f"{len(runs)} runs can be made; now {', '.join(names)}", flush=True)
        make_runs(names, runs, jobs)


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", type=int, default=2, help="runs at a time")
    main(parser.parse_args().jobs)
