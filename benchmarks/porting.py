"""Measure what a port costs: seconds and peak memory, by links and by copies."""

import json
import shutil
import tempfile
from pathlib import Path

from rich.console import Console
from rich.table import Table
from transformers import LlamaConfig, LlamaForCausalLM

from common.files import whole_file
from conversion.port import Blocks, port_checkpoint

from .measure import in_own_process, peak_mib, seconds


def synthetic_checkpoint(folder: Path, gigabytes: float) -> tuple[int, int]:
    """Save a random Llama of about this size, and return its bytes and its number of shards."""
    width, layers = 2048, 8
    attention = 4 * width**2  # parameters per layer; the MLP takes the rest
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


def _port(source: str, target: Path, link: bool) -> dict[str, float]:
    """Port in this process, and measure its time and memory."""
    before = peak_mib()
    taken = seconds(lambda: port_checkpoint(source, target, Blocks(number=8), link=link))
    return {"seconds": taken, "peak_MiB": peak_mib(), "MiB_before": before}


def measure_porting(gigabytes: float, output: Path | None) -> None:
    """Port a synthetic checkpoint in a fresh process each time, and report."""
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        source = Path(folder) / "source"
        # This process stays small: a child's peak starts from its parent's.
        size, shards = in_own_process(synthetic_checkpoint, source, gigabytes)
        for name, link in {"links": True, "copies": False}.items():
            results[name] = in_own_process(_port, str(source), Path(folder) / name, link)
            shutil.rmtree(Path(folder) / name)
    table = Table("shards by", "seconds", "peak memory, MiB", "of it the interpreter and its libraries, MiB")
    for name, row in results.items():
        table.add_row(name, f"{row['seconds']:.2f}", f"{row['peak_MiB']:.0f}", f"{row['MiB_before']:.0f}")
    Console().print(f"a checkpoint of {size / 2**30:.2f} GiB in {shards} shards", table)
    if output is not None:
        with whole_file(output) as file:
            file.write_text(json.dumps({"bytes": size, **results}, indent=1) + "\n")
