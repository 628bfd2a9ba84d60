# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Depth attention: what a sublayer reads from the embedding and the layers before it, token by token.

Attention Residuals (Kimi Team, arXiv 2603.15031) replace the residual sum x_0 + v_1 + … + v_{l-1} by a softmax over the
*sources*: the embedding and earlier sublayer outputs (Full), or their sums over blocks of layers (Block). Sublayer l
has one learned *pseudo-query* w_l; keys and values are the sources themselves, only the key is RMS-normalised:

    input_l = Σ_i softmax_i( w_l · RMSNorm(source_i) ) · source_i

Notable here:
    - Queries do not depend on activations. So when a block closes, one matrix product gives its logits at *every* site,
      and no site ever normalises, upcasts or stacks the sources again (`EagerSources`). For inference, two read them
      at all sites of the next block at once (`TwoPhaseSources`).
    - `DepthRead` is the only thing a layer knows: it asks for what its site reads and does not know how it is made. It
      reads plainly, or for training with a gradient written by hand (`LeanRead`), or as phase 2 (`interpolate`).
    - `depth_read` is the same read written as in the paper; tests hold them all together.
    - No model family is known in this file.

Shapes: B batch, T tokens, M = B · T, D hidden size, L decoder layers, S = 2L + 1 sites (s: a block's), N closed blocks.
Sites: 2l is the attention of decoder layer l, 2l + 1 its MLP, 2L the output (before the final norm).
"""

from collections.abc import Sequence
from contextlib import nullcontext
from itertools import pairwise

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
    return torch.addcmul(floor, norm_BT1, norm_BT1).rsqrt_()


def source_logits(x_BTD: torch.Tensor, queries_SD: torch.Tensor, floor: torch.Tensor) -> torch.Tensor:
    """Logits `[B, T, S]` of one source at S sites: w · RMSNorm(x), the norm applied to the product. No 1/√d.

    Computed in the dtype of the queries (fp32 or fp64), also under autocast.
    """
    with autocast_off(x_BTD):
        return torch.matmul(x_BTD.to(queries_SD.dtype), queries_SD.t()) * inverse_size(x_BTD, floor)


def autocast_off(x: torch.Tensor):
    """A context without autocast; entering one costs more than asking whether it is on."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
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
        self.logits_BT: list[tuple[torch.Tensor, ...]] = []  # of each block, one a site

    def close(self, x_BTD: torch.Tensor) -> None:
        """Add the embedding, a finished block's sum (rounded once, to the embedding's dtype) or a sublayer's output."""
        self.move_to(x_BTD.device)
        self.logits_BT.append(source_logits(x_BTD, self.queries_SD, self.floor).unbind(-1))
        self.values_BTD.append(x_BTD.to(self.values_BTD[0].dtype) if self.values_BTD else x_BTD)

    def at(self, site: int) -> tuple[torch.Tensor, ...]:
        """What `DepthRead` needs at a site: its query `[D]`, D · eps, its logits `[B, T, N]`, and the N blocks."""
        logits_BTN = torch.stack([logits_BT[site] for logits_BT in self.logits_BT], dim=-1)
        return self.queries_SD[site], self.floor, logits_BTN, *self.values_BTD


class TwoPhaseSources(Sources):
    """The same for inference, in two phases (paper, Algorithm 1).

    Phase 1, at the start of a block: one matrix product reads all closed blocks at all sites of the block to come.
    Its result and log-sum-exp stand for those blocks as if they were one source, whose logit is the log-sum-exp.
    Phase 2, site by site, merges that one source with the running sum (`interpolate`).
    In Full mode every layer is such a block; its attention's output is what its MLP reads as the running sum.

    Sources are held once, in a buffer of this pass; so are phase 1's results, which each block overwrites when those of
    the block before have been read. Nothing here is differentiable.

    Args:
        block_starts: the first layer of each block.
        num_sources: how many sources will be closed in this pass.
    """

    tile_bytes = 2**22  # sources in the statistics dtype, worked on at a time where they are held in a narrower one
    phase_1_bytes = 2**28  # results held at a time, at most; beyond it, fewer sites than a block's at once

    def __init__(self, queries_SD: torch.Tensor, eps: float, block_starts: tuple[int, ...], num_sources: int):
        super().__init__(queries_SD, eps)
        self.queries_D = queries_SD.unbind()
        self.block_ends = [2 * layer for layer in block_starts[1:]] + [queries_SD.shape[0]]
        self.num_sources, self.closed = num_sources, 0
        self.read = 0  # how many closed blocks phase 1 has read
        self.first_site = self.end_site = 0  # the sites phase 1 was made for
        self.reads_BTD = self.log_sum_exps_BT1 = ()  # its results, one a site

    def close(self, x_BTD: torch.Tensor) -> None:
        """As `EagerSources.close`."""
        self.move_to(x_BTD.device)
        x_MD = x_BTD.flatten(0, 1)
        if self.closed == 0:
            self.shape = x_BTD.shape
            self.values_NMD = x_MD.new_empty(self.num_sources, *x_MD.shape)
            self.logits_NMS = self.floor.new_empty(self.num_sources, x_MD.shape[0], len(self.queries_D))
            self.results = self.floor.new_empty(x_MD.numel() * self.sites_at_once(x_MD))
        self.values_NMD[self.closed] = x_MD
        self.logits_NMS[self.closed] = source_logits(x_MD, self.queries_SD, self.floor)
        self.closed += 1

    def sites_at_once(self, x_MD: torch.Tensor) -> int:
        """As many as the largest block has, or as `phase_1_bytes` allow: those of whole layers, one at least.

        A layer is given what both its sites read, so one of them must not overwrite the other.
        """
        largest = max(end - start for start, end in pairwise([0, *self.block_ends]))
        return min(largest, max(2, self.phase_1_bytes // (x_MD.numel() * self.queries_SD.itemsize) // 2 * 2))

    def at(self, site: int) -> tuple[torch.Tensor, ...]:
        """As `EagerSources.at`, the result of phase 1 in place of the closed blocks."""
        if site >= self.end_site or self.read < self.closed:
            self.phase_1(site)
        index = site - self.first_site
        return self.queries_D[site], self.floor, self.log_sum_exps_BT1[index], self.reads_BTD[index]

    def phase_1(self, first_site: int) -> None:
        """Read all closed blocks at the sites from `first_site` to the end of its block, as far as results fit."""
        batch, tokens, width = self.shape
        fitting = self.results.numel() // self.values_NMD[0].numel()
        block_end = next(end for end in self.block_ends if end > first_site)
        self.first_site, self.end_site = first_site, min(block_end, first_site + fitting)
        self.read = self.closed
        sites = self.end_site - first_site
        values_NMD = self.values_NMD[: self.closed]
        logits_NMs = self.logits_NMS[: self.closed, :, first_site : self.end_site]
        log_weights_NMs = logits_NMs.log_softmax(0)
        log_sum_exps_Ms = logits_NMs[0] - log_weights_NMs[0]
        weights_MsN = log_weights_NMs.exp_().permute(1, 2, 0)
        reads_MsD = self.results[: batch * tokens * sites * width].view(-1, sites, width)
        tile = batch * tokens
        if values_NMD.dtype != weights_MsN.dtype:
            tile = max(1, self.tile_bytes // (self.closed * width * weights_MsN.itemsize))
        with autocast_off(values_NMD):
            for weights, values, out in zip(
                weights_MsN.split(tile), values_NMD.split(tile, dim=1), reads_MsD.split(tile)
            ):
                torch.bmm(weights, values.to(weights.dtype).transpose(0, 1), out=out)
        self.reads_BTD = reads_MsD.view(batch, tokens, sites, width).unbind(2)
        self.log_sum_exps_BT1 = log_sum_exps_Ms.view(batch, tokens, sites, 1).unbind(2)


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
    product_BT1 = (running_sum_BTD * query_D).sum(-1, keepdim=True)  # sooner done than a matmul, for one token
    difference_BT1 = torch.addcmul(logit_BT1, product_BT1, inverse_size(running_sum_BTD, floor), value=-1)
    return torch.lerp(running_sum_BTD, value_BTD, difference_BT1.sigmoid_())


def mix(weights_BTN: torch.Tensor, values_BTD: Sequence[torch.Tensor]) -> torch.Tensor:
    """The weighted sum of N sources, in the statistics dtype by type promotion: none is upcast whole."""
    first_BTD, *rest = values_BTD
    mixed_BTD = first_BTD * weights_BTN[..., :1]
    for index, value_BTD in enumerate(rest, start=1):
        mixed_BTD.addcmul_(value_BTD, weights_BTN[..., index : index + 1])
    return mixed_BTD


class LeanRead(torch.autograd.Function):
    """A read for training, its gradient written by hand.

    It saves references to the sources, which live anyway, and per-token scalars; both passes go over each source once
    or twice. Autograd's own gradient of the same operations (the plain way) keeps more and passes over it more often.
    """

    @staticmethod
    def forward(ctx, running_sum_BTD, query_D, floor, logits_BTN, *values_BTD):
        key_scale_BT1 = None
        if running_sum_BTD is not None:
            with autocast_off(running_sum_BTD):
                product_BT1 = torch.matmul(running_sum_BTD.to(query_D.dtype), query_D).unsqueeze(-1)
            key_scale_BT1 = inverse_size(running_sum_BTD, floor)
            logit_BT1 = product_BT1 * key_scale_BT1
            logits_BTN = torch.cat((logits_BTN, logit_BT1), dim=-1)
            values_BTD = (*values_BTD, running_sum_BTD)
        weights_BTN = logits_BTN.softmax(dim=-1)
        ctx.has_running_sum = running_sum_BTD is not None
        running_logit_BT1 = logits_BTN[..., -1:].clone() if ctx.has_running_sum else None
        ctx.save_for_backward(query_D, key_scale_BT1, running_logit_BT1, weights_BTN, *values_BTD)
        return mix(weights_BTN, values_BTD)

    @staticmethod
    def backward(ctx, grad_BTD):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Attention Residuals have first-order gradients only, but create_graph=True asks for a graph of them. "
                "Set config.attn_res_implementation = 'eager', whose reads can be differentiated again."
            )
        query_D, key_scale_BT1, logit_BT1, weights_BTN, *values_BTD = ctx.saved_tensors
        _, needs_query, _, needs_logits, *_ = ctx.needs_input_grad
        needs_values = [*ctx.needs_input_grad[4:], *ctx.needs_input_grad[: ctx.has_running_sum]]

        along_BTN = torch.cat([(grad_BTD * value_BTD).sum(-1, keepdim=True) for value_BTD in values_BTD], dim=-1)
        grad_logits_BTN = weights_BTN * (along_BTN - (weights_BTN * along_BTN).sum(-1, keepdim=True))
        grads_BTD = [
            grad_BTD * weights_BTN[..., index : index + 1] if needed else None
            for index, needed in enumerate(needs_values)
        ]
        grad_running_sum_BTD = grad_query_D = None
        if ctx.has_running_sum:
            grad_running_sum_BTD, running_sum_BTD = grads_BTD.pop(), values_BTD.pop()
            grad_product_BT1 = grad_logits_BTN[..., -1:] * key_scale_BT1
            grad_logits_BTN = grad_logits_BTN[..., :-1]
            if needs_query:
                with autocast_off(grad_BTD):
                    flat_MD = running_sum_BTD.to(grad_product_BT1.dtype).flatten(0, -2)
                    grad_query_D = torch.mv(flat_MD.t(), grad_product_BT1.flatten())
            if grad_running_sum_BTD is not None:
                grad_running_sum_BTD.addcmul_(grad_product_BT1, query_D)
                grad_running_sum_BTD.addcmul_(grad_product_BT1 * logit_BT1 * key_scale_BT1, running_sum_BTD, value=-1)
                grad_running_sum_BTD = grad_running_sum_BTD.to(running_sum_BTD.dtype)
        grads_BTD = [None if grad is None else grad.to(value.dtype) for grad, value in zip(grads_BTD, values_BTD)]
        return grad_running_sum_BTD, grad_query_D, None, grad_logits_BTN if needs_logits else None, *grads_BTD


class DepthRead(nn.Module):
    """What one site reads. Without parameters; a module, so that its depth weights can be recorded by a hook."""

    def forward(
        self,
        running_sum_BTD: torch.Tensor | None,
        query_D: torch.Tensor,
        floor: torch.Tensor,
        logits_BTN: torch.Tensor,
        *values_BTD: torch.Tensor,
        way: str = "plain",
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Attend to the closed blocks and, where there is one, the running sum of the block so far.

        Args:
            running_sum_BTD: the running sum, or `None` at a site that opens a block.
            query_D: the site's effective query, in the statistics dtype.
            floor: D · eps of the key norm, a scalar.
            logits_BTN: the closed blocks' logits at this site.
            values_BTD: the N closed blocks, or what phase 1 made of them.
            way: `"plain"`, differentiable any number of times, also returns the depth weights; `"lean"` is
                `LeanRead`; `"two_phase"` is phase 2, for what `TwoPhaseSources` gave.

        Returns:
            The site's input `[B, T, D]`, not yet rounded to the dtype of the stream, and its depth weights
            `[B, T, N (+ 1)]`, which sum to 1, the running sum's last; or `None`.
        """
        if way == "two_phase":
            if running_sum_BTD is None:
                return values_BTD[0], None
            return interpolate(running_sum_BTD, query_D, floor, logits_BTN, *values_BTD), None
        if way == "lean":
            return LeanRead.apply(running_sum_BTD, query_D, floor, logits_BTN, *values_BTD), None

        if running_sum_BTD is not None:
            logit_BT1 = source_logits(running_sum_BTD, query_D[None], floor)
            logits_BTN = torch.cat((logits_BTN, logit_BT1), dim=-1)
            values_BTD = (*values_BTD, running_sum_BTD)
        weights_BTN = logits_BTN.softmax(dim=-1)
        return mix(weights_BTN, values_BTD), weights_BTN


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
