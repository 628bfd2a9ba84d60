# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Forms of depth attention beside the paper's, and interventions: for studying the method, read by one plain reader.

A site reads Σ_i α_i s_i of its sources s_i (`depth_attention.py`). What a form changes:

| config field                    | α_i, with k_i = γ ⊙ s_i / rms(s_i)                                                |
|---------------------------------|------------------------------------------------------------------------------------|
| the paper                       | softmax_i(w · k_i)                                                                 |
| `attn_res_heads=H`              | for each of H equal parts of the width a softmax of its own, of w_[h] · k_i,[h]   |
| `attn_res_query="input"`        | w = U V n or U n: n is the newest source, normalised; U starts at zero             |
| `attn_res_weights="sigmoid"`    | σ(w · k_i), divided by nothing: 1/2 at the start                                   |
| `attn_res_weights="static"`     | softmax_i(c_i): one learned number per site and source                             |
| `attn_res_weights="static_raw"` | c_i itself, 1 at the start: the residual sum (DenseFormer)                         |
| `attn_res_key_norm=False`       | k_i = s_i                                                                          |

Heads, windows and the form "add" are read by every reader; the others by `GeneralReader`. Unlike other readers it
computes logits site by site, for queries that are made of the input are known there alone.

Shapes: as in `depth_attention.py`, but a head is an axis here even where there is one: H heads of width E.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import nn

from .depth_attention import (
    DepthForm,
    DepthParameters,
    DepthReader,
    autocast_off,
    inverse_size,
    mix,
    register_depth_reader,
)


class GeneralInputs(NamedTuple):
    """What a general read needs: the form, D · eps, the site's own parameters, the blocks, and an intervention."""

    form: DepthForm
    scaled_eps: torch.Tensor
    parameters: DepthParameters  # of this site, without its axis S
    blocks_BTD: tuple[torch.Tensor, ...]
    block_scales_BT1: tuple[torch.Tensor, ...]  # what makes each block a key
    intervention: torch.Tensor | None


class GeneralReader(DepthReader):
    """The plain reader of all forms: source by source at every site, differentiable, with depth weights.

    Attributes:
        form: of depth attention, set by the model.
        interventions: by site, a mask or the weights themselves (`depth_interventions`).
    """

    gives_weights = reads_all_forms = intervenes = True
    form = DepthForm()

    def __init__(self, parameters: DepthParameters, eps: float, layout):
        super().__init__(parameters, eps, layout)
        self.interventions: dict[int, torch.Tensor] = {}
        self._blocks_BTD: list[torch.Tensor] = []
        self._scales_BT1: list[torch.Tensor] = []

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        return self._blocks_BTD

    def append(self, block_BTD: torch.Tensor) -> None:
        block_BTD = block_BTD.to(self.dtype)
        self._blocks_BTD.append(block_BTD)
        self._scales_BT1.append(inverse_size(block_BTD, block_BTD.shape[-1:], self.scaled_eps))

    def drop_blocks(self, count: int) -> None:
        del self._blocks_BTD[count:], self._scales_BT1[count:]

    def inputs_for(self, site: int) -> GeneralInputs:
        shared = ("null_D", "gates_SD")  # of no site, or the business of the pass
        parameters = DepthParameters(
            **{
                name: tensor if tensor is None or name in shared else tensor[site]
                for name, tensor in self.parameters._asdict().items()
            }
        )
        visible = self.layout.visible_blocks(site)
        blocks_BTD, scales_BT1 = (
            tuple(of_block[block] for block in visible) for of_block in (self._blocks_BTD, self._scales_BT1)
        )
        intervention = self.interventions.get(site)
        if intervention is not None:
            intervention = intervention.to(self.scaled_eps.device)
        return GeneralInputs(self.form, self.scaled_eps, parameters, blocks_BTD, scales_BT1, intervention)

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs: GeneralInputs) -> tuple[torch.Tensor, torch.Tensor]:
        form, scaled_eps, parameters, sources_BTD, scales_BT1, intervention = inputs
        if running_sum_BTD is not None:
            running_scale_BT1 = inverse_size(running_sum_BTD, running_sum_BTD.shape[-1:], scaled_eps)
            sources_BTD, scales_BT1 = (*sources_BTD, running_sum_BTD), (*scales_BT1, running_scale_BT1)
        sources_BTHE = [source_BTD.unflatten(-1, (form.heads, -1)) for source_BTD in sources_BTD]
        with autocast_off(sources_BTD[0]):
            if parameters.static_SN is not None:  # the logits themselves, here without S
                logits_BTHN = parameters.static_SN[: len(sources_BTD)].expand(*sources_BTHE[0].shape[:-1], -1)
            else:
                query_BTHE = general_query(sources_BTD[-1], scales_BT1[-1], parameters).unflatten(-1, (form.heads, -1))
                logits_BTHN = general_logits(query_BTHE, sources_BTHE, scales_BT1 if form.key_norm else None)
            weights_BTHN = general_weights(logits_BTHN, form, intervention)
            mixed_BTHE = mix(weights_BTHN, sources_BTHE)
        return mixed_BTHE.flatten(-2), weights_BTHN if form.heads > 1 else weights_BTHN.squeeze(-2)

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self._blocks_BTD, self._scales_BT1 = (
            [of_block.to(device) for of_block in kept] for kept in (self._blocks_BTD, self._scales_BT1)
        )


def general_query(newest_BTD: torch.Tensor, scale_BT1: torch.Tensor, parameters: DepthParameters) -> torch.Tensor:
    """Return the effective query of one site: learned, `[D]`, or made of the newest source, `[B, T, D]`."""
    if parameters.queries_SD is not None:
        return parameters.queries_SD.flatten()
    query_BTD = newest_BTD * scale_BT1 * newest_BTD.shape[-1] ** 0.5  # of unit mean square
    if parameters.query_down_SRD is not None:
        query_BTD = query_BTD @ parameters.query_down_SRD.t()  # [B, T, R]
    query_BTD = query_BTD @ parameters.query_up_SDR.t()
    return query_BTD if parameters.key_gains_SD is None else query_BTD * parameters.key_gains_SD


def general_logits(
    query_BTHE: torch.Tensor, sources_BTHE: Sequence[torch.Tensor], scales_BT1: Sequence[torch.Tensor] | None
) -> torch.Tensor:
    """Return the logit of each source at one site, `[B, T, H, N]`; without scales keys are not normalised."""
    products_BTH = [(source_BTHE * query_BTHE).sum(-1) for source_BTHE in sources_BTHE]
    if scales_BT1 is not None:
        products_BTH = [product_BTH * scale_BT1 for product_BTH, scale_BT1 in zip(products_BTH, scales_BT1)]
    return torch.stack(products_BTH, dim=-1)


def general_weights(logits_BTHN: torch.Tensor, form: DepthForm, intervention: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of a site's sources: of their logits, or as an intervention says."""
    mask = None
    if intervention is not None:
        if intervention.dim() == 3:  # [B, T, N], for every head
            intervention = intervention.unsqueeze(-2)
        given, needed = intervention.shape, logits_BTHN.shape
        if any(have not in (1, want) for have, want in zip(reversed(given), reversed(needed))):
            raise ValueError(
                f"An intervention of the shape {list(given)} does not fit this pass: expected [B, T, H, sources] = "
                f"{list(needed)}, or 1 in place of B, T or H."
            )
        if intervention.dtype != torch.bool:
            return intervention.to(logits_BTHN.dtype).expand_as(logits_BTHN)
        mask = intervention
    if form.weights in ("softmax", "static"):
        if mask is not None:
            logits_BTHN = logits_BTHN.masked_fill(~mask, -torch.inf)
        return logits_BTHN.softmax(-1)
    weights_BTHN = logits_BTHN.sigmoid() if form.weights == "sigmoid" else logits_BTHN
    return weights_BTHN if mask is None else weights_BTHN * mask


register_depth_reader("general", GeneralReader)


@contextlib.contextmanager
def depth_interventions(model: nn.Module, interventions: dict[int, torch.Tensor]) -> Iterator[None]:
    """Change what sites read, for as long as the context lasts: depth weights alone do not say what a source is for.

    Args:
        model: a decoder with Attention Residuals, or a model that holds one.
        interventions: by site, a tensor whose last axis is the site's sources, in the order of its depth weights:
            bool, `True` where the source may be read (a softmax gives its weight to the others), or floating point, the
            weights to use in place of the model's. `[sources]` is for every token, so `generate` goes with it; else
            `[B, T, sources]`, with several heads `[B, T, H, sources]`. Within another such context these alone hold.
            They are the model's while the context lasts: passes of other threads are changed, too.

    Raises:
        ValueError: there is no such site, it reads another number of sources, all are hidden, or weights are not
            finite.
        TypeError: an intervention is no tensor of such a dtype.

    Example:
        import torch
        from transformers import AutoModelForCausalLM
        from modeling_attnres import depth_interventions

        model, ids = AutoModelForCausalLM.from_pretrained("ported"), torch.arange(3, 20)[None]
        without_embedding = torch.tensor([False, True])  # site 1, the first MLP, reads two sources
        with depth_interventions(model, {1: without_embedding}):
            print(model(ids, labels=ids).loss)
    """
    # Wrappers have the attributes of what they hold, too
    decoder = next((module for module in model.modules() if "attn_res_layout" in vars(module)), None)
    if decoder is None:
        raise ValueError(f"{type(model).__name__} has no depth attention to intervene in.")
    layout = decoder.attn_res_layout
    for site, tensor in interventions.items():
        check_intervention(site, tensor, layout)
    before, decoder.depth_interventions = decoder.depth_interventions, interventions
    try:
        yield
    finally:
        decoder.depth_interventions = before


def check_intervention(site: int, tensor: torch.Tensor, layout) -> None:
    """Raise an error unless an intervention is one that the site can have."""
    if site not in range(layout.num_sites):
        raise ValueError(f"Site {site!r} does not exist; there are {layout.num_sites}, from 0.")
    if not isinstance(tensor, torch.Tensor) or not (tensor.dtype == torch.bool or tensor.is_floating_point()):
        kind = tensor.dtype if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise TypeError(f"Site {site}: expected a mask (a bool tensor) or weights (floating point), got {kind}.")
    sources = layout.num_sources(site)
    if tensor.dim() not in (1, 3, 4) or tensor.shape[-1] != sources:
        raise ValueError(
            f"Site {site} reads {sources} sources: expected a shape [{sources}], [B, T, {sources}] or, with several "
            f"heads, [B, T, H, {sources}], got {list(tensor.shape)}."
        )
    if tensor.dtype == torch.bool and not tensor.any(-1).all():
        raise ValueError(f"Site {site}: at least one source must stay.")
    if not tensor.isfinite().all():
        raise ValueError(f"Site {site}: the weights must be finite.")
