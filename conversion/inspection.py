"""What a checkpoint folder is, and how far its depth attention has moved from the mean."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from common.errors import UserError, reading
from common.quiet import quiet_transformers
from common.text import read_text
from model_cards.blocks import describe_blocks, describe_form, draw_blocks
from modeling_attnres import BlockLayout

from .checkpoint import Checkpoint, CheckpointError, is_known_lossless, open_source
from .port import Blocks, check_portable
from .verify import tokenize


@dataclass(frozen=True)
class Inspection:
    """What `inspect` found. Entropies are relative: 0 reads one source, 1 reads all alike."""

    path: str
    family: str
    portable: str  # of a base checkpoint
    config: PreTrainedConfig | None  # None for a base checkpoint
    depth_parameters: int
    moving: str  # the depth parameter that is zero, or 1, at the start
    distances: dict[int, float]  # of it from its start, by site
    entropies: list[float] | None

    def __str__(self) -> str:
        if self.config is None:
            return f"path       {self.path}\nfamily     {self.family}, standard residuals\nportable   {self.portable}"
        lines = [
            f"path       {self.path}",
            f"family     {self.family}",
            f"mode       {self.config.attn_res_mode}",
            f"blocks     {describe_blocks(self.config)}",
            f"           {draw_blocks(self.config)}",
            f"form       {describe_form(self.config)}",
            f"eps        {'scaled by 1 / n²' if self.config.attn_res_scale_norm_eps else 'as it is'}",
            f"parameters {self.depth_parameters:,} of depth attention",
        ]
        if self.distances:
            trained = sum(distance > 0 for distance in self.distances.values())
            lines.append(f"trained    {self.moving} of {trained} of {len(self.distances)} sites is away from its start")
            heading = f"{'entropy':>10}" if self.entropies is not None else ""
            lines.append(f"\n{'site':<22}{self.moving + ' norm':>14}{heading}")
            for site, norm in self.distances.items():
                entropy = f"{self.entropies[site]:>10.3f}" if self.entropies is not None else ""
                lines.append(f"{site_name(site, self.config.attn_res_layout):<22}{norm:>14.4g}{entropy}")
        if self.entropies is not None:
            mean = sum(self.entropies[1:]) / len(self.entropies[1:])
            lines.append(f"\nmean entropy of the depth weights: {mean:.3f} (1: all sources alike, 0: a single one)")
        return "\n".join(lines)


def site_name(site: int, layout: BlockLayout) -> str:
    """Name a site in words."""
    if site == layout.num_sites - 1:
        return "output"
    return f"layer {site // 2} {'attention' if site % 2 == 0 else 'MLP'}"


def _portable(checkpoint: Checkpoint) -> str:
    """Say in words whether a base checkpoint can be ported."""
    try:
        known = is_known_lossless(check_portable(checkpoint, Blocks()))
    except UserError as error:
        return f"no: {error}"
    return "yes" if known else "if its port passes verification: its family is not among those tested to be lossless"


def inspect_checkpoint(source: str, text: Path | None = None, with_entropy: bool = False) -> Inspection:
    """Look at a folder, hub id or GGUF file.

    Args:
        source: the checkpoint.
        text: a text file to run the model on for the entropy of its depth weights.
        with_entropy: run it on the built-in sample where no file is given.

    Raises:
        UserError: it cannot be read, its tensors are not what its config implies, or the entropy is asked of a model
            without depth attention or head.

    Example:
        from conversion.inspection import inspect_checkpoint

        print(inspect_checkpoint("ported", with_entropy=True))
    """
    with open_source(source) as checkpoint:
        family = checkpoint.config["model_type"]
        if not checkpoint.is_attnres:
            return Inspection(source, family, _portable(checkpoint), None, 0, "", {}, None)
        config = checkpoint.read_config()
        parameters, moving, distances = 0, "", {}
        if config.attn_res_mode != "none":
            depth = checkpoint.read_depth(config)
            parameters, moving = sum(parameter.numel() for parameter in depth.parameters()), depth.moving
            distances = depth.distance_from_start()
        checkpoint.check_fit(config)
        entropies = _entropies(checkpoint, config, text) if text is not None or with_entropy else None
        return Inspection(source, family, "", config, parameters, moving, distances, entropies)


def _entropies(checkpoint: Checkpoint, config: PreTrainedConfig, text: Path | None) -> list[float]:
    """Return the mean entropy of every site's depth weights, divided by that of uniform ones."""
    if config.attn_res_mode == "none" or not checkpoint.has_head:
        raise CheckpointError(f"{checkpoint.folder}: no depth weights to look at (mode 'none', or no head).")
    if config.attn_res_weights not in ("softmax", "static"):
        raise CheckpointError(
            f"{checkpoint.folder}: {config.attn_res_weights} weights sum to no 1: they have no entropy."
        )
    ids = tokenize(checkpoint.folder, read_text(text)[0], config.vocab_size)
    with quiet_transformers(), torch.no_grad(), reading(f"{checkpoint.folder}: its model"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto").eval()
        depth = model(ids, output_depth_attentions=True, use_cache=False).depth_attentions
    entropies = []
    for weights in depth:  # [B, T, sources], or [B, T, heads, sources]
        sources = weights.shape[-1]
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean().item()
        entropies.append(entropy / torch.tensor(float(sources)).log().item() if sources > 1 else 1.0)
    return entropies
