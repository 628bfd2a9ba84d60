"""Train on from one source with four forms of depth attention, and without: experiment.yaml says what and how.

    python -m training.reports.retrofit.corpus results/retrofit
    python -m training.reports.retrofit.experiment --jobs 2

Killed at any moment it goes on: what runs.jsonl beside this file records is not run again, and what was begun is
resumed. A record has the losses of one run on every row: with the first seed on those that rates are chosen by, with
the others on those held out and on those unlike the training data.
"""

import json
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Annotated

import torch
import typer
import yaml
from torch.nn.functional import cross_entropy
from torch.nn.utils.rnn import pad_sequence
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from common.errors import run_command
from conversion.port import Blocks, Form, port_checkpoint
from training.__main__ import finetune_options
from training.adapter import is_of_standard_residuals, load_adapter, read_adapter
from training.experiment import Experiment, carry_out, read_records
from training.finetune import ADAPTER, check_arguments
from training.loading import load_attnres_config, load_weights
from training.pretrain import MODEL
from training.sweep import FINETUNE


HERE, WORK = Path(__file__).parent, Path("results/retrofit")
PLAIN, SOURCE = "plain", "source"
PARTS = CHOOSING, HELD_OUT, UNLIKE = "choosing", "held_out", "unlike"  # rows that losses are measured on
LENGTH = 256  # tokens of a row, at most
ROWS = 8  # measured at once


def read_experiment() -> dict:
    return yaml.safe_load((HERE / "experiment.yaml").read_text())


def run_name(trained: str, form: str, rate: float, factor: float, seed: int) -> str:
    """Name a run: what is trained, the form, the base rate, the depth rate in base rates, the seed."""
    return f"{trained}_{form}_{rate:g}_{factor:g}_{seed}"


def loss_to_choose_by(record: dict) -> float:
    return mean(record["rows"][CHOOSING])


def best_of(names: dict[float, str], records: dict[str, dict]) -> float | None:
    """Return the rate whose run was best, if all were made."""
    if not all(name in records for name in names.values()):
        return None
    return min(names, key=lambda rate: loss_to_choose_by(records[names[rate]]))


def choose_rates(experiment: dict, trained: str, records: dict[str, dict]) -> tuple[float | None, dict]:
    """Return the base rate of what is trained, and each form's factor; None: it is not known yet."""
    first, rates = experiment["seeds"][0], experiment["trained"][trained]["rates"]
    names = {rate: run_name(trained, PLAIN, rate, 0, first) for rate in rates}
    base = rates[0] if len(rates) == 1 else best_of(names, records)
    factors = {
        form: best_of({one: run_name(trained, form, base, one, first) for one in experiment["depth_rates"]}, records)
        for form in experiment["forms"]
        if base is not None
    }
    return base, factors


def plan_runs(records: dict[str, dict]) -> dict[str, dict]:
    """Return the options of the runs that can be made now, by name: plain rates, then forms' factors, then seeds."""
    experiment = read_experiment()
    first, *others = experiment["seeds"]
    runs = {}

    def plan(trained: str, form: str, rate: float, factor: float, seed: int) -> None:
        model = form if form != PLAIN else next(iter(experiment["forms"]))
        runs[run_name(trained, form, rate, factor, seed)] = experiment["options"] | {
            "model": str(WORK / "ports" / model),
            "control": form == PLAIN,
            "lora": experiment["trained"][trained]["lora"],
            "learning_rate": rate,
            "depth_lr": factor * rate,
            "seed": seed,
        }

    for trained, settings in experiment["trained"].items():
        base, factors = choose_rates(experiment, trained, records)
        has_plain = settings["lora"] != "none"
        for rate in settings["rates"] if has_plain else ():
            plan(trained, PLAIN, rate, 0, first)
        for seed in others if has_plain and base is not None else ():
            plan(trained, PLAIN, base, 0, seed)
        for form, factor in factors.items():
            for one in experiment["depth_rates"]:
                plan(trained, form, base, one, first)
            for seed in others if factor is not None else ():
                plan(trained, form, base, factor, seed)
    return runs


def row_losses(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, rows: list[str]) -> list[float]:
    """Compute the mean loss of the tokens of each row, in bf16, which takes half as long."""
    ids = [torch.tensor(tokenizer(text)["input_ids"][:LENGTH]) for text in rows]
    losses = {}
    by_length = sorted(range(len(rows)), key=lambda row: len(ids[row]))
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        for start in tqdm(range(0, len(rows), ROWS), desc="rows"):
            batch = by_length[start : start + ROWS]
            # Padding comes after a row, so no token of the row sees it
            padded_BT = pad_sequence([ids[row] for row in batch], batch_first=True)
            logits_BTV = model(input_ids=padded_BT, use_cache=False).logits.float()
            for row, logits_TV in zip(batch, logits_BTV):
                loss = cross_entropy(logits_TV[: len(ids[row]) - 1], ids[row][1:])
                losses[row] = round(loss.item(), 5)
    return [losses[row] for row in range(len(rows))]


def measure_parts(model: PreTrainedModel, parts: Sequence[str]) -> dict[str, list[float]]:
    """Compute the losses of the rows of each part of the corpus."""
    tokenizer = AutoTokenizer.from_pretrained(read_experiment()["source"])
    lines = {part: (WORK / f"{part}.jsonl").read_text().splitlines() for part in parts}
    texts = {part: [json.loads(line)["text"] for line in of_part] for part, of_part in lines.items()}
    return {part: row_losses(model, tokenizer, of_part) for part, of_part in texts.items()}


def load_trained(folder: Path) -> PreTrainedModel:
    """Load what a run has trained."""
    if (folder / MODEL).exists():
        return AutoModelForCausalLM.from_pretrained(folder / MODEL).eval()
    adapter = folder / ADAPTER
    settings = read_adapter(adapter)
    config = load_attnres_config(settings.base_model_name_or_path)
    if is_of_standard_residuals(adapter):
        config.attn_res_mode = "none"
    model = load_weights(settings.base_model_name_or_path, config, dtype=torch.float32)
    return load_adapter(model, adapter, settings).merge_and_unload().eval()


def measure_run(name: str, folder: Path) -> dict:
    """Measure a finished run."""
    log = json.loads((folder / "result.json").read_text())["log"]
    trained, form, rate, factor, seed = name.split("_")
    chooses = int(seed) == read_experiment()["seeds"][0]
    entries = [entry for entry in log if "loss" in entry]
    return {
        "trained": trained,
        "form": form,
        "rate": float(rate),
        "factor": float(factor),
        "seed": int(seed),
        "seconds": round(next(entry["train_runtime"] for entry in log if "train_runtime" in entry)),
        "curve": [[entry["step"], round(entry["loss"], 4)] for entry in entries],
        "depth": {key: round(value, 5) for key, value in entries[-1].items() if key.startswith("depth/")},
        "rows": measure_parts(load_trained(folder), [CHOOSING] if chooses else [HELD_OUT, UNLIKE]),
    }


def port_source(experiment: dict) -> None:
    """Port the source to every form; ports share its weights' file."""
    for name, fields in experiment["forms"].items():
        target = WORK / "ports" / name
        if not target.exists():
            blocks, form = Blocks(number=experiment["blocks"]), Form(**fields)
            port_checkpoint(experiment["source"], target, blocks, link=True, form=form)


def record_source(experiment: Experiment) -> None:
    """Record the losses of the source itself."""
    if SOURCE not in read_records(experiment.records):
        source = AutoModelForCausalLM.from_pretrained(read_experiment()["source"]).eval()
        experiment.add_record({"name": SOURCE, "rows": measure_parts(source, PARTS)})


def main(
    jobs: Annotated[int, typer.Option(min=1, help="Runs at a time.")] = 2,
    most: Annotated[int | None, typer.Option(min=0, help="Stop after so many runs.")] = None,
) -> None:
    """Make the runs of experiment.yaml and record them in runs.jsonl, until there are none; it goes on after a stop."""
    settings, parser = read_experiment(), finetune_options()
    experiment = Experiment(
        HERE / "runs.jsonl",
        WORK / "runs",
        command=FINETUNE,
        data=[WORK / f"{part}.jsonl" for part in ("train", *PARTS)],
        options=settings["options"] | {name: settings[name] for name in ("source", "forms", "blocks")},
        plan=plan_runs,
        prepare=lambda given: check_arguments(*parser.parse(given)),
        measure=measure_run,
    )
    experiment.hold_to_records()
    port_source(settings)
    record_source(experiment)
    carry_out(experiment, jobs, most)


if __name__ == "__main__":
    run_command(main, "python -m training.reports.retrofit.experiment --jobs 2")
