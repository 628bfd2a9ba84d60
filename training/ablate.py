"""What sources are for: how much a text's loss rises when one is hidden. A depth weight alone does not say.

Shapes: S sites, N sources of a site, or blocks.
"""

import math
from dataclasses import dataclass

import torch
from rich.table import Table
from tqdm import tqdm
from transformers import PreTrainedModel

from conversion.inspection import site_name
from modeling_attnres import BlockLayout, depth_interventions


@dataclass
class Ablation:
    """Rises of the loss, in nats per token; `None` where hiding leaves nothing to read."""

    loss: float  # with nothing hidden
    by_site: list[list[float | None]]  # S × N: a source hidden from one site
    from_all: list[float | None]  # a closed block hidden from all sites that read it


def ablate_sources(model: PreTrainedModel, ids: torch.Tensor) -> Ablation:
    """Hide each source from each site, and each closed block from all sites, one at a time.

    Args:
        model: a causal language model with Attention Residuals.
        ids: token ids `[1, T]` of the text.

    Example:
        ```python
        from transformers import AutoModelForCausalLM, AutoTokenizer

        from training.ablate import ablate_sources

        model, tokenizer = AutoModelForCausalLM.from_pretrained("merged"), AutoTokenizer.from_pretrained("merged")
        ids = tokenizer("The capital of France is Paris.", return_tensors="pt").input_ids
        print(ablate_sources(model, ids).from_all)
        ```
    """
    layout: BlockLayout = model.model.attn_res_layout
    sites = range(layout.num_sites)
    hidden = [{site: source} for site in sites for source in range(layout.num_sources(site))]
    blocks = range(layout.closed_blocks(layout.num_sites - 1))
    hidden += [hide_block(layout, block) for block in blocks]
    loss = loss_without(model, ids, {})
    rises = [
        None if rise is None else rise - loss
        for rise in (loss_without(model, ids, one) for one in tqdm(hidden, desc="hiding sources", unit="pass"))
    ]
    by_site, rest = [], iter(rises)
    for site in sites:
        by_site.append([next(rest) for _ in range(layout.num_sources(site))])
    return Ablation(loss, by_site, list(rest))


def hide_block(layout: BlockLayout, block: int) -> dict[int, int]:
    """Return, for each site that reads a closed block and something else, the block's place among its sources."""
    hidden = {}
    for site in range(layout.num_sites):
        visible = layout.visible_blocks(site)
        if block in visible and layout.num_sources(site) > 1:
            hidden[site] = visible.index(block)
    return hidden


@torch.no_grad()
def loss_without(model: PreTrainedModel, ids: torch.Tensor, hidden: dict[int, int]) -> float | None:
    """Return a text's loss with one source hidden from some sites, or `None` where a site has no other."""
    layout, masks = model.model.attn_res_layout, {}
    for site, source in hidden.items():
        masks[site] = torch.ones(layout.num_sources(site), dtype=torch.bool)
        masks[site][source] = False
        if not masks[site].any():
            return None
    with depth_interventions(model, masks):
        return model(ids, labels=ids, use_cache=False).loss.item()


def ablation_table(ablation: Ablation, weights: list[list[float]], layout: BlockLayout, rows: int = 12) -> Table:
    """Make a table of what matters most when it is hidden, beside the weight it has."""
    table = Table("site", "without", "depth weight", "rise of the loss", title=f"loss {ablation.loss:.4f}")
    found = [
        (rise, site, source)
        for site, of_site in enumerate(ablation.by_site)
        for source, rise in enumerate(of_site)
        if rise is not None and math.isfinite(rise)
    ]
    for rise, site, source in sorted(found, reverse=True)[:rows]:
        without = source_name(layout.sources_of(site)[source])
        table.add_row(site_name(site, layout), without, f"{weights[site][source]:.3f}", f"{rise:+.4f}")
    blocks = layout.sources_of(layout.num_sites - 1)  # where no window hides any
    for block, rise in zip(blocks if layout.window is None else [], ablation.from_all):
        if rise is not None:
            table.add_row("all", source_name(block), "", f"{rise:+.4f}")
    return table


def source_name(sums: range) -> str:
    """Name a source by what it sums, as in `BlockLayout.sources_of`."""
    if len(sums) == 0:
        return "the null source"
    if sums[0] == 0:
        return "the embedding"
    first, last = ((u - 1) // 2 for u in (sums[0], sums[-1]))
    if len(sums) == 1:
        return f"layer {first}'s {'attention' if sums[0] % 2 == 1 else 'MLP'}"
    return f"layers {first}-{last}" if last > first else f"layer {first}"
