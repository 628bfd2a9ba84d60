# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""The readers that `attn_res_implementation="auto"` prefers to the plain one: for training, and for inference.

Both compute what `EagerReader` computes; tests hold them to it, forward and gradient.

Shapes: B batch, T tokens, M = B · T, D hidden size, S sites (s: those read at once), N closed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from .depth_attention import (
    DepthReader,
    EagerInputs,
    EagerReader,
    autocast_off,
    inverse_size,
    mix,
    register_depth_reader,
    source_logits,
)


class TrainingRead(torch.autograd.Function):
    """A read with its gradient written by hand.

    It saves references to the sources, which live anyway, and per-token scalars; both passes go over each source once
    or twice. Autograd's own gradient of the same operations keeps more and passes over it more often.

    The gradient, with g = ∂loss/∂h, for h = Σ_i α_i s_i, α = softmax(z), z_i = q · s_i · k_i, k_i = 1 / √(|s_i|² + ε):
        ∂z_i = α_i · (g · s_i - Σ_j α_j g · s_j)          the softmax
        ∂s_i = α_i g                                      as a value
        ∂r   = α_r g + ∂z_r k_r q - ∂z_r z_r k_r² r       the running sum r is a key, too; blocks' logits are given
        ∂q   = Σ_tokens ∂z_r k_r r
    """

    @staticmethod
    def forward(ctx, running_sum_BTD, query_D, scaled_eps, logits_BTN, *sources_BTD):
        key_scale_BT1 = running_logit_BT1 = None
        if running_sum_BTD is not None:
            with autocast_off(running_sum_BTD):
                product_BT1 = torch.matmul(running_sum_BTD.to(query_D.dtype), query_D).unsqueeze(-1)
            key_scale_BT1 = inverse_size(running_sum_BTD, scaled_eps)  # k_r
            running_logit_BT1 = product_BT1 * key_scale_BT1  # z_r
            logits_BTN = torch.cat((logits_BTN, running_logit_BT1), dim=-1)
            sources_BTD = (*sources_BTD, running_sum_BTD)
        weights_BTN = logits_BTN.softmax(dim=-1)
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

        # ∂z = α (g · s - Σ_j α_j g · s_j)
        along_BTN = torch.cat([(grad_BTD * source_BTD).sum(-1, keepdim=True) for source_BTD in sources_BTD], dim=-1)
        grad_logits_BTN = weights_BTN * (along_BTN - (weights_BTN * along_BTN).sum(-1, keepdim=True))
        # ∂s_i = α_i g
        grads_BTD = [
            grad_BTD * weights_BTN[..., index : index + 1] if needed else None
            for index, needed in enumerate(needs_sources)
        ]
        grad_running_sum_BTD = grad_query_D = None
        if ctx.has_running_sum:
            grad_running_sum_BTD, running_sum_BTD = grads_BTD.pop(), sources_BTD.pop()
            grad_product_BT1 = grad_logits_BTN[..., -1:] * key_scale_BT1  # ∂z_r k_r
            grad_logits_BTN = grad_logits_BTN[..., :-1]
            if needs_query:  # ∂q = Σ_tokens ∂z_r k_r r
                with autocast_off(grad_BTD):
                    flat_MD = running_sum_BTD.to(grad_product_BT1.dtype).flatten(0, -2)
                    grad_query_D = torch.mv(flat_MD.t(), grad_product_BT1.flatten())
            if grad_running_sum_BTD is not None:  # ∂r = α_r g + ∂z_r k_r q - ∂z_r z_r k_r² r
                grad_running_sum_BTD.addcmul_(grad_product_BT1, query_D)
                grad_running_sum_BTD.addcmul_(grad_product_BT1 * logit_BT1 * key_scale_BT1, running_sum_BTD, value=-1)
                grad_running_sum_BTD = grad_running_sum_BTD.to(running_sum_BTD.dtype)
        grads_BTD = [None if grad is None else grad.to(source.dtype) for grad, source in zip(grads_BTD, sources_BTD)]
        return grad_running_sum_BTD, grad_query_D, None, grad_logits_BTN if needs_logits else None, *grads_BTD


class TrainingReader(EagerReader):
    """The eager reader with the hand-written gradient (first order) and without depth weights."""

    gives_weights = False
    exports = transforms = False

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs: EagerInputs) -> tuple[torch.Tensor, None]:
        query_D, scaled_eps, logits_BTN, blocks_BTD = inputs
        return TrainingRead.apply(running_sum_BTD, query_D, scaled_eps, logits_BTN, *blocks_BTD), None


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

    Blocks are held once, in a buffer of this pass, with their logits at every site, which are made when a block closes.
    """

    gives_gradients = False
    exports = False
    num_blocks = 0

    tile_bytes = 2**22  # of blocks at a time in phase 1, in the statistics dtype, where they are held in a narrower one
    phase_1_bytes = 2**28  # of mixtures held at a time, at most; beyond it, fewer sites than a block's at once

    def __init__(self, queries_SD: torch.Tensor, eps: float, layout):
        super().__init__(queries_SD, eps, layout)
        self._values_NMD = self._logits_NMS = None
        self.num_blocks = 0
        self._inputs: dict[int, TwoPhaseInputs] = {}  # by site, of the blocks closed so far

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        return [self._values_NMD[block].view(self._shape) for block in range(self.num_blocks)]

    def append(self, block_BTD: torch.Tensor) -> None:
        block_MD = block_BTD.flatten(0, -2)
        if self._values_NMD is None:
            self._shape, num_sites = block_BTD.shape, self.layout.num_sites
            count = self.layout.closed_blocks(num_sites - 1)
            self._values_NMD = block_MD.new_empty(count, *block_MD.shape)
            self._logits_NMS = self.scaled_eps.new_empty(count, block_MD.shape[0], num_sites)
        self._values_NMD[self.num_blocks] = block_MD  # a sum is rounded once, when it is complete
        self._logits_NMS[self.num_blocks] = source_logits(block_MD, self.queries_SD, self.scaled_eps)
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
        """Phase 2. The softmax of two is a sigmoid; for few tokens the cost is the number of operations."""
        query_D, scaled_eps, log_sum_exp_BT1, mixture_BTD = inputs
        if running_sum_BTD is None:
            return mixture_BTD, None
        dtype = query_D.dtype
        if running_sum_BTD.dtype != dtype:
            running_sum_BTD = running_sum_BTD.to(dtype)
        product_BT1 = (running_sum_BTD * query_D).sum(-1, keepdim=True)  # sooner done than a matmul, for one token
        inverse_BT1 = inverse_size(running_sum_BTD, scaled_eps)
        difference_BT1 = torch.addcmul(log_sum_exp_BT1, product_BT1, inverse_BT1, value=-1)
        return torch.lerp(running_sum_BTD, mixture_BTD, difference_BT1.sigmoid_()), None

    def _phase_1(self, first_site: int) -> None:
        """Read all closed blocks at the sites from `first_site` to the end of its block, as far as results fit."""
        *shape, width = self._shape
        values_NMD = self._values_NMD[: self.num_blocks]
        tokens, end = values_NMD.shape[1], self.layout.end_of_block(first_site)
        tile = tokens
        if not torch.compiler.is_compiling():  # there, the number of tokens may be a symbol
            size = width * self.queries_SD.itemsize
            # whole layers, one at least: a layer is given what both its sites read
            end = min(end, first_site + max(2, self.phase_1_bytes // (tokens * size) // 2 * 2))
            if values_NMD.dtype != self.queries_SD.dtype:
                tile = max(1, self.tile_bytes // (self.num_blocks * size))

        logits_NMs = self._logits_NMS[: self.num_blocks, :, first_site:end]
        log_weights_NMs = logits_NMs.log_softmax(0)
        log_sum_exps_Ms = logits_NMs[0] - log_weights_NMs[0]
        weights_MsN = log_weights_NMs.exp_().permute(1, 2, 0)
        with autocast_off(values_NMD):
            mixtures_MsD = [
                torch.bmm(weights, values.to(weights.dtype).transpose(0, 1))
                for weights, values in zip(weights_MsN.split(tile), values_NMD.split(tile, dim=1))
            ]
        mixtures_MsD = mixtures_MsD[0] if len(mixtures_MsD) == 1 else torch.cat(mixtures_MsD)
        of_sites = zip(
            range(first_site, end),
            self.queries_SD[first_site:end].unbind(),
            log_sum_exps_Ms.view(*shape, -1, 1).unbind(-2),
            mixtures_MsD.view(*shape, -1, width).unbind(-2),
        )
        self._inputs = {site: TwoPhaseInputs(query, self.scaled_eps, *read) for site, query, *read in of_sites}

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        if self._values_NMD is not None:
            self._values_NMD, self._logits_NMS = self._values_NMD.to(device), self._logits_NMS.to(device)
        self._inputs = {}  # phase 1 is made again where it is needed


register_depth_reader("training", TrainingReader)
register_depth_reader("two_phase", TwoPhaseReader)
