"""What a port costs: seconds and peak memory, by links and by copies."""

import json
import multiprocessing
import resource
import shutil
import tempfile
import time
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from conversion.port import Blocks, port_checkpoint


def synthetic_checkpoint(folder: Path, gigabytes: float) -> tuple[int, int]:
    """Save a random Llama of about this size; returns its bytes and its number of shards."""
    width, layers = 2048, 8
    attention = 4 * width**2  # parameters of a layer; the MLP takes the rest
    config = LlamaConfig(
        vocab_size=1024,
        hidden_size=width,
        intermediate_size=max(16, int((gigabytes * 2**28 / layers - attention) / (3 * width))),
        num_hidden_layers=layers,
        num_attention_heads=16,
        num_key_value_heads=16,
    )
    LlamaForCausalLM(config).save_pretrained(folder, max_shard_size="256MB")
    shards = list(folder.glob("*.safetensors"))
    return sum(path.stat().st_size for path in shards), len(shards)


def _port(source: str, target: Path, link: bool, results) -> None:
    begin, before = time.perf_counter(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    port_checkpoint(source, target, Blocks(number=8), link=link)
    seconds, peak = time.perf_counter() - begin, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    results.put({"seconds": seconds, "peak_MiB": peak / 1024, "MiB_before": before / 1024})


def measure_porting(gigabytes: float, output: Path | None) -> None:
    """Port a synthetic checkpoint in a fresh process each time, and report."""
    context, found = multiprocessing.get_context("spawn"), {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        with context.Pool(1) as pool:  # this process stays small: a child's peak starts from its parent's
            size, shards = pool.apply(synthetic_checkpoint, (source, gigabytes))
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
    Console().print(f"a checkpoint of {size / 2**30:.2f} GiB in {shards} shards", table)
    if output is not None:
        output.write_text(json.dumps({"bytes": size, **found}, indent=1) + "\n")
