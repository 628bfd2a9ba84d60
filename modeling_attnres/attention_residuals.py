# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Depth attention: what a sublayer reads from the embedding and the layers before it, token by token.

Attention Residuals (Kimi Team, arXiv 2603.15031) replace the residual sum x_0 + v_1 + … + v_{l-1} by a softmax over the
*sources*: the embedding and earlier sublayer outputs (Full), or their sums over blocks of layers (Block). Sublayer l
has one learned *pseudo-query* w_l; keys and values are the sources themselves, only the key is RMS-normalised:

    input_l = Σ_i softmax_i( w_l · RMSNorm(source_i) ) · source_i

Notable here:
    - Queries do not depend on activations. So when a block closes, one matrix product gives its logits at *every* site,
      and no site ever normalises, upcasts or stacks the sources again (`EagerSources`). For inference, one more reads
      them at all sites of the next block at once (`TwoPhaseSources`).
    - `DepthRead` is the only thing a layer knows: it asks for what its site reads and does not know how it is made.
    - `depth_read` is the same read written as in the paper; tests hold the two together.
    - No model family is known in this file.

Shapes: B batch, T tokens, D hidden size, L decoder layers, S = 2L + 1 sites (s: those of a group), N closed blocks.
Sites: 2l is the attention of decoder layer l, 2l + 1 its MLP, 2L the output (before the final norm).
"""

from contextlib import nullcontext

import torch
from torch import nn
from torch.utils._pytree import tree_map_only
from transformers import initialization as init
from transformers.core_model_loading import MergeModulelist, WeightConverter, WeightRenaming


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Norms, logits and softmax are computed in fp32, or in fp64 where the sources are fp64."""
    return torch.promote_types(dtype, torch.float32)


class DepthAttention(nn.Module):
    """The parameters of depth attention for the whole model: a pseudo-query w and a key norm γ for every site.

    One module at the root of the model, stacked over layers, kept in fp32: a block's queries are needed together, PEFT
    trains them by the name of one module, and small steps of a vector that starts at zero are not rounded away. All
    queries start at zero and all norms at one, so every read starts as the plain mean of its sources.

    Row 0 of `attention_query` and `attention_norm` has no effect: the first sublayer has one source.
    """

    def __init__(self, num_layers: int, hidden_size: int):
        super().__init__()

        def parameter(*shape):
            return nn.Parameter(torch.empty(*shape, dtype=torch.float32))

        # [L, 1, D] and [1, D] as on disk: there a query is the weight of a linear map to one logit
        self.attention_query = parameter(num_layers, 1, hidden_size)
        self.attention_norm = parameter(num_layers, hidden_size)
        self.mlp_query = parameter(num_layers, 1, hidden_size)
        self.mlp_norm = parameter(num_layers, hidden_size)
        self.output_query = parameter(1, hidden_size)
        self.output_norm = parameter(hidden_size)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Zero queries and unit norms, for those that were not loaded."""
        for name, tensor in self.named_parameters():
            (init.zeros_ if name.endswith("query") else init.ones_)(tensor)

    def forward(self, x_BTD: torch.Tensor) -> torch.Tensor:
        """The effective queries √D · w ⊙ γ of all sites, `[S, D]`, for sources like `x_BTD` in dtype and device.

        The norm's weight only ever appears in the product w · (γ ⊙ x / rms(x)), so it is folded into the query, and so
        is the √D between |x| and rms(x).
        """
        attention_LD = self.attention_query.squeeze(1) * self.attention_norm
        mlp_LD = self.mlp_query.squeeze(1) * self.mlp_norm
        layers_SD = torch.stack((attention_LD, mlp_LD), dim=1).flatten(0, 1)
        queries_SD = torch.cat((layers_SD, self.output_query * self.output_norm)) * x_BTD.shape[-1] ** 0.5
        return queries_SD.to(device=x_BTD.device, dtype=statistics_dtype(x_BTD.dtype))


def inverse_size(x_BTD: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """1 / √(|x|² + D · eps), `[B, T, 1]`, with `floor` = D · eps: the key norm up to the √D that the queries carry."""
    norm_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True, dtype=floor.dtype)
    return torch.rsqrt(torch.addcmul(floor, norm_BT1, norm_BT1))


def source_logits(x_BTD: torch.Tensor, queries_SD: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, S]` of one source at S sites: w · RMSNorm(x), the norm applied to the product. No 1/√d.

    Computed in the dtype of the queries (fp32 or fp64), also under autocast.
    """
    with autocast_off(x_BTD):
        return torch.matmul(x_BTD.to(queries_SD.dtype), queries_SD.t()) * inverse_size(x_BTD, floor)


def autocast_off(x: torch.Tensor):
    """A context without autocast; entering one costs more than asking whether it is on."""
    if torch.amp.is_autocast_available(x.device.type) and torch.is_autocast_enabled(x.device.type):
        return torch.autocast(x.device.type, enabled=False)
    return nullcontext()


class Sources:
    """What the two ways of holding the closed blocks share.

    Args:
        queries_SD: the effective queries of all sites.
        eps: the key norm's epsilon.
    """

    def __init__(self, queries_SD: torch.Tensor, eps: float):
        self.queries_SD, self.floor = queries_SD, queries_SD.new_tensor(queries_SD.shape[-1] * eps)

    def move_to(self, device: torch.device) -> None:
        """Move everything held: a model spread over devices continues where its newest block is."""
        if self.queries_SD.device != device:
            moved = tree_map_only(torch.Tensor, lambda tensor: tensor.to(device), vars(self))
            vars(self).update(moved)


class EagerSources(Sources):
    """The closed blocks of a pass, read one by one. A block's logits at every site are made once, when it closes."""

    def __init__(self, queries_SD: torch.Tensor, eps: float):
        super().__init__(queries_SD, eps)
        self.values_BTD: list[torch.Tensor] = []
        self.logits_BTS: list[torch.Tensor] = []

    def close(self, x_BTD: torch.Tensor) -> None:
        """Add the embedding, a finished block's sum (rounded once, to the embedding's dtype) or a sublayer's output."""
        self.move_to(x_BTD.device)
        self.logits_BTS.append(source_logits(x_BTD, self.queries_SD, self.floor))
        self.values_BTD.append(x_BTD.to(self.values_BTD[0].dtype) if self.values_BTD else x_BTD)

    def at(self, site: int) -> tuple[torch.Tensor, ...]:
        """What `DepthRead` needs at a site: its query `[D]`, D · eps, its logits `[B, T, N]`, and the N blocks."""
        logits_BTN = torch.stack([logits_BTS[..., site] for logits_BTS in self.logits_BTS], dim=-1)
        return self.queries_SD[site], self.floor, logits_BTN, *self.values_BTD


class TwoPhaseSources(Sources):
    """The same for inference, in two phases (paper, Algorithm 1).

    Phase 1, at the start of a group of layers: one matrix product reads all closed blocks at all sites of the group.
    Its result and log-sum-exp stand for those blocks as if they were one source, whose logit is the log-sum-exp.
    Phase 2, site by site, is then an ordinary `DepthRead` of that one source and the running sum.
    The groups are the blocks; in Full mode, some layers each, whose outputs are read one by one within the group.

    Blocks are held once, in a buffer of this pass. Nothing here is differentiable.

    Args:
        groups: the first layer of each group.
        num_blocks: how many sources will be closed in this pass.
    """

    phase_1_bytes = 2**28  # at most, for results held at a time; beyond it, fewer sites than a group's at once

    def __init__(self, queries_SD: torch.Tensor, eps: float, groups: tuple[int, ...], num_blocks: int):
        super().__init__(queries_SD, eps)
        self.queries_D = queries_SD.unbind()
        self.group_ends = [2 * layer for layer in groups[1:]] + [queries_SD.shape[0]]
        self.num_blocks, self.closed = num_blocks, 0
        self.first_site = self.end_site = 0  # the sites phase 1 was made for
        self.reads_BTD = self.log_sum_exps_BT1 = ()  # its results, one a site
        self.read = 0  # how many blocks it has read

    def close(self, x_BTD: torch.Tensor) -> None:
        """As `EagerSources.close`."""
        self.move_to(x_BTD.device)
        logits_BTS = source_logits(x_BTD, self.queries_SD, self.floor)
        if self.closed == 0:
            batch, tokens, width = x_BTD.shape
            self.values_BTND = x_BTD.new_empty(batch, tokens, self.num_blocks, width)
            self.logits_BTSN = logits_BTS.new_empty(*logits_BTS.shape, self.num_blocks)
        self.values_BTND[:, :, self.closed] = x_BTD
        self.logits_BTSN[..., self.closed] = logits_BTS
        self.closed += 1

    def phase_1(self, first_site: int) -> None:
        """Read all closed blocks at the sites from `first_site` to the end of its group."""
        end_site = next(end for end in self.group_ends if end > first_site)
        site_bytes = self.values_BTND[:, :, 0].numel() * self.queries_SD.itemsize
        self.first_site = first_site
        self.end_site = min(end_site, first_site + max(2, self.phase_1_bytes // site_bytes // 2 * 2))
        logits_BTsN = self.logits_BTSN[:, :, first_site : self.end_site, : self.closed]
        log_sum_exp_BTs1 = logits_BTsN.logsumexp(-1, keepdim=True)
        weights_BTsN = torch.exp(logits_BTsN - log_sum_exp_BTs1)
        self.reads_BTD = self.mix(weights_BTsN, self.values_BTND[:, :, : self.closed]).unbind(2)
        self.log_sum_exps_BT1 = log_sum_exp_BTs1.unbind(2)
        self.read = self.closed

    def mix(self, weights_BTsN: torch.Tensor, values_BTND: torch.Tensor) -> torch.Tensor:
        """The weighted sums `[B, T, s, D]` in the statistics dtype; narrower values are upcast in tiles of tokens."""
        with autocast_off(values_BTND):
            if values_BTND.dtype == weights_BTsN.dtype:
                return torch.matmul(weights_BTsN, values_BTND)
            tokens = values_BTND.shape[1]
            tile = max(1, tokens * self.phase_1_bytes // (2 * values_BTND.nbytes))
            tiles = zip(weights_BTsN.split(tile, dim=1), values_BTND.split(tile, dim=1))
            return torch.cat([torch.matmul(weights, values.to(weights.dtype)) for weights, values in tiles], dim=1)

    def at(self, site: int) -> tuple[torch.Tensor, ...]:
        """As `EagerSources.at`, the result of phase 1 in place of the blocks it has read."""
        if site >= self.end_site:
            self.phase_1(site)
        logits_BTN = self.log_sum_exps_BT1[site - self.first_site]
        values_BTD = (self.reads_BTD[site - self.first_site],)
        if self.closed > self.read:
            logits_BTN = torch.cat((logits_BTN, self.logits_BTSN[:, :, site, self.read : self.closed]), dim=-1)
            values_BTD += self.values_BTND[:, :, self.read : self.closed].unbind(2)
        return self.queries_D[site], self.floor, logits_BTN, *values_BTD


def add_output(running_sum_BTD: torch.Tensor | None, output_BTD: torch.Tensor) -> torch.Tensor:
    """Add a sublayer's output to the running sum of its block, or open one with it.

    The sum is kept in the statistics dtype: rounding it to bf16 after every sublayer would cost more than all else.
    """
    if running_sum_BTD is None:
        return output_BTD
    dtype = statistics_dtype(running_sum_BTD.dtype)
    if running_sum_BTD.dtype != dtype:
        running_sum_BTD = running_sum_BTD.to(dtype)
    return running_sum_BTD + output_BTD


def interpolate(
    running_sum_BTD: torch.Tensor,
    query_D: torch.Tensor,
    floor: torch.Tensor,
    logit_BT1: torch.Tensor,
    value_BTD: torch.Tensor,
) -> torch.Tensor:
    """A read of two sources, the running sum and one other: the softmax is a sigmoid, the mixture an interpolation.

    This is phase 2, once a site: for few tokens its cost is the number of operations, so there are few.
    """
    dtype = query_D.dtype
    if value_BTD.dtype != dtype or running_sum_BTD.dtype != dtype:
        value_BTD, running_sum_BTD = value_BTD.to(dtype), running_sum_BTD.to(dtype)
    with autocast_off(running_sum_BTD):
        product_BT1 = torch.matmul(running_sum_BTD, query_D).unsqueeze(-1)
    share_BT1 = torch.sigmoid(torch.addcmul(logit_BT1, product_BT1, inverse_size(running_sum_BTD, floor), value=-1))
    return torch.lerp(running_sum_BTD, value_BTD, share_BT1)


class DepthRead(nn.Module):
    """What one site reads. Without parameters; a module, so that its depth weights can be recorded by a hook."""

    def forward(
        self,
        running_sum_BTD: torch.Tensor | None,
        query_D: torch.Tensor,
        floor: torch.Tensor,
        logits_BTN: torch.Tensor,
        *values_BTD: torch.Tensor,
        with_weights: bool = False,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the closed blocks and, where there is one, the running sum of the block so far.

        Args:
            running_sum_BTD: the running sum, or `None` at a site that opens a block.
            query_D: the site's effective query, in the statistics dtype.
            floor: D · eps of the key norm, a scalar.
            logits_BTN: the closed blocks' logits at this site.
            values_BTD: the N closed blocks, or what phase 1 made of them.
            with_weights: also return the depth weights.

        Returns:
            The site's input `[B, T, D]`, not yet rounded to the dtype of the stream, and its depth weights
            `[B, T, N (+ 1)]`, which sum to 1, the running sum's last; or `None`.
        """
        if len(values_BTD) == 1 and not with_weights:
            (value_BTD,) = values_BTD
            if running_sum_BTD is None:
                return value_BTD, None
            return interpolate(running_sum_BTD, query_D, floor, logits_BTN, value_BTD), None

        if running_sum_BTD is not None:
            logit_BT1 = source_logits(running_sum_BTD, query_D[None], floor)
            logits_BTN = torch.cat((logits_BTN, logit_BT1), dim=-1)
            values_BTD = (*values_BTD, running_sum_BTD)
        weights_BTN = logits_BTN.softmax(dim=-1)

        # The first product makes the accumulator, in the statistics dtype by type promotion: nothing is upcast whole.
        first_BTD, *rest = values_BTD
        mixed_BTD = first_BTD * weights_BTN[..., :1]
        for index, value_BTD in enumerate(rest, start=1):
            mixed_BTD.addcmul_(value_BTD, weights_BTN[..., index : index + 1])
        return mixed_BTD, weights_BTN if with_weights else None


def depth_read(
    sources: list[torch.Tensor], query_D: torch.Tensor, norm_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """The plain twin of a read, written as in the paper: stack, normalise the keys, softmax over depth, weighted sum.

    Args:
        sources: the N sources a site reads, each `[B, T, D]`: closed blocks first, the running sum last.
        query_D: the pseudo-query w.
        norm_D: the key norm's weight γ.
        eps: the key norm's epsilon.

    Returns:
        The site's input `[B, T, D]` in the dtype of the sources, and its depth weights `[B, T, N]`.
    """
    values_NBTD = torch.stack(sources)
    keys_NBTD = values_NBTD.to(statistics_dtype(values_NBTD.dtype))
    keys_NBTD = keys_NBTD * torch.rsqrt(keys_NBTD.square().mean(-1, keepdim=True) + eps) * norm_D
    weights_NBT = torch.einsum("d,nbtd->nbt", query_D.to(keys_NBTD.dtype), keys_NBTD).softmax(dim=0)
    mixed_BTD = torch.einsum("nbt,nbtd->btd", weights_NBT, values_NBTD.to(weights_NBT.dtype))
    return mixed_BTD.to(values_NBTD.dtype), weights_NBT.movedim(0, -1)


class _AlwaysReversed:
    """A transform that is reversed on saving even if loading met nothing to transform, as with a base checkpoint."""

    __slots__ = ()

    def was_used(self) -> bool:
        return True


class _DepthRenaming(_AlwaysReversed, WeightRenaming):
    __slots__ = ()


class _DepthConverter(_AlwaysReversed, WeightConverter):
    __slots__ = ()


def depth_attention_mapping() -> list[WeightRenaming | WeightConverter]:
    """The names of the depth parameters on disk (Kimi K3's, one tensor a layer) and in memory (stacked), reversibly.

    | on disk                                      | shape    | in memory                      |
    |----------------------------------------------|----------|--------------------------------|
    | model.layers.N.self_attention_res_proj.weight | [1, D]  | model.attn_res.attention_query |
    | model.layers.N.self_attention_res_norm.weight | [D]     | model.attn_res.attention_norm  |
    | model.layers.N.mlp_res_proj.weight            | [1, D]  | model.attn_res.mlp_query       |
    | model.layers.N.mlp_res_norm.weight            | [D]     | model.attn_res.mlp_norm        |
    | model.output_attn_res_proj.weight             | [1, D]  | model.attn_res.output_query    |
    | model.output_attn_res_norm.weight             | [D]     | model.attn_res.output_norm     |
    """
    stacked = {
        "layers.*.self_attention_res_proj.weight": "attn_res.attention_query",
        "layers.*.self_attention_res_norm.weight": "attn_res.attention_norm",
        "layers.*.mlp_res_proj.weight": "attn_res.mlp_query",
        "layers.*.mlp_res_norm.weight": "attn_res.mlp_norm",
    }
    renamed = {
        "output_attn_res_proj.weight": "attn_res.output_query",
        "output_attn_res_norm.weight": "attn_res.output_norm",
    }
    return [_DepthConverter(disk, memory, [MergeModulelist(dim=0)]) for disk, memory in stacked.items()] + [
        _DepthRenaming(disk, memory) for disk, memory in renamed.items()
    ]


def with_literal_dots(rule: WeightRenaming | WeightConverter) -> WeightRenaming | WeightConverter:
    """Mixtral's rule `.block_sparse_moe.` -> `.mlp.` as it is meant.

    Patterns are regular expressions: reversed on saving, its unescaped dots would take `.mlp_` of `.mlp_res_proj`, too.
    """
    if isinstance(rule, WeightRenaming) and rule.source_patterns == [".block_sparse_moe."]:
        return WeightRenaming(r"\.block_sparse_moe\.", r"\.mlp\.")
    return rule
