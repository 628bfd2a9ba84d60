"""Measure pipelines on processes of this machine: what travels, what a step takes, and what a process holds meanwhile.

The processes are started here, with gloo between them and one thread each.
"""

import json
import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist
from rich.console import Console
from rich.table import Table
from torch.distributed import distributed_c10d
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from transformers import AutoModelForCausalLM, PreTrainedModel

from common.files import whole_file
from modeling_attnres import AttnResLlamaConfig
from modeling_attnres.configuration_attnres import BlockLayout
from training.pipeline import Pipeline
from training.pipeline_cut import cut_layers, paper_counts

from .measure import Results, compare, in_processes, report


class Part(StrEnum):
    """What `python -m benchmarks pipeline` measures."""

    COUNTS = "counts"
    TIME = "time"
    MEMORY = "memory"


PROCESSES = 4
MODES = {"standard residuals": "none", "Block": "block", "Full": "full"}
KIMI_K3 = BlockLayout(93, tuple(range(0, 93, 12)))
Count = dict[str, object]


def measure_pipeline(
    parts: list[Part], layers: int, width: int, tokens: int, repeats: int, output: Path | None
) -> None:
    """Measure each part, and write its results beside those of the others."""
    torch.set_num_threads(1)  # as in the processes, for the note of a report
    size = f"{layers} layers of {width}, {ROWS} · {tokens} tokens"
    for part in parts:
        target = None if output is None else output.with_name(f"{output.name}-{part}")
        if part is Part.COUNTS:
            report_counts(in_processes(PROCESSES, count_all), target)
        elif part is Part.TIME:
            results = in_processes(PROCESSES, time_steps, layers, width, tokens, repeats)
            report(f"Time of a step of P · V stages, {size}", results, target)
        else:
            results = in_processes(PROCESSES, measure_peaks, layers, width, tokens)
            report(f"Memory in a step of P · V stages, {size}", results, target)


def make_model(layers: int, width: int, mode: str = "block") -> PreTrainedModel:
    """Make a model with random weights, the same in every process, in blocks of two layers."""
    torch.manual_seed(0)
    config = AttnResLlamaConfig(
        vocab_size=256,
        hidden_size=width,
        intermediate_size=2 * width,
        num_hidden_layers=layers,
        num_attention_heads=width // 8,
        num_key_value_heads=width // 8,
        attn_res_mode=mode,
        attn_res_block_size=2,
    )
    return AutoModelForCausalLM.from_config(config)


def make_batch(rows: int, tokens: int) -> dict[str, torch.Tensor]:
    """Make a batch of random tokens, of which each is learned."""
    ids = torch.randint(256, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "labels": ids}


# --------------------------------------------------------------------------------------------------------- what travels


@contextmanager
def counting_sends() -> Iterator[list[torch.Tensor]]:
    """Collect the tensors that are sent asynchronously, as all is that travels between stages."""
    sent, isend = [], dist.isend

    def counted(tensor, *args, **kwargs):
        sent.append(tensor)
        return isend(tensor, *args, **kwargs)

    dist.isend = distributed_c10d.isend = counted
    try:
        yield sent
    finally:
        dist.isend = distributed_c10d.isend = isend


def count_all() -> list[Count]:
    """Count what travels a token on 2 and 4 processes, by the plan, by the paper, and in a forward pass of them all."""
    rows = []
    for ranks in (2, 4):
        group = dist.new_group(list(range(ranks)))
        for virtual in (1, 2, 4):
            row = count_by_plan(BlockLayout(32, tuple(range(0, 32, 2))), ranks, virtual)
            for name, caching in (("sent", True), ("sent without caching", False)):
                row[name] = count_sent(group, ranks, virtual, caching)
            rows.append(row)
    return [*rows, count_by_plan(KIMI_K3, 4, 4)]


def count_by_plan(layout: BlockLayout, ranks: int, virtual: int) -> Count:
    """Count the vectors that travel a token, by the plan and by the paper, with caching and without."""
    cached, whole = (cut_layers(layout.num_layers, ranks, virtual, layout, caching) for caching in (True, False))
    blocks = len(layout.blocks) / cached.num_stages
    by_paper, whole_by_paper = paper_counts(ranks, virtual, blocks)
    return {
        "model": f"{layout.num_layers} layers, {len(layout.blocks)} blocks",
        "P · V": f"{ranks} · {virtual}",
        "planned": cached.total_sent,
        "planned without caching": whole.total_sent,
        "paper": by_paper,
        "paper without caching": whole_by_paper,
    }


def count_sent(group: dist.ProcessGroup, ranks: int, virtual: int, caching: bool, tokens: int = 8) -> float:
    """Run a forward pass of 32 layers in 16 blocks, and return the bytes sent, in those of a vector a token."""
    model, batch, sent = make_model(32, 16), make_batch(1, tokens), []
    if dist.get_rank() < ranks:
        pipeline = Pipeline(model, group, virtual=virtual, microbatches=1, caching=caching)
        with counting_sends() as sent:
            pipeline.evaluate(batch)
    size = torch.tensor(float(sum(tensor.nbytes for tensor in sent if tensor.shape == (1, tokens, 16))))
    dist.all_reduce(size)
    return size.item() / (tokens * 16 * 4)


def report_counts(rows: list[Count], output: Path | None) -> None:
    """Print the counts and write them as JSON."""
    table = Table(*rows[0], title="Vectors that travel a token in a forward pass")
    for row in rows:
        table.add_row(*(f"{value:g}" if isinstance(value, int | float) else value for value in row.values()))
    Console(width=150).print(table)
    if output is not None:
        with whole_file(output.with_suffix(".json")) as file:
            file.write_text(json.dumps(rows, indent=1) + "\n")


# --------------------------------------------------------------------------------------------------- what a step takes


ROWS = 8  # a batch; each is a microbatch
CUTS = ((2, 1, True), (2, 2, True), (2, 2, False), (4, 1, True), (4, 2, True), (4, 2, False))


def time_steps(layers: int, width: int, tokens: int, repeats: int) -> Results:
    """Time a step of one process and of pipelines, for each mode; a process that is not needed waits."""
    rank, batch, results = dist.get_rank(), make_batch(ROWS, tokens), {}
    groups = {ranks: dist.new_group(list(range(ranks))) for ranks in (2, 4)}
    for label, mode in MODES.items():
        runs = {"1 process": wait if rank > 0 else partial(step_alone, make_model(layers, width, mode), batch)}
        for ranks, virtual, caching in CUTS:
            name = f"{ranks} · {virtual}" + ("" if caching else ", no caching")
            runs[name] = wait
            if rank < ranks:
                how = {"virtual": virtual, "microbatches": ROWS, "caching": caching}
                pipeline = Pipeline(make_model(layers, width, mode), groups[ranks], **how)
                runs[name] = partial(pipeline.run_step, batch)
        results[label] = compare(runs, repeats, label, between=dist.barrier, silent=rank > 0)
    return results


def wait() -> None:
    """Do nothing; the next candidate begins with a barrier."""


def step_alone(model: PreTrainedModel, batch: dict[str, torch.Tensor]) -> None:
    """Run a batch forward and backward in one process, a row after another, as its microbatches are."""
    model.train().zero_grad()
    for row in range(ROWS):
        one = {name: value[row : row + 1] for name, value in batch.items()}
        (model(**one, use_cache=False).loss / ROWS).backward()


# --------------------------------------------------------------------------------------------- what a process holds


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of tensors that are made within it, those that are alive, and the most of them at once."""

    def __init__(self):
        super().__init__()
        self.alive = self.peak = 0
        self._sizes: dict[int, int] = {}  # of the storages that are alive, by their address; 0 of those from before

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        for tensor in tensors_in((args, kwargs)):
            self._note(tensor.untyped_storage(), 0)
        result = function(*args, **kwargs or {})
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            self._note(storage, storage.nbytes())
        return result

    def _note(self, storage: torch.UntypedStorage, size: int) -> None:
        if storage._cdata not in self._sizes:
            self._sizes[storage._cdata] = size
            self.alive += size
            self.peak = max(self.peak, self.alive)
            weakref.finalize(storage, self._forget, storage._cdata)

    def _forget(self, address: int) -> None:
        self.alive -= self._sizes.pop(address)


def tensors_in(values: object) -> list[torch.Tensor]:
    """List the tensors with data in anything nested."""
    return [one for one in tree_leaves(values) if isinstance(one, torch.Tensor) and one.device.type != "meta"]


def measure_peaks(layers: int, width: int, tokens: int) -> Results:
    """Measure a first step in each process: activations, what it receives, and gradients; not weights."""
    batch, results = make_batch(ROWS, tokens), {}
    for ranks, virtual in ((4, 1), (2, 2)):
        group = dist.new_group(list(range(ranks)))
        for checkpointing in (False, True):
            for label, mode in MODES.items():
                peak = 0
                if dist.get_rank() < ranks:
                    pipeline = Pipeline(make_model(layers, width, mode), group, virtual=virtual, microbatches=ROWS)
                    if checkpointing:
                        pipeline.model.activation_checkpointing_enable()
                    with LiveBytes() as bytes_made:
                        pipeline.run_step(batch)
                    peak = bytes_made.peak
                peaks = [0] * dist.get_world_size()
                dist.all_gather_object(peaks, peak)
                for rank in range(ranks):
                    case = f"process {rank} of {ranks} · {virtual}" + (", checkpointing" if checkpointing else "")
                    cells = results.setdefault(case, {})
                    cells[label] = {"MiB": peaks[rank] / 2**20}
                    cells[label]["ratio"] = cells[label]["MiB"] / cells["standard residuals"]["MiB"]
    return results
