"""Measure the residual mechanism alone, at the shapes of Kimi-Linear-48B: sublayers compute nothing, they only read.

Every candidate goes through the same sublayers' outputs, which are given, and makes the input of each sublayer. The
formulas of other implementations are written here from their papers and descriptions.

Shapes: T tokens, D hidden size, N sources.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import torch
from torch.nn import functional as F

from modeling_attnres import BlockLayout, DepthReader
from modeling_attnres.depth_attention import DepthParameters, EagerReader
from modeling_attnres.depth_readers import TwoPhaseReader
from modeling_attnres.residual_stream import ReplacePass, add_output

from .measure import Results, Runs, compare, report


EPS = 1e-5


@dataclass
class Case:
    """The outputs of all sublayers of a model with depth attention, its queries and its blocks."""

    tokens: int
    dtype: torch.dtype
    width: int = 2304
    layers: int = 27
    block_size: int = 3

    def __post_init__(self):
        generator = torch.Generator().manual_seed(0)

        def random(*shape):
            return torch.randn(*shape, generator=generator)

        self.embedding = random(1, self.tokens, self.width).to(self.dtype)
        few = [random(1, self.tokens, self.width).to(self.dtype) for _ in range(4)]
        self.outputs = [few[site % 4] for site in range(2 * self.layers)]  # not all different: 4,096 tokens must fit
        self.queries_SD = random(2 * self.layers + 1, self.width)
        self.norm_D = torch.ones(self.width)

    @property
    def layout(self) -> BlockLayout:
        return BlockLayout(self.layers, tuple(range(0, self.layers, self.block_size)))


def standard(case: Case) -> torch.Tensor:
    """Add each output to the stream: h + f(h)."""
    stream = case.embedding
    for output in case.outputs:
        stream = stream + output
    return stream


def ours(case: Case, reader_class: type[DepthReader]) -> torch.Tensor:
    """Use a reader as the layers of a model do, without what they compute."""
    reader = reader_class(DepthParameters(case.queries_SD * case.width**0.5), EPS, case.layout)
    depth_pass = ReplacePass(reader)
    hidden_states = case.embedding
    for layer in range(case.layers):
        running_sum = depth_pass.enter_layer(layer, hidden_states)
        for site in (2 * layer, 2 * layer + 1):
            reader.read(running_sum, reader.inputs_for(site))[0].to(case.dtype)
            running_sum = add_output(running_sum, case.outputs[site])
        hidden_states = depth_pass.leave_layer(running_sum)
    return depth_pass.read_output(hidden_states)


def by_reads(case: Case, read: Callable) -> torch.Tensor:
    """Compute Block Attention Residuals by a function that is given all sources of a site, as others do."""
    blocks, running_sum = [], case.embedding
    for site, output in enumerate(case.outputs):
        layer, is_mlp = divmod(site, 2)
        opens_block = not is_mlp and case.layout.opens_block(layer)
        if opens_block:
            blocks.append(running_sum)
        read(blocks if opens_block else [*blocks, running_sum], case.queries_SD[site], case.norm_D)
        running_sum = output if opens_block else running_sum + output
    return read([*blocks, running_sum], case.queries_SD[-1], case.norm_D)


def pseudo_code_read(sources: list[torch.Tensor], query_D: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """Read by the paper's pseudo-code: stack the sources, normalise them, two einsums."""
    values_NBTD = torch.stack(sources)
    keys_NBTD = F.rms_norm(values_NBTD, norm_D.shape, norm_D.to(values_NBTD.dtype), EPS)
    logits_NBT = torch.einsum("d,nbtd->nbt", query_D.to(keys_NBTD.dtype), keys_NBTD)
    return torch.einsum("nbt,nbtd->btd", logits_NBT.softmax(0), values_NBTD)


def concatenating_read(sources: list[torch.Tensor], query_D: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """Concatenate the sources beside each token, upcast and normalise all of them, project, and sum."""
    values_BTND = torch.cat([source.unsqueeze(2) for source in sources], dim=2)
    wide_BTND = values_BTND.float()
    keys_BTND = norm_D * (wide_BTND * torch.rsqrt(wide_BTND.square().mean(-1, keepdim=True) + EPS))
    weights_BTN = (keys_BTND @ query_D).softmax(-1)
    return (weights_BTN.unsqueeze(-1) * wide_BTND).sum(2).to(values_BTND.dtype)


def sdpa_read(sources: list[torch.Tensor], query_D: torch.Tensor, norm_D: torch.Tensor) -> torch.Tensor:
    """Read by `scaled_dot_product_attention`: one query per token against its sources; tokens are the batch."""
    values_MND = torch.stack(sources, dim=2).flatten(0, 1)
    keys_MND = F.rms_norm(values_MND, norm_D.shape, norm_D.to(values_MND.dtype), EPS)
    queries_M1D = query_D.to(keys_MND.dtype).expand(len(keys_MND), 1, -1)
    read_M1D = F.scaled_dot_product_attention(queries_M1D, keys_MND, values_MND, scale=1.0)
    return read_M1D.view_as(sources[0])


CANDIDATES = {
    "the paper's pseudo-code": lambda case: by_reads(case, pseudo_code_read),
    "ours, two-phase": lambda case: ours(case, TwoPhaseReader),
    "ours, plain": lambda case: ours(case, EagerReader),
    "concatenating": lambda case: by_reads(case, concatenating_read),
    "sdpa": lambda case: by_reads(case, sdpa_read),
    "standard residual": standard,
}


def runs_of(case: Case, names=CANDIDATES) -> Runs:
    """Bind candidates to a case."""
    return {name: partial(CANDIDATES[name], case) for name in names}


@torch.no_grad()
def measure_mechanism(tokens: list[int], repeats: int, output: Path | None) -> None:
    """Measure all candidates at the 48B model's width, depth and blocks, in fp32 and bf16."""
    results: Results = {}
    for count in tokens:
        for dtype in (torch.float32, torch.bfloat16):
            label = f"{'1 token' if count == 1 else f'{count} tokens'}, {str(dtype).removeprefix('torch.')}"
            turns = repeats * 10 if count <= 16 else repeats
            results[label] = compare(runs_of(Case(count, dtype)), turns, label)
    report("Reads of 54 sublayers, d = 2304, 9 blocks", results, output)


@torch.no_grad()
def measure_growth(repeats: int, output: Path | None) -> None:
    """Measure how the cost grows with tokens, layers, blocks and width: each varied by itself around a middle size."""
    middle = {"tokens": 256, "layers": 24, "block_size": 3, "width": 1024}
    varied = {"tokens": (64, 256, 1024), "layers": (12, 24, 48), "block_size": (1, 3, 12), "width": (512, 1024, 2048)}
    names = ["standard residual", "ours, two-phase", "the paper's pseudo-code"]
    results: Results = {}
    for field, values in varied.items():
        for value in values:
            case = Case(dtype=torch.float32, **middle | {field: value})
            label = f"{field.replace('_', ' ')} {value}"
            if field == "block_size":
                label += f" ({len(case.layout.starts)} blocks)"
            results[label] = compare(runs_of(case, names), repeats, label)
    report("How the cost grows, around 256 tokens, 24 layers in 8 blocks, d = 1024", results, output)
