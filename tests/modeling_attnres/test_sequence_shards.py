"""Sequence-sharded prefill computes what one process does, and each rank holds its part of the block sums.

In float64, in which the order of sums over ranks hardly matters: what differs by more is a fault.
"""

import pytest
import torch
from transformers import PreTrainedModel

from modeling_attnres import depth_interventions, sequence_sharded_plan
from tests.families import BY_NAME
from tests.oracle import relative_error
from tests.processes import launch

from .sharded import block_bytes, load, observe, prompts


TAKES_RULES = hasattr(PreTrainedModel, "_resolve_parallel_plans")
takes_rules = pytest.mark.skipif(not TAKES_RULES, reason="this release takes no rules beside a model's own")
UNEVEN = {"attn_res_block_boundaries": [0, 1, 4]}
CASES = {
    "uneven blocks": ("Llama", UNEVEN),
    "Full": ("Llama", {"attn_res_mode": "full"}),
    "heads": ("Llama", {"attn_res_block_size": 2, "attn_res_heads": 4}),
    "window": ("Llama", {"attn_res_mode": "full", "attn_res_window": 3}),
    "experts": ("Qwen3Moe", {"attn_res_block_size": 2}),
    "experts, Full": ("Mixtral", {"attn_res_mode": "full"}),
    "bias of the output": ("Llama", {"attention_bias": True, "mlp_bias": True}),
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, (family, fields) in CASES.items():
        model = BY_NAME[family].causal_lm(num_key_value_heads=4, vocab_size=100, **fields)
        for parameter_name, parameter in model.named_parameters():
            if parameter_name.endswith("bias"):
                torch.nn.init.normal_(parameter)
        made[name] = tmp_path_factory.mktemp("model") / "saved"
        model.save_pretrained(made[name])
    return made


@takes_rules
@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, pytest.param(4, marks=pytest.mark.exhaustive)])
def test_ranks_compute_what_one_process_does(ranks, folders, tmp_path):
    launch("tests/modeling_attnres/sharded.py", tmp_path / "result.pt", *folders.values(), ranks=ranks)
    for (name, folder), found in zip(folders.items(), torch.load(tmp_path / "result.pt"), strict=True):
        model = load(folder)
        expected = observe(model)
        for what, value in expected.items():
            if what.startswith("text"):
                assert torch.equal(found[what], value), (name, what)
                continue
            for one, other in zip(found[what], value, strict=True):  # rows, or sites
                assert relative_error(one, other) <= 1e-12, (name, what)
        assert relative_error(found["with gradients"], expected["does not"]) <= 1e-12, name
        if "without head" in found:
            with torch.no_grad():
                state = model.model(**prompts(23), use_cache=False).last_hidden_state
            assert relative_error(found["without head"], state) <= 1e-12
        assert found["bytes"] == block_bytes(model, 24) // ranks, name


@pytest.mark.skipif(TAKES_RULES, reason="this release takes rules beside a model's own")
def test_an_old_release_is_refused():
    with pytest.raises(ImportError, match="transformers"):
        sequence_sharded_plan(BY_NAME["Llama"].config())


@takes_rules
def test_what_cannot_be_sharded_is_refused():
    family = BY_NAME["Llama"]
    with pytest.raises(ValueError, match="attn_res_mode"):
        sequence_sharded_plan(family.config(attn_res_mode="none"))
    with pytest.raises(ValueError, match="attn_res_form"):
        sequence_sharded_plan(family.config(attn_res_form="add"))
    with pytest.raises(ValueError, match="LlamaConfig is a base family's config"):
        sequence_sharded_plan(family.base_causal_lm().config)
    config = family.config()
    config.base_model_tp_plan = None
    with pytest.raises(ValueError, match="tensor-parallel plan"):
        sequence_sharded_plan(config)
    additive = family.causal_lm(attn_res_form="add")
    additive.model.attn_res.sequence_mesh = object()
    with pytest.raises(ValueError, match='"add" does not go'), torch.no_grad():
        additive(torch.ones(1, 4, dtype=torch.long))
    model = family.causal_lm()
    model.model.attn_res.sequence_mesh = object()
    mask = torch.tensor([True, False])
    with depth_interventions(model, {1: mask}), pytest.raises(ValueError, match="sharded"), torch.no_grad():
        model(torch.ones(1, 4, dtype=torch.long))
