"""Measure what a long prompt holds in memory: block sums, phase 1, the KV cache; in chunks, and over ranks."""

import json
import os
from pathlib import Path
from tempfile import TemporaryDirectory

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.utils._pytree import tree_leaves
from tqdm import tqdm
from transformers import AutoConfig, AutoModelForCausalLM, DynamicCache

from common.files import whole_file
from common.quiet import quiet_transformers
from modeling_attnres import AttnResLlamaConfig, AttnResLlamaForCausalLM, sequence_sharded_plan
from modeling_attnres.depth_readers import TwoPhaseReader
from modeling_attnres.residual_stream import DepthPass

from .inference import some_ids
from .measure import in_own_process, in_processes, peak_mib


MIB = 2**20
PARTS = ("block sums", "phase 1", "KV cache", "peak")
SMALL = {
    "vocab_size": 40_000,
    "hidden_size": 128,
    "intermediate_size": 352,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,  # narrow ones: attention over 65,536 tokens takes minutes
    "num_key_value_heads": 4,
    "head_dim": 8,
    "max_position_embeddings": 2**17,
    "tie_word_embeddings": True,
}
MODES = {"none": {"attn_res_mode": "none"}, "Block 4": {"attn_res_block_size": 2}, "Full": {"attn_res_mode": "full"}}


def measure_prompts(tokens: list[int], chunk: int, ranks: list[int], output: Path | None) -> None:
    """Read prompts of some lengths, each in a process of its own: at once, in chunks, and by several ranks."""
    with TemporaryDirectory() as folder:
        for name, fields in MODES.items():
            torch.manual_seed(0)
            AttnResLlamaForCausalLM(AttnResLlamaConfig(**SMALL, **fields)).save_pretrained(Path(folder, name))
        # What is read, how: at every length at once and in chunks, and the shortest by several ranks
        cases = {
            (name, f"{length}, {'at once' if size is None else f'in chunks of {size}'}"): (length, size, 1, False)
            for length in tokens
            for name in MODES
            for size in (None, chunk)
        }
        cases |= {
            (name, f"{min(tokens)}, rank 0 of {count}, {'sharded' if sharded else 'whole'}"): (
                min(tokens),
                None,
                count,
                sharded,
            )
            for count in ranks
            for name in MODES
            for sharded in (False, True)
            if not (sharded and name == "none")
        }
        found = {
            key: read_prompt(Path(folder, key[0]), *how) for key, how in tqdm(cases.items(), desc="prompts of a model")
        }
    title = "Memory of a prompt in MiB: Llama of 8 layers × 128, fp32"
    table = Table(title, "model", *PARTS)
    for (name, how), parts in found.items():
        table.add_row(how, name, *(f"{parts[part]:.1f}" for part in PARTS))
    Console(width=120).print(table)
    if output is not None:
        rows = [{"model": name, "prompt": how} | parts for (name, how), parts in found.items()]
        with whole_file(output.with_suffix(".json")) as file:
            file.write_text(json.dumps({"title": title, "rows": rows}, indent=1) + "\n")


def read_prompt(folder: Path, length: int, chunk: int | None, ranks: int, sharded: bool) -> dict[str, float]:
    """Read a prompt in fresh processes, and return what the first one held."""
    if ranks == 1:
        return in_own_process(measure_prompt, folder, length, chunk)
    return in_processes(ranks, measure_rank, folder, length, sharded)


def measure_rank(folder: Path, length: int, sharded: bool) -> dict[str, float]:
    """Measure one process of several: tensor parallel, with or without a sharded sequence."""
    from transformers.distributed import DistributedConfig

    rank, ranks = str(dist.get_rank()), dist.get_world_size()
    os.environ |= {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": str(ranks)}  # where transformers looks
    plan = sequence_sharded_plan(AutoConfig.from_pretrained(folder)) if sharded else "auto"
    how = DistributedConfig(tp_size=ranks, tp_plan=plan)
    return measure_prompt(folder, length, None, distributed_config=how)


@quiet_transformers()
@torch.no_grad()
def measure_prompt(folder: Path, length: int, chunk: int | None, **how) -> dict[str, float]:
    """Measure what this process holds, at most, while a model reads a prompt, in MiB."""
    model, ids = AutoModelForCausalLM.from_pretrained(folder, **how).eval(), some_ids(length)
    largest = watch_readers()
    before, cache = peak_mib(), DynamicCache(config=model.config)
    for part in ids.split(chunk or length, dim=1):  # as `prefill_chunk_size` has `generate` do
        model(part, cache=cache, use_cache=True, logits_to_keep=1)
    keys_and_values = [tensor for layer in cache.layers for tensor in (layer.keys, layer.values)]
    sizes = {"KV cache": sum(tensor.nbytes for tensor in keys_and_values) / MIB, "peak": peak_mib() - before}
    return largest | sizes


def watch_readers() -> dict[str, float]:
    """Return what fills with the largest sizes that a reader of this process holds, in MiB, from here on."""
    largest = {"block sums": 0.0, "phase 1": 0.0}
    inputs_for, close = TwoPhaseReader.inputs_for, DepthPass._close

    def see(part: str, size: int) -> None:
        largest[part] = max(largest[part], size / MIB)

    def close_and_see(self, block_BTD):
        close(self, block_BTD)
        see("block sums", self.reader._values_NMD.nbytes + self.reader._logits_NMS.nbytes)

    def read_and_see(self, site):
        inputs = inputs_for(self, site)
        # The sites' results are views of two tensors
        stored = {
            tensor.untyped_storage().data_ptr(): tensor.untyped_storage().nbytes()
            for one in self._inputs.values()
            for tensor in tree_leaves((one.log_sum_exp_BT1, one.mixture_BTD))
        }
        see("phase 1", sum(stored.values()))
        return inputs

    TwoPhaseReader.inputs_for, DepthPass._close = read_and_see, close_and_see
    return largest
