"""Measure what depth attention costs a training step: time in turns in one process, peak memory in a process each."""

from functools import partial
from pathlib import Path

import torch

from common.quiet import quiet_transformers
from demo.weights import smollm2
from modeling_attnres import AttnResLlamaForCausalLM

from .inference import PORTS, some_ids
from .measure import Results, compare, in_own_process, peak_mib, report


CANDIDATES = {"standard residuals": {"attn_res_mode": "none"}, **PORTS}


def load(name: str, checkpointing: bool) -> torch.nn.Module:
    """Load a candidate for training."""
    model = AttnResLlamaForCausalLM.from_pretrained(smollm2(), attn_res_scale_norm_eps=True, **CANDIDATES[name]).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Run a forward and a backward pass; gradients stay allocated, as they do until an optimizer's step."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    model(ids, labels=ids).loss.backward()


@quiet_transformers()
def _peak(name: str, checkpointing: bool, tokens: int) -> float:
    """Measure this process's peak memory over two steps, in MiB."""
    model, ids = load(name, checkpointing), some_ids(tokens)
    for _ in range(2):
        step(model, ids)
    return peak_mib()


@quiet_transformers()
def measure_training(tokens: int, repeats: int, output: Path | None) -> None:
    """Measure time and peak memory of a step of SmolLM2-135M, with and without gradient checkpointing."""
    smollm2()  # extracted here, once
    results: Results = {}
    settings = {"": False, ", checkpointing": True}
    for suffix, checkpointing in settings.items():  # memory first: a child's peak starts from its parent's
        peaks = {name: in_own_process(_peak, name, checkpointing, tokens) for name in CANDIDATES}
        base = peaks["standard residuals"]
        results["peak memory" + suffix] = {name: {"ratio": peak / base, "MiB": peak} for name, peak in peaks.items()}
    for suffix, checkpointing in settings.items():
        models = {name: load(name, checkpointing) for name in CANDIDATES}
        runs = {name: partial(step, model, some_ids(tokens)) for name, model in models.items()}
        results["time" + suffix] = compare(runs, repeats, "time" + suffix)
        del models, runs  # before the next ones are loaded
    report(f"A training step of SmolLM2-135M, fp32, {tokens} tokens", results, output)
