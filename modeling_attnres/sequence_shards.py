# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Sequence-sharded prefill: under tensor parallelism each rank keeps, and reads, the depth of its part of a prompt.

Depth attention is of each token by itself, so nothing of it needs the whole sequence (paper, section 4.2). Tensor
parallelism leaves every rank the whole residual stream; here each has a run of its tokens instead, and block sums,
phase 1 and phase 2 are of those alone: their memory divides by the ranks. What a sublayer reads is gathered, and the
sum of its outputs over ranks, an all-reduce, becomes a reduce-scatter: the same traffic.

The parts are rules of transformers' tensor parallelism. `sequence_sharded_plan` names them for a model:
    - `ShardDepth` tells the model's depth attention which ranks share a sequence;
    - `ScatterRows` gives each rank its tokens of an output projection.

Shapes: B batch, T tokens, t those of this rank, D hidden size. Ranks have T / P tokens each, rounded up, and the last
one what is left.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import transformers
from torch import nn
from transformers import PreTrainedModel


if torch.distributed.is_available():  # not in every build
    from torch.distributed.device_mesh import DeviceMesh
    from torch.distributed.tensor import DTensor, Replicate, Shard


SCATTER_ROWS, SHARD_DEPTH = "rowwise_to_sequence", "depth_by_sequence"
# The projections whose output is a sublayer's output, and nothing else: of experts, too, it is a part of a sum.
OUTPUT_PROJECTIONS = ("layers.*.self_attn.o_proj", "layers.*.mlp.down_proj")


def is_sharded(num_tokens: int, mesh: DeviceMesh) -> bool:
    """Say whether a pass over so many tokens is sharded: a prefill is, a decoded token and training are not.

    Every rank must have a token, of parts that are rounded up.
    """
    before_last = (mesh.size() - 1) * math.ceil(num_tokens / mesh.size())
    return not torch.is_grad_enabled() and num_tokens > before_last


@dataclass(frozen=True)
class SequenceShards:
    """The tokens that each rank of a tensor-parallel group has of one pass's sequence.

    Args:
        mesh: of the ranks.
        num_tokens: T.
    """

    mesh: DeviceMesh
    num_tokens: int


def shard_sequence(mesh: DeviceMesh | None, embedding_BTD: torch.Tensor) -> SequenceShards | None:
    """Return the shards of a pass, `None` where every rank keeps the whole sequence."""
    if mesh is None or not is_sharded(embedding_BTD.shape[1], mesh):
        return None
    return SequenceShards(mesh, embedding_BTD.shape[1])


def take_own(shards: SequenceShards | None, x_BTD: torch.Tensor) -> torch.Tensor:
    """Return this rank's tokens, `[B, t, D]`, of a tensor that has all, and any other as it is."""
    if shards is None or x_BTD.shape[1] != shards.num_tokens:
        return x_BTD
    mesh = shards.mesh
    count, start = Shard.local_shard_size_and_offset(shards.num_tokens, mesh.size(), mesh.get_local_rank())
    return x_BTD.narrow(1, start, count).contiguous()


def gather(shards: SequenceShards | None, own_BTD: torch.Tensor) -> torch.Tensor:
    """Return all tokens, `[B, T, …]`, where a rank has some, and any other tensor as it is."""
    if shards is None:
        return own_BTD
    shape = torch.Size((own_BTD.shape[0], shards.num_tokens, *own_BTD.shape[2:]))
    stride = torch.empty(shape, device="meta").stride()
    own_BTD = own_BTD.contiguous()
    placed = DTensor.from_local(own_BTD, shards.mesh, [Shard(1)], run_check=False, shape=shape, stride=stride)
    return placed.redistribute(placements=[Replicate()]).to_local()


def sequence_sharded_plan(config, prefix: str = "model.") -> dict[str, str]:
    """Return what a model's tensor-parallel plan has otherwise where prefill is sharded over the sequence.

    Logits, text and depth weights are those of the whole sequence. Hidden states between layers (hooks on them,
    `output_hidden_states`) are of this rank's tokens.

    Args:
        config: of a port or another model with Attention Residuals, of the form "replace".
        prefix: of the decoder's modules in the model: "" for a decoder without a head (`AutoModel`).

    Raises:
        ValueError: the model cannot be run so.
        ImportError: this release of transformers has other plans.

    Example (of every process under torchrun):
        ```python
        from transformers import AutoConfig, AutoModelForCausalLM
        from transformers.distributed import DistributedConfig
        from modeling_attnres import sequence_sharded_plan

        plan = sequence_sharded_plan(AutoConfig.from_pretrained("ported"))
        how = DistributedConfig(tp_size=2, tp_plan=plan)
        model = AutoModelForCausalLM.from_pretrained("ported", distributed_config=how)
        ```
    """
    register_parallel_styles()
    if not hasattr(config, "attn_res_mode"):
        raise ValueError(f"{type(config).__name__} is a base family's config; expected that of a port.")
    if config.attn_res_mode == "none":
        raise ValueError('attn_res_mode="none": there is no depth attention to shard; expected "block" or "full".')
    if config.attn_res_depth_form.additive:
        raise ValueError(
            'attn_res_form="add" keeps the residual stream, which the base model holds whole; expected "replace".'
        )
    base = config.base_model_tp_plan or {}
    if not base:
        raise ValueError(f"transformers has no tensor-parallel plan for {config.base_model_type()!r}.")
    rules = {name: SCATTER_ROWS for name in OUTPUT_PROJECTIONS if base.get(name) == "rowwise"}
    return {prefix + name: style for name, style in {**rules, "attn_res": SHARD_DEPTH}.items()}


def register_parallel_styles() -> None:
    """Enter the two rules among those of transformers' tensor parallelism."""
    if not hasattr(PreTrainedModel, "_resolve_parallel_plans"):
        raise ImportError(
            f"transformers {transformers.__version__} does not take rules beside a model's own tensor-parallel plan, "
            "which sequence-sharded prefill needs; 5.24 does."
        )
    from transformers.distributed.tensor_parallel import ALL_PARALLEL_STYLES, RowwiseParallel, TensorParallelLayer

    class ShardDepth(TensorParallelLayer):
        """For a model's `DepthAttention`."""

        def install_forward(self, module: nn.Module, mesh: DeviceMesh) -> nn.Module:
            module.sequence_mesh = mesh
            return module

    class ScatterRows(RowwiseParallel):
        """Row-wise, for an output projection: each rank has the sum of its tokens, `[B, t, D]`."""

        scattered = RowwiseParallel(output_layouts=Shard(1))

        def transform_output_post_forward(self, module, output, mesh):
            if is_sharded(output.shape[1], mesh):
                return self.scattered.transform_output_post_forward(module, output, mesh)
            return super().transform_output_post_forward(module, output, mesh)

    ALL_PARALLEL_STYLES.register(SHARD_DEPTH, ShardDepth())
    ALL_PARALLEL_STYLES.register(SCATTER_ROWS, ScatterRows())
