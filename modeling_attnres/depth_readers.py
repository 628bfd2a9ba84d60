# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""The readers that `attn_res_implementation="auto"` prefers to the plain one: for training, and for inference.

Both compute what `EagerReader` computes; tests hold them to it, forward and gradient.

Shapes: B batch, T tokens, M = B · T, D hidden size, S sites, P sites read at once in phase 1, N closed blocks (in a
read with a running sum: N sources). With several heads D is two axes, H heads × E = D / H; per-token scalars have an
axis H, too. To phase 1 a head is one more token, of width E: then M = B · T · H and D = E.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .depth_attention import (
    DepthParameters,
    DepthReader,
    EagerInputs,
    EagerReader,
    autocast_off,
    inverse_size,
    join_heads,
    mix,
    query_products,
    register_depth_reader,
    source_logits,
    split_heads,
)


class TrainingRead(torch.autograd.Function):
    """A read with its gradient written by hand.

    It saves references to the sources, which live anyway, and per-token scalars; both passes go over each source once
    or twice. Autograd's own gradient of the same operations keeps more and passes over it more often.

    A token reads the sources s_i (the blocks and, last, the running sum r) with the query q:

        h = Σ_i α_i s_i        α = softmax(z)        z_i = k_i (q · s_i)        k_i = 1 / √(|s_i|² + D · eps)

    Write ∂x for ∂loss/∂x, and g for ∂h, which the backward pass is given. Then, from h back:

        ∂α_i = g · s_i
        ∂s_i = α_i g                                 of the source as a value
        ∂z_i = α_i (∂α_i - Σ_j α_j ∂α_j)             of the softmax

    The logits of blocks are an input, so their gradient is handed back. That of the running sum is computed here, so r
    has a gradient as a key, too. With ∂k_r/∂r = -k_r³ r follows ∂z_r/∂r = k_r q - k_r³ (q · r) r = k_r q - k_r² z_r r:

        ∂q   = Σ_tokens ∂z_r k_r r
        ∂r   = α_r g + ∂z_r k_r q - ∂z_r z_r k_r² r

    With several heads α, z and q are a head's, all of this holds for its part of the width, and k_r, which is of the
    whole width, passes on what every head adds: the last term is - (Σ_heads ∂z_r z_r) k_r² r.
    """

    @staticmethod
    def forward(ctx, running_sum_BTD, query_D, scaled_eps, logits_BTN, *sources_BTD):
        key_scale_BT1 = running_logit_BT1 = None
        if running_sum_BTD is not None:  # r, the last source
            key_scale_BT1 = inverse_size(running_sum_BTD, query_D.shape, scaled_eps)  # k_r
            running_logit_BT1 = query_products(running_sum_BTD, query_D[None]) * key_scale_BT1  # z_r = k_r (q · r)
            logits_BTN = torch.cat((logits_BTN, running_logit_BT1), dim=-1)
            sources_BTD = (*sources_BTD, running_sum_BTD)
        weights_BTN = logits_BTN.softmax(dim=-1)  # α
        ctx.has_running_sum = running_sum_BTD is not None
        ctx.save_for_backward(query_D, key_scale_BT1, running_logit_BT1, weights_BTN, *sources_BTD)
        return mix(weights_BTN, sources_BTD)

    @staticmethod
    def backward(ctx, grad_BTD):
        if torch.is_grad_enabled():
            raise RuntimeError(
                "Attention Residuals have first-order gradients only, but create_graph=True asks for a graph of them. "
                "Set config.attn_res_implementation = 'eager', whose reads can be differentiated again."
            )
        query_D, key_scale_BT1, logit_BT1, weights_BTN, *sources_BTD = ctx.saved_tensors
        _, needs_query, _, needs_logits, *needs_sources = ctx.needs_input_grad
        if ctx.has_running_sum:  # the first argument, but the last source
            needs_sources.append(ctx.needs_input_grad[0])

        # ∂α_i = g · s_i
        grad_weights_BTN = torch.cat([(grad_BTD * source_BTD).sum(-1, keepdim=True) for source_BTD in sources_BTD], -1)
        # ∂z_i = α_i (∂α_i - Σ_j α_j ∂α_j)
        mean_BT1 = (weights_BTN * grad_weights_BTN).sum(-1, keepdim=True)
        grad_logits_BTN = weights_BTN * (grad_weights_BTN - mean_BT1)
        # ∂s_i = α_i g, of the sources whose gradient is asked for: complete for a block, not yet for the running sum
        dtypes = [source_BTD.dtype for source_BTD in sources_BTD]
        if ctx.has_running_sum:
            dtypes[-1] = grad_weights_BTN.dtype
        grads_BTD = [
            (grad_BTD * weights_BTN[..., index : index + 1]).to(dtype) if needed else None
            for index, (needed, dtype) in enumerate(zip(needs_sources, dtypes))
        ]
        grad_running_sum_BTD = grad_query_D = None
        if ctx.has_running_sum:
            # Set the running sum apart: what is left in the lists is of blocks.
            grad_running_sum_BTD, running_sum_BTD = grads_BTD.pop(), sources_BTD.pop()
            grad_product_BT1 = grad_logits_BTN[..., -1:] * key_scale_BT1  # ∂z_r k_r, the gradient of q · r
            grad_logits_BTN = grad_logits_BTN[..., :-1]
            if needs_query:
                # ∂q = Σ_tokens ∂z_r k_r r
                with autocast_off(grad_BTD):
                    flat_MD = running_sum_BTD.to(grad_product_BT1.dtype).flatten(0, 1)
                    grad_query_D = torch.einsum("m...d,m...->...d", flat_MD, grad_product_BT1.flatten(0, 1).squeeze(-1))
            if grad_running_sum_BTD is not None:
                # ∂r = α_r g (which it holds already) + ∂z_r k_r q
                grad_running_sum_BTD.addcmul_(grad_product_BT1, query_D)
                # … - (Σ_heads ∂z_r z_r) k_r² r
                factor_BT1 = grad_product_BT1 * logit_BT1 * key_scale_BT1
                if query_D.dim() > 1:
                    factor_BT1 = factor_BT1.sum(-2, keepdim=True)
                grad_running_sum_BTD.addcmul_(factor_BT1, running_sum_BTD, value=-1)
                grad_running_sum_BTD = grad_running_sum_BTD.to(running_sum_BTD.dtype)
        # A gradient per argument of forward, in their order; scaled_eps has none.
        return grad_running_sum_BTD, grad_query_D, None, grad_logits_BTN if needs_logits else None, *grads_BTD


class TrainingReader(EagerReader):
    """The eager reader with the hand-written gradient (first order) and without depth weights."""

    gives_weights = False
    exports = transforms = False

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs: EagerInputs) -> tuple[torch.Tensor, None]:
        query_D, scaled_eps, logits_BTN, blocks_BTD = inputs
        if running_sum_BTD is not None:
            running_sum_BTD = split_heads(running_sum_BTD, query_D.shape)
        mixed_BTD = TrainingRead.apply(running_sum_BTD, query_D, scaled_eps, logits_BTN, *blocks_BTD)
        return join_heads(mixed_BTD, query_D.shape), None


class TwoPhaseInputs(NamedTuple):
    """What phase 2 needs: the site's query, D · eps, and phase 1's result: its log-sum-exp and its mixture."""

    query_D: torch.Tensor
    scaled_eps: torch.Tensor
    log_sum_exp_BT1: torch.Tensor
    mixture_BTD: torch.Tensor


class TwoPhaseReader(DepthReader):
    """For inference, in two phases (paper, Algorithm 1). Exact; nothing here is differentiable.

    Phase 1, at the start of a block: all closed blocks are read at all sites of the block to come. The result and its
    log-sum-exp stand for those blocks as if they were one source, whose logit is the log-sum-exp.
    Phase 2, site by site, merges that one source with the running sum: an interpolation.
    In Full mode every layer is such a block; its attention's output is what its MLP reads as the running sum.

    Blocks are held once, in a buffer per pass, with their logits at every site, which are computed when a block closes.
    """

    gives_gradients = exports = transforms = False
    num_blocks = 0  # counted here, in place of the base's property

    tile_bytes = 2**22  # narrower blocks are upcast in phase 1 tile by tile: at most this much of them at a time
    phase_1_bytes = 2**28  # mixtures held at a time, at most: where a block's sites need more, fewer are read at once

    def __init__(self, parameters: DepthParameters, eps: float, layout):
        super().__init__(parameters, eps, layout)
        self._values_NMD: torch.Tensor | None = None  # both are allocated with the first block, for all of a pass
        self._logits_NMS: torch.Tensor | None = None
        self.num_blocks = 0
        self._inputs: dict[int, TwoPhaseInputs] = {}  # by site, from phase 1; void once another block has closed

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        blocks_BTD = [self._values_NMD[block].view(self._shape) for block in range(self.num_blocks)]
        return [join_heads(block_BTD, self.queries_SD.shape[1:]) for block_BTD in blocks_BTD]

    def append(self, block_BTD: torch.Tensor) -> None:
        block_BTD = split_heads(block_BTD, self.queries_SD.shape[1:])
        block_MD = block_BTD.flatten(0, -2)
        if self._values_NMD is None:
            self._shape, num_sites = block_BTD.shape, self.layout.num_sites
            count = self.layout.closed_blocks(num_sites - 1)
            self._values_NMD = block_MD.new_empty(count, *block_MD.shape, dtype=self.dtype)
            self._logits_NMS = self.scaled_eps.new_empty(count, block_MD.shape[0], num_sites)
        self._values_NMD[self.num_blocks] = block_MD  # a sum is rounded once, when it is complete
        logits_BTS = source_logits(block_BTD, self.queries_SD, self.scaled_eps)
        self._logits_NMS[self.num_blocks] = logits_BTS.flatten(0, -2)
        self.num_blocks += 1
        self._inputs = {}

    def drop_blocks(self, count: int) -> None:
        self.num_blocks = count
        self._inputs = {}

    def inputs_for(self, site: int) -> TwoPhaseInputs:
        if site not in self._inputs:
            self._phase_1(site)
        return self._inputs[site]

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs: TwoPhaseInputs) -> tuple[torch.Tensor, None]:
        """Run phase 2. A softmax of two is a sigmoid; for few tokens the number of operations is what it costs."""
        query_D, scaled_eps, log_sum_exp_BT1, mixture_BTD = inputs
        width = query_D.shape
        if running_sum_BTD is None:
            return join_heads(mixture_BTD, width), None
        dtype = query_D.dtype
        if running_sum_BTD.dtype != dtype:
            running_sum_BTD = running_sum_BTD.to(dtype)
        running_sum_BTD = split_heads(running_sum_BTD, width)
        # The running sum's logit, and how far phase 1's logit is above it
        product_BT1 = (running_sum_BTD * query_D).sum(-1, keepdim=True)  # faster than a matmul for one token
        key_scale_BT1 = inverse_size(running_sum_BTD, width, scaled_eps)
        difference_BT1 = torch.addcmul(log_sum_exp_BT1, product_BT1, key_scale_BT1, value=-1)
        # The weight of phase 1's mixture is the sigmoid of that
        mixed_BTD = torch.lerp(running_sum_BTD, mixture_BTD, difference_BT1.sigmoid_())
        return join_heads(mixed_BTD, width), None

    def _phase_1(self, first_site: int) -> None:
        """Read all closed blocks at the sites from `first_site` to the end of its block, as far as results fit."""
        *shape, width = self._shape
        values_NMD = self._values_NMD[: self.num_blocks]
        # How many sites to read, and how many tokens at a time. While compiling, the number of tokens may be a symbol.
        tokens, end = values_NMD.shape[1], self.layout.end_of_block(first_site)
        tile = tokens
        if not torch.compiler.is_compiling():
            token_bytes = width * self.queries_SD.itemsize
            # whole layers, at least one: a layer is given what both its sites read
            end = min(end, first_site + max(2, self.phase_1_bytes // (tokens * token_bytes) // 2 * 2))
            if values_NMD.dtype != self.queries_SD.dtype:
                tile = max(1, self.tile_bytes // (self.num_blocks * token_bytes))

        # Weights over the blocks. log_softmax subtracts the log-sum-exp of the logits, so any block shows it.
        logits_NMP = self._logits_NMS[: self.num_blocks, :, first_site:end]
        if self.layout.window is not None:
            logits_NMP = logits_NMP.masked_fill(self._hidden_N1P(range(first_site, end)), -torch.inf)
        log_weights_NMP = logits_NMP.log_softmax(0)
        log_sum_exps_MP = logits_NMP[0] - log_weights_NMP[0]  # the first is in every window
        weights_MPN = log_weights_NMP.exp_().permute(1, 2, 0)
        # Mixtures: for each token a product [P, N] × [N, D]
        with autocast_off(values_NMD):
            tiles_MPD = [
                torch.bmm(weights, values.to(weights.dtype).transpose(0, 1))
                for weights, values in zip(weights_MPN.split(tile), values_NMD.split(tile, dim=1))
            ]
        mixtures_MPD = tiles_MPD[0] if len(tiles_MPD) == 1 else torch.cat(tiles_MPD)
        parts = zip(
            range(first_site, end),
            self.queries_SD[first_site:end].unbind(),  # P × [D]
            log_sum_exps_MP.view(*shape, -1, 1).unbind(-2),  # P × [B, T, 1]
            mixtures_MPD.view(*shape, -1, width).unbind(-2),  # P × [B, T, D]
        )
        self._inputs = {
            site: TwoPhaseInputs(query_D, self.scaled_eps, log_sum_exp_BT1, mixture_BTD)
            for site, query_D, log_sum_exp_BT1, mixture_BTD in parts
        }

    def _hidden_N1P(self, sites: range) -> torch.Tensor:
        """Say which blocks each site's window leaves out."""
        hidden_N1P = self._logits_NMS.new_ones(self.num_blocks, 1, len(sites), dtype=torch.bool)
        for index, site in enumerate(sites):
            visible = [block for block in self.layout.visible_blocks(site) if block < self.num_blocks]
            hidden_N1P[visible, 0, index] = False
        return hidden_N1P

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        if self._values_NMD is not None:
            self._values_NMD, self._logits_NMS = self._values_NMD.to(device), self._logits_NMS.to(device)
        self._inputs = {}  # phase 1 runs again where it is needed


register_depth_reader("training", TrainingReader)
register_depth_reader("two_phase", TwoPhaseReader)
