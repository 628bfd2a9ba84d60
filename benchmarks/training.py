"""What depth attention costs a training step: time in turn in one process, peak memory in a process each."""

from pathlib import Path

import torch
from transformers.utils import logging

from demo.weights import smollm2
from modeling_attnres import AttnResLlamaForCausalLM

from .inference import PORTS, some_ids
from .measure import Found, compare, in_own_process, peak_mib, report


CANDIDATES = {"standard residuals": {"attn_res_mode": "none"}, **PORTS}


def load(name: str, checkpointing: bool) -> torch.nn.Module:
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    model = AttnResLlamaForCausalLM.from_pretrained(smollm2(), attn_res_scale_norm_eps=True, **CANDIDATES[name]).train()
    if checkpointing:
        model.gradient_checkpointing_enable()
    return model


def step(model: torch.nn.Module, ids: torch.Tensor) -> None:
    """Forward and backward; gradients stay, as an optimizer finds them."""
    for parameter in model.parameters():
        if parameter.grad is not None:
            parameter.grad.zero_()
    model(ids, labels=ids).loss.backward()


def _peak(name: str, checkpointing: bool, tokens: int) -> float:
    """MiB, of this process, over two steps."""
    model, ids = load(name, checkpointing), some_ids(tokens)
    for _ in range(2):
        step(model, ids)
    return peak_mib()


def measure_training(tokens: int, repeats: int, output: Path | None) -> None:
    """Time and peak memory of a step of SmolLM2-135M, with and without gradient checkpointing."""
    smollm2()
    found: Found = {}
    for checkpointing in (False, True):  # memory first: a child's peak starts from its parent's
        peaks = {name: in_own_process(_peak, name, checkpointing, tokens) for name in CANDIDATES}
        base = peaks["standard residuals"]
        found["peak memory" + ", checkpointing" * checkpointing] = {
            name: {"ratio": peak / base, "MiB": peak} for name, peak in peaks.items()
        }
    for checkpointing in (False, True):
        label = "time" + ", checkpointing" * checkpointing
        models = {name: load(name, checkpointing) for name in CANDIDATES}
        runs = {name: lambda m=model: step(m, some_ids(tokens)) for name, model in models.items()}
        found[label] = compare(runs, repeats, label)
        del models, runs
    report(f"A training step of SmolLM2-135M, fp32, {tokens} tokens", found, output)
