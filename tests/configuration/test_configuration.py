"""The ready configs: they load, describe the models they name, and have the parameters they should."""

import json
import re
from itertools import pairwise

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

import modeling_attnres  # noqa: F401, registers the families
from tests.conftest import ROOT


FOLDERS = sorted(path.parent for path in (ROOT / "configuration").glob("*/config.json"))

# name: (blocks, parameters in all, active parameters without embeddings), as published
PUBLISHED = {
    "scaling-law-194M": (8, None, 194e6),
    "scaling-law-241M": (8, None, 241e6),
    "scaling-law-296M": (8, None, 296e6),
    "scaling-law-436M": (8, None, 436e6),
    "scaling-law-528M": (8, None, 528e6),
    "Kimi-Linear-48B-A3B": (9, 48e9, None),
    "Moonlight-16B-A3B": (9, 15.96e9, 2.24e9),
    "Qwen3-30B-A3B": (8, 30.5e9, None),
    "SmolLM2-135M": (8, 134.5e6, None),
}
PAPER_TABLE = {  # layers, heads, d_model, d_ff of an expert
    "scaling-law-194M": (12, 12, 896, 400),
    "scaling-law-241M": (13, 13, 960, 432),
    "scaling-law-296M": (14, 14, 1024, 464),
    "scaling-law-436M": (16, 16, 1168, 528),
    "scaling-law-528M": (17, 17, 1264, 560),
}


def count(model) -> tuple[int, int, int]:
    """Parameters in all, active for a token, and active without embeddings."""
    total = active = without_embeddings = 0
    for name, parameter in model.named_parameters():
        share = model.config.num_experts_per_tok / parameter.shape[0] if ".experts." in name else 1
        total += parameter.numel()
        active += parameter.numel() * share
        if not re.search(r"embed_tokens|lm_head", name):
            without_embeddings += parameter.numel() * share
    return total, round(active), round(without_embeddings)


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda folder: folder.name)
def test_parameters(folder):
    config = AutoConfig.from_pretrained(folder)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert type(model).__name__ == config.architectures[0]
    blocks, total, active = PUBLISHED[folder.name]
    found_total, found_active, found_without_embeddings = count(model)
    assert len(config.attn_res_layout.starts) == blocks
    if total is not None:
        assert abs(found_total / total - 1) <= 0.03
    if active is not None:
        assert abs(found_without_embeddings / active - 1) <= 0.05
    row = next(line for line in (folder.parent / "README.md").read_text().splitlines() if f"| {folder.name} |" in line)
    figures = [cell.strip() for cell in row.split("|")[5:8]]
    for figure, value in zip(figures, (found_total, found_active, found_without_embeddings), strict=True):
        number, unit = figure.split()
        digits = len(number.partition(".")[2])
        assert round(value / {"B": 1e9, "M": 1e6}[unit], digits) == pytest.approx(float(number))


def test_every_config_is_known():
    assert {folder.name for folder in FOLDERS} == PUBLISHED.keys()


@pytest.mark.parametrize("name", PAPER_TABLE)
def test_the_papers_table(name):
    config = AutoConfig.from_pretrained(ROOT / "configuration" / name)
    assert PAPER_TABLE[name] == (
        config.num_hidden_layers,
        config.num_attention_heads,
        config.hidden_size,
        config.moe_intermediate_size,
    )
    assert (config.num_experts_per_tok, config.n_shared_experts) == (8, 1)
    sizes = [b - a for a, b in pairwise((*config.attn_res_layout.starts, config.num_hidden_layers))]
    assert max(sizes) - min(sizes) <= 1


def test_the_main_run():
    """9 blocks of 6 sublayers; with the embedding 10 sources at the output."""
    config = AutoConfig.from_pretrained(ROOT / "configuration" / "Kimi-Linear-48B-A3B")
    assert config.num_hidden_layers == 27
    assert 2 * config.attn_res_block_size == 6
    assert config.attn_res_layout.num_sources(54) == 10
    assert (config.num_local_experts, config.num_experts_per_tok, config.n_shared_experts) == (256, 8, 1)


ABLATIONS = {  # what each changes of scaling-law-436M, and the paper's validation loss, where it gives one
    "baseline": ({"attn_res_mode": "none"}, "1.766"),
    "denseformer": ({"attn_res_mode": "full", "attn_res_weights": "static_raw"}, "1.767"),
    "full": ({"attn_res_mode": "full"}, "1.737"),
    "full-input-query": ({"attn_res_mode": "full", "attn_res_query": "input"}, "1.731"),
    "full-static": ({"attn_res_mode": "full", "attn_res_weights": "static"}, "1.749"),
    "full-sigmoid": ({"attn_res_mode": "full", "attn_res_weights": "sigmoid"}, "1.741"),
    "full-no-key-norm": ({"attn_res_mode": "full", "attn_res_key_norm": False}, "1.743"),
    "full-window-8": ({"attn_res_mode": "full", "attn_res_window": 8}, "1.764"),
    "block-S4": ({"attn_res_block_size": 2}, "1.746"),
    "block-S4-16-heads": ({"attn_res_block_size": 2, "attn_res_heads": 16}, "1.752"),
    "block-S4-no-key-norm": ({"attn_res_block_size": 2, "attn_res_key_norm": False}, "1.750"),
    "block-S2": ({"attn_res_block_size": 1}, "near 1.746"),
    "block-S8": ({"attn_res_block_size": 4}, "near 1.746"),
    "block-S16": ({"attn_res_block_size": 8}, "towards the baseline"),
    "block-S32": ({"attn_res_block_size": 16}, "towards the baseline"),
}


@pytest.mark.parametrize("name", ABLATIONS)
def test_the_papers_ablations(name):
    """Each is the 436M model with nothing else changed, builds, and stands with its figure in the README."""
    folder = ROOT / "configuration" / "ablations"
    base = json.loads((ROOT / "configuration" / "scaling-law-436M" / "config.json").read_text())
    changed, loss = ABLATIONS[name]
    found = json.loads((folder / name / "config.json").read_text())
    if changed.get("attn_res_mode") == "full":
        changed = changed | {"attn_res_block_size": None}
    assert found == base | changed
    config = AutoConfig.from_pretrained(folder / name)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    assert hasattr(model.model, "attn_res") == (name != "baseline")
    (row,) = [
        line for line in (ROOT / "configuration" / "README.md").read_text().splitlines() if f"| `{name}` |" in line
    ]
    assert row.endswith(f"| {loss} |")


def test_every_ablation_is_known():
    assert {path.parent.name for path in (ROOT / "configuration" / "ablations").glob("*/config.json")} == set(ABLATIONS)
