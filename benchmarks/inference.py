"""Measure what depth attention costs a real model: prefill and decoding of SmolLM2-135M against standard residuals."""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache

from common.quiet import quiet_transformers
from demo.weights import smollm2
from modeling_attnres import AttnResLlamaForCausalLM

from .measure import Results, compare, in_own_process, peak_mib, report


PORTS = {
    "Block 8": {"attn_res_block_size": 4},
    "Block 8, eager": {"attn_res_block_size": 4, "attn_res_implementation": "eager"},
    "Full": {"attn_res_mode": "full"},
}


def load(name: str) -> torch.nn.Module:
    """Load the source, or a port of it that is made as it is loaded."""
    if name == "source":
        return AutoModelForCausalLM.from_pretrained(smollm2()).eval()
    return AttnResLlamaForCausalLM.from_pretrained(smollm2(), attn_res_scale_norm_eps=True, **PORTS[name]).eval()


def some_ids(tokens: int) -> torch.Tensor:
    """Draw a prompt, the same each time: [1, tokens]."""
    return torch.randint(5, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))


@quiet_transformers()
@torch.no_grad()
def measure_inference(
    prefill: list[int],
    context: list[int],
    batch: list[int],
    prefill_repeats: int,
    decode_repeats: int,
    compiled: bool,
    output: Path | None,
) -> None:
    """Measure a prefill at some prompt lengths and a decoded token at some context lengths.

    Before each candidate one more model with standard residuals decodes a token: its weights fill the caches, whoever
    comes next.
    """
    models = {name: load(name) for name in ("source", *PORTS)}
    other_step = decoding(load("source"), context=128, batch=1)
    results: Results = {}
    for length in prefill:
        label = f"prefill of {length}"
        runs = {name: partial(model, some_ids(length), logits_to_keep=1) for name, model in models.items()}
        results[label] = compare(runs, prefill_repeats, label, between=other_step)
    for length in context:
        for rows in batch:
            label = f"a token at {length}"
            if rows > 1:
                label += f", batch {rows}"
            runs = {name: decoding(model, length, rows) for name, model in models.items()}
            results[label] = compare(runs, decode_repeats, label, between=other_step)
    # Last, for it leaves compiled code behind.
    if compiled:
        label = f"a token at {context[0]}, compiled"
        runs = {name: compiled_decoding(model, context[0], decode_repeats) for name, model in models.items()}
        results[label] = compare(runs, decode_repeats, label, between=other_step)
    report("SmolLM2-135M, fp32", results, output)


def decoding(model: torch.nn.Module, context: int, batch: int) -> Callable[[], object]:
    """Return a function that decodes one more token per call, after a context that all rows share."""
    cache = DynamicCache(config=model.config)
    model(some_ids(context), cache=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    ids = some_ids(1).expand(batch, 1)
    return lambda: model(ids, cache=cache, use_cache=True)


def compiled_decoding(model: torch.nn.Module, context: int, repeats: int) -> Callable[[], object]:
    """Return a function that decodes one more token per call, compiled as one graph with a static cache."""
    cache = StaticCache(config=model.config, max_cache_len=context + repeats + 8)
    model(some_ids(context), cache=cache, use_cache=True, logits_to_keep=1)
    step = torch.compile(model, fullgraph=True)
    ids, position = some_ids(1), torch.tensor([[context]])

    def run():
        step(ids, cache=cache, use_cache=True, position_ids=position)
        position.add_(1)

    for _ in range(3):  # compiles, and once more where a shape or a flag changed
        run()
    return run


@quiet_transformers()
def _peak(name: str, tokens: int, chunk: int | None) -> dict[str, float]:
    """Measure this process's peak memory before and after a long prompt."""
    model, ids = load(name), some_ids(tokens)
    before = peak_mib()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk
    )
    return {"MiB": peak_mib(), "MiB before": before}


def measure_memory(tokens: int, chunk: int, output: Path | None) -> None:
    """Measure the peak memory of a long prompt, at once and with `prefill_chunk_size`, each in a process of its own."""
    smollm2()  # extracted here, once
    results: Results = {}
    for size in (None, chunk):
        row = {name: in_own_process(_peak, name, tokens, size) for name in ("source", *PORTS)}
        for cell in row.values():
            cell["ratio"] = cell["MiB"] / row["source"]["MiB"]
        results["at once" if size is None else f"in chunks of {size}"] = row
    report(f"Peak memory, SmolLM2-135M in fp32, a prompt of {tokens} tokens", results, output)
