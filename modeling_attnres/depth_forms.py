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

Heads, windows and the form "add" are read by every reader; the others by `GeneralReader`. It goes over all sources at
each site and keeps what autograd wants: memory and time grow with sites × sources.

Shapes: as in `depth_attention.py`; here N sources are the first axis, and D may be two axes H × E.
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
    join_heads,
    register_depth_reader,
    split_heads,
    statistics_dtype,
)


class GeneralInputs(NamedTuple):
    """What a general read needs: the form, the site's own parameters, the blocks, and an intervention."""

    form: DepthForm
    eps: float
    parameters: DepthParameters  # of this site, without its axis S
    blocks_BTD: tuple[torch.Tensor, ...]
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

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        return self._blocks_BTD

    def append(self, block_BTD: torch.Tensor) -> None:
        self._blocks_BTD.append(block_BTD.to(self.dtype))

    def drop_blocks(self, count: int) -> None:
        del self._blocks_BTD[count:]

    def inputs_for(self, site: int) -> GeneralInputs:
        shared = ("null_D", "gates_SD")  # of no site, or the business of the pass
        parameters = DepthParameters(
            **{
                name: tensor if tensor is None or name in shared else tensor[site]
                for name, tensor in self.parameters._asdict().items()
            }
        )
        blocks_BTD = tuple(self._blocks_BTD[block] for block in self.layout.visible_blocks(site))
        intervention = self.interventions.get(site)
        if intervention is not None:
            intervention = intervention.to(self.scaled_eps.device)
        return GeneralInputs(self.form, self.eps, parameters, blocks_BTD, intervention)

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs: GeneralInputs) -> tuple[torch.Tensor, torch.Tensor]:
        form, eps, parameters, blocks_BTD, intervention = inputs
        sources_BTD = blocks_BTD if running_sum_BTD is None else (*blocks_BTD, running_sum_BTD)
        dtype = statistics_dtype(blocks_BTD[0].dtype)
        values_NBTD = torch.stack([source_BTD.to(dtype) for source_BTD in sources_BTD])
        width = torch.Size((values_NBTD.shape[-1],))
        if form.heads > 1:
            width = torch.Size((form.heads, width[0] // form.heads))
        with autocast_off(values_NBTD):
            logits_NBT = general_logits(values_NBTD, form, eps, parameters, width)
            weights_NBT = general_weights(logits_NBT, form, intervention)
            mixed_BTD = (split_heads(values_NBTD, width) * weights_NBT.unsqueeze(-1)).sum(0)
        return join_heads(mixed_BTD, width), weights_NBT.movedim(0, -1)

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self._blocks_BTD = [block_BTD.to(device) for block_BTD in self._blocks_BTD]


def general_logits(
    values_NBTD: torch.Tensor, form: DepthForm, eps: float, parameters: DepthParameters, width: torch.Size
) -> torch.Tensor:
    """Return the logit of each source at one site, `[N, B, T]`, per head `[N, B, T, H]`; raw weights are their own."""
    if parameters.static_SN is not None:
        logits_N = parameters.static_SN[: len(values_NBTD)]
        return logits_N[:, None, None].expand(values_NBTD.shape[:3])
    # keys: s / |s| · √D, whose √D and γ are in the query
    keys_NBTD = normalise(values_NBTD, eps) if form.key_norm else values_NBTD
    if form.query == "learned":
        query_BTD = parameters.queries_SD
    else:
        newest_BTD = normalise(values_NBTD[-1], eps) * values_NBTD.shape[-1] ** 0.5  # of unit mean square
        if parameters.query_down_SRD is not None:
            newest_BTD = newest_BTD @ parameters.query_down_SRD.t()  # [B, T, R]
        query_BTD = newest_BTD @ parameters.query_up_SDR.t()
        if parameters.key_gains_SD is not None:
            query_BTD = query_BTD * parameters.key_gains_SD
        query_BTD = split_heads(query_BTD, width)
    return (split_heads(keys_NBTD, width) * query_BTD).sum(-1)


def general_weights(logits_NBT: torch.Tensor, form: DepthForm, intervention: torch.Tensor | None) -> torch.Tensor:
    """Return the weights of a site's sources: of their logits, or as an intervention says."""
    mask = None
    if intervention is not None:
        intervention = intervention.movedim(-1, 0)  # sources first, as here
        missing = logits_NBT.dim() - intervention.dim()
        intervention = intervention.reshape(*intervention.shape, *[1] * missing)  # [N] is for every token and head
        if intervention.dtype != torch.bool:
            return intervention.to(logits_NBT.dtype).expand_as(logits_NBT)
        mask = intervention
    if form.weights in ("softmax", "static"):
        if mask is not None:
            logits_NBT = logits_NBT.masked_fill(~mask, -torch.inf)
        return logits_NBT.softmax(0)
    weights_NBT = logits_NBT.sigmoid() if form.weights == "sigmoid" else logits_NBT
    return weights_NBT if mask is None else weights_NBT * mask


def normalise(x_BTD: torch.Tensor, eps: float) -> torch.Tensor:
    """Return x / √(|x|² + D · eps): of unit size, where the effective query carries the √D."""
    return x_BTD * torch.rsqrt(x_BTD.square().sum(-1, keepdim=True) + x_BTD.shape[-1] * eps)


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
    decoder = next((module for module in model.modules() if hasattr(module, "attn_res_layout")), None)
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
