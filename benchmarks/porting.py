"""What a port costs: seconds and peak memory, by links and by copies."""

import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm
from transformers import LlamaConfig

from conversion.port import Blocks, port
from conversion.writing import save_shard, shard_name, write_index


def synthetic_checkpoint(folder: Path, gigabytes: float) -> int:
    """Write a Llama checkpoint of about this size in shards of some 200 MB; returns its number of bytes."""
    width, layers = 2048, 8
    per_layer = 4 * (4 * width**2 + 2 * width)  # bytes of attention and norms; the MLP takes the rest
    inner = int((gigabytes * 2**30 / layers - per_layer) / (4 * 3 * width))
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=max(inner, 16),
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
        architectures=["LlamaForCausalLM"],
    )
    config.save_pretrained(folder)
    shapes = {
        "self_attn.q_proj": (width, width),
        "self_attn.k_proj": (width, width),
        "self_attn.v_proj": (width, width),
    }
    shapes |= {"self_attn.o_proj": (width, width), "input_layernorm": (width,), "post_attention_layernorm": (width,)}
    shapes |= {"mlp.gate_proj": (config.intermediate_size, width), "mlp.up_proj": (config.intermediate_size, width)}
    shapes |= {"mlp.down_proj": (width, config.intermediate_size)}
    ends = {"model.embed_tokens.weight": (1024, width), "lm_head.weight": (1024, width), "model.norm.weight": (width,)}
    shards = [
        {f"model.layers.{layer}.{name}.weight": shape for name, shape in shapes.items()} for layer in range(layers)
    ]
    weight_map = {}
    for index, shard in enumerate(tqdm([*shards, ends], desc="making a checkpoint", unit="shard"), start=1):
        name = shard_name(index, layers + 1)
        save_shard({tensor: torch.rand(shape) for tensor, shape in shard.items()}, folder / name)
        weight_map |= dict.fromkeys(shard, name)
    write_index(folder, weight_map)
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _port(source: str, target: Path, link: bool, results) -> None:
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    port(source, target, Blocks(number=8), link=link)
    seconds, peak = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.put({"seconds": seconds, "peak_MiB": peak / 1024, "MiB_before": before / 1024})


def measure_porting(gigabytes: float, output: Path | None) -> None:
    """Port a synthetic checkpoint in a fresh process each time, and report."""
    context, found = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        source.mkdir()
        size = synthetic_checkpoint(source, gigabytes)
        for name, link in {"links": True, "copies": False}.items():
            results = context.Queue()
            process = context.Process(target=_port, args=(str(source), Path(folder) / name, link, results))
            process.start()
            found[name] = results.get()
            process.join()
            shutil.rmtree(Path(folder) / name)
    table = Table("shards by", "seconds", "peak memory, MiB", "of it the interpreter and its libraries, MiB")
    for name, row in found.items():
        table.add_row(name, f"{row['seconds']:.2f}", f"{row['peak_MiB']:.0f}", f"{row['MiB_before']:.0f}")
    Console().print(f"a checkpoint of {size / 2**30:.2f} GiB in 9 shards", table)
    if output is not None:
        output.write_text(json.dumps({"bytes": size, **found}, indent=1) + "\n")
