"""What a checkpoint folder is, and how far its depth attention has moved from the mean."""

from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, PreTrainedConfig

from common.errors import UserError, reading
from common.quiet import quiet_transformers
from common.text import read_text
from model_cards.blocks import describe_blocks, draw_blocks
from modeling_attnres import BlockLayout

from .checkpoint import Checkpoint, CheckpointError, is_known_lossless, open_source
from .export import query_norms
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
    query_norms: dict[int, float]  # by site
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
            f"eps        {'scaled by 1 / n²' if self.config.attn_res_scale_norm_eps else 'as it is'}",
            f"parameters {self.depth_parameters:,} of depth attention",
        ]
        if self.query_norms:
            trained = [norm for norm in self.query_norms.values() if norm > 0]
            lines.append(f"queries    {len(trained)} of {len(self.query_norms)} away from zero")
            heading = f"{'entropy':>10}" if self.entropies is not None else ""
            lines.append(f"\n{'site':<22}{'query norm':>12}{heading}")
            for site, norm in self.query_norms.items():
                entropy = f"{self.entropies[site]:>10.3f}" if self.entropies is not None else ""
                lines.append(f"{_site_name(site, self.config.attn_res_layout):<22}{norm:>12.4g}{entropy}")
        if self.entropies is not None:
            mean = sum(self.entropies[1:]) / len(self.entropies[1:])
            lines.append(f"\nmean entropy of the depth weights: {mean:.3f} (1: all sources alike, 0: a single one)")
        return "\n".join(lines)


def _site_name(site: int, layout: BlockLayout) -> str:
    if site == layout.num_sites - 1:
        return "output"
    return f"layer {site // 2} {'attention' if site % 2 == 0 else 'MLP'}"


def _portable(checkpoint: Checkpoint) -> str:
    """Say in words whether a base checkpoint can be ported."""
    try:
        known = is_known_lossless(check_portable(checkpoint, Blocks()).base_model_type())
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
            return Inspection(source, family, _portable(checkpoint), None, 0, {}, None)
        config = checkpoint.read_config()
        norms = {} if config.attn_res_mode == "none" else query_norms(checkpoint, config)
        checkpoint.check_fit(config)
        parameters = 2 * config.attn_res_layout.num_sites * config.hidden_size if norms else 0
        entropies = _entropies(checkpoint, config, text) if text is not None or with_entropy else None
        return Inspection(source, family, "", config, parameters, norms, entropies)


def _entropies(checkpoint: Checkpoint, config: PreTrainedConfig, text: Path | None) -> list[float]:
    """Return the mean entropy of every site's depth weights, divided by that of uniform ones."""
    if config.attn_res_mode == "none" or not checkpoint.has_head:
        raise CheckpointError(f"{checkpoint.folder}: no depth weights to look at (mode 'none', or no head).")
    ids = tokenize(checkpoint.folder, read_text(text)[0], config.vocab_size)
    with quiet_transformers(), torch.no_grad(), reading(f"{checkpoint.folder}: its model"):
        model = AutoModelForCausalLM.from_pretrained(checkpoint.folder, dtype="auto").eval()
        depth = model(ids, output_depth_attentions=True, use_cache=False).depth_attentions
    entropies = []
    for weights in depth:  # [B, T, sources]
        sources = weights.shape[-1]
        entropy = -torch.special.xlogy(weights, weights).sum(-1).mean().item()
        entropies.append(entropy / torch.tensor(float(sources)).log().item() if sources > 1 else 1.0)
    return entropies
