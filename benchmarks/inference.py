"""What depth attention costs a real model: prefill and decoding of SmolLM2-135M against standard residuals."""

import json
import time
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from demo.weights import smollm2
from modeling_attnres import AttnResLlamaForCausalLM


def load_models() -> dict[str, torch.nn.Module]:
    """The source, and its ports in memory: Block 8 in two phases and one by one, and Full."""
    source = smollm2()
    logging.set_verbosity_error()
    logging.disable_progress_bar()

    def port(**fields):
        return AttnResLlamaForCausalLM.from_pretrained(source, attn_res_scale_norm_eps=True, **fields).eval()

    return {
        "source": AutoModelForCausalLM.from_pretrained(source).eval(),
        "Block 8": port(attn_res_block_size=4),
        "Block 8, eager": port(attn_res_block_size=4, attn_res_implementation="eager"),
        "Full": port(attn_res_mode="full"),
    }


def seconds(run) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def compare(runs: dict, repeats: int, label: str) -> dict[str, dict[str, float]]:
    """Run all in turn, several times; medians, and the median of the ratios to the source within a turn."""
    times = {name: [] for name in runs}
    for turn in tqdm(range(repeats + 1), desc=label):
        for name, run in runs.items():
            taken = seconds(run)
            if turn:  # the first turn warms up
                times[name].append(taken)
    return {
        name: {
            "ratio": median(one / base for one, base in zip(taken, times["source"], strict=True)),
            "seconds": median(taken),
        }
        for name, taken in times.items()
    }


@torch.no_grad()
def measure_inference(
    prefill: list[int], context: list[int], prefill_repeats: int, decode_repeats: int, output: Path | None
) -> None:
    """Prefill of some prompt lengths and a decoded token at some context lengths, all models in turn."""
    models, found = load_models(), {}
    generator = torch.Generator().manual_seed(0)
    ids = torch.randint(5, 40_000, (1, max(*prefill, *context)), generator=generator)
    for length in prefill:
        runs = {name: lambda m=m, n=length: m(ids[:, :n], logits_to_keep=1) for name, m in models.items()}
        found[f"prefill of {length}"] = compare(runs, prefill_repeats, f"prefill of {length}")
    for length in context:
        runs = {}
        for name, model in models.items():
            cache = DynamicCache(config=model.config)
            model(ids[:, :length], cache=cache, use_cache=True, logits_to_keep=1)
            runs[name] = lambda m=model, c=cache: m(ids[:, :1], cache=c, use_cache=True)
        found[f"a token at {length}"] = compare(runs, decode_repeats, f"a token at {length}")

    table = Table("SmolLM2-135M, fp32", *models)
    for name, row in found.items():
        table.add_row(name, *(f"{cell['ratio']:.3f} ({cell['seconds']:.3f} s)" for cell in row.values()))
    console = Console(width=110)
    console.print(table, f"ratios to the source, medians of turns; {torch.get_num_threads()} threads")
    if output is not None:
        output.write_text(json.dumps(found, indent=1) + "\n")
