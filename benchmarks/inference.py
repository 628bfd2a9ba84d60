"""What depth attention costs a real model: prefill and decoding of SmolLM2-135M against standard residuals."""

from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, DynamicCache, StaticCache
from transformers.utils import logging

from demo.weights import smollm2
from modeling_attnres import AttnResLlamaForCausalLM

from .measure import Found, Runs, compare, in_own_process, peak_mib, report


PORTS = {
    "Block 8": {"attn_res_block_size": 4},
    "Block 8, eager": {"attn_res_block_size": 4, "attn_res_implementation": "eager"},
    "Full": {"attn_res_mode": "full"},
}


def load(name: str) -> torch.nn.Module:
    """The source, or a port of it made as it is loaded."""
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    if name == "source":
        return AutoModelForCausalLM.from_pretrained(smollm2()).eval()
    return AttnResLlamaForCausalLM.from_pretrained(smollm2(), attn_res_scale_norm_eps=True, **PORTS[name]).eval()


def some_ids(tokens: int) -> torch.Tensor:
    return torch.randint(5, 40_000, (1, tokens), generator=torch.Generator().manual_seed(0))


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
    """Prefill of some prompt lengths and a decoded token at some context lengths, all models in turn."""
    models = {name: load(name) for name in ("source", *PORTS)}
    found: Found = {}
    for length in prefill:
        runs: Runs = {
            name: lambda m=model, n=length: m(some_ids(n), logits_to_keep=1) for name, model in models.items()
        }
        found[f"prefill of {length}"] = compare(runs, prefill_repeats, f"prefill of {length}")
    for length in context:
        for rows in batch:
            label = f"a token at {length}" + f", batch {rows}" * (rows > 1)
            runs = {name: decoding(model, length, rows) for name, model in models.items()}
            found[label] = compare(runs, decode_repeats, label)
    if compiled:
        label = f"a token at {context[0]}, compiled"
        runs = {name: compiled_decoding(model, context[0], decode_repeats) for name, model in models.items()}
        found[label] = compare(runs, decode_repeats, label)
    report("SmolLM2-135M, fp32", found, output)


def decoding(model: torch.nn.Module, context: int, batch: int):
    """Decode one more token a call, after a context that all rows share."""
    cache = DynamicCache(config=model.config)
    model(some_ids(context), cache=cache, use_cache=True, logits_to_keep=1)
    cache.batch_repeat_interleave(batch)
    ids = some_ids(1).expand(batch, 1)
    return lambda: model(ids, cache=cache, use_cache=True)


def compiled_decoding(model: torch.nn.Module, context: int, repeats: int):
    """The same, compiled as one graph with a static cache."""
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


def _peak(name: str, tokens: int, chunk: int | None) -> dict[str, float]:
    model, ids = load(name), some_ids(tokens)
    before = peak_mib()
    model.generate(
        ids, attention_mask=torch.ones_like(ids), max_new_tokens=1, do_sample=False, prefill_chunk_size=chunk
    )
    return {"MiB": peak_mib(), "MiB before": before}


def measure_memory(tokens: int, chunk: int, output: Path | None) -> None:
    """Peak memory of a long prompt, at once and with `prefill_chunk_size`, each in a process of its own."""
    smollm2()
    found: Found = {}
    for size in (None, chunk):
        row = {name: in_own_process(_peak, name, tokens, size) for name in ("source", *PORTS)}
        for cell in row.values():
            cell["ratio"] = cell["MiB"] / row["source"]["MiB"]
        found["at once" if size is None else f"in chunks of {size}"] = row
    report(f"Peak memory, SmolLM2-135M in fp32, a prompt of {tokens} tokens", found, output)
