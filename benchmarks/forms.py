"""Measure what each form of depth attention costs a training step of the model of training/reports/replication."""

from functools import partial
from pathlib import Path

import torch
from transformers import PreTrainedModel

from .measure import compare, report
from .training import step


def make_arms() -> dict[str, PreTrainedModel]:
    """Make the model of each arm."""
    # What these import, data sets above all, would make every other benchmark start a second later
    from training.loading import make_config
    from training.pretrain import Pretraining, make_model, read_fields
    from training.reports.replication.experiment import read_experiment

    models = {}
    for arm, options in read_experiment()["arms"].items():
        fields = read_fields(Pretraining(options["config"], [], mode=options["mode"], fields=options["set"]))
        models[arm] = make_model(make_config(options["config"], fields), seed=0).train()
    return models


def measure_forms(rows: int, tokens: int, repeats: int, output: Path | None) -> None:
    """Measure a forward and a backward pass of every arm, in turns."""
    models = make_arms()
    ids_BT = torch.randint(3, 2000, (rows, tokens), generator=torch.Generator().manual_seed(0))
    runs = {arm: partial(step, model, ids_BT) for arm, model in models.items()}
    results = {f"{rows} × {tokens} tokens": compare(runs, repeats, "a training step")}
    report("A training step by form of depth attention, 0.8M parameters, fp32", results, output)
