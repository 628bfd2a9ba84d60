"""`conversion upcycle`: a dense Llama as a mixture of experts that computes the same."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from common.errors import UserError
from conversion.port import Blocks, Form
from conversion.upcycle import upcycle_checkpoint
from tests.conversion.checkpoints import all_tensors, edit_config
from tests.families import BY_NAME, tokens
from tests.oracle import relative_error


LLAMA = BY_NAME["Llama"]


@pytest.fixture
def llama(tmp_path):
    model = LLAMA.base_causal_lm()
    model.save_pretrained(tmp_path / "llama", max_shard_size="30KB")
    return model


@pytest.mark.parametrize("top_k", [1, 2, 4])
@pytest.mark.parametrize("blocks", [Blocks(), Blocks("full")], ids=["block", "full"])
def test_preserves_the_function_for_any_router(llama, tmp_path, top_k, blocks):
    report = upcycle_checkpoint(str(tmp_path / "llama"), tmp_path / "moe", experts=4, top_k=top_k, blocks=blocks)
    assert report.logit_change <= 3e-6
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert type(model).__name__ == "AttnResMixtralForCausalLM"
    assert not any(info.values())
    assert model.config.num_experts_per_tok == top_k
    expected = llama(tokens()).logits
    assert relative_error(model.eval()(tokens()).logits, expected) <= 3e-6
    for layer in model.model.layers:
        torch.nn.init.normal_(layer.mlp.gate.weight, std=3.0)
    assert relative_error(model(tokens()).logits, expected) <= 3e-6


@pytest.mark.parametrize(
    "form", [Form("add", heads=2), Form(heads=2), Form(query="input", query_rank=3)], ids=["add", "heads", "input"]
)
def test_takes_every_form(llama, tmp_path, form):
    """As a port does; what the form adds lies in the checkpoint, and is trained."""
    report = upcycle_checkpoint(str(tmp_path / "llama"), tmp_path / "moe", experts=4, top_k=2, form=form)
    assert report.logit_change <= 3e-6
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "moe", output_loading_info=True)
    assert not any(info.values())
    assert {name: getattr(model.config, f"attn_res_{name}") for name in ("form", "heads", "query", "query_rank")} == {
        **{"form": form.form, "heads": form.heads},
        **{"query": form.query, "query_rank": form.query_rank},
    }
    assert relative_error(model.eval()(tokens()).logits, llama(tokens()).logits) <= 3e-6


def test_layout_and_routers(llama, tmp_path):
    """The published layout of Mixtral; routers drawn as Mixtral draws them, the same for the same seed."""
    for name, seed in {"one": 0, "same": 0, "other": 1}.items():
        upcycle_checkpoint(str(tmp_path / "llama"), tmp_path / name, experts=3, top_k=2, seed=seed)
    tensors = all_tensors(tmp_path / "one")
    for part, published in {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}.items():
        dense = llama.state_dict()[f"model.layers.1.mlp.{part}.weight"]
        for expert in range(3):
            assert torch.equal(tensors[f"model.layers.1.block_sparse_moe.experts.{expert}.{published}.weight"], dense)
    routers = torch.stack([value for name, value in tensors.items() if name.endswith("block_sparse_moe.gate.weight")])
    assert routers.shape == (6, 3, 32)
    assert abs(routers.mean()) < 0.02
    assert abs(routers.std() / LLAMA.tiny["initializer_range"] - 1) < 0.1
    gate = "model.layers.1.block_sparse_moe.gate.weight"
    assert torch.equal(all_tensors(tmp_path / "same")[gate], tensors[gate])
    assert not torch.equal(all_tensors(tmp_path / "other")[gate], tensors[gate])


def test_noise_breaks_the_symmetry_and_its_effect_is_said(llama, tmp_path):
    report = upcycle_checkpoint(str(tmp_path / "llama"), tmp_path / "moe", experts=2, top_k=2, expert_noise=0.1)
    tensors = all_tensors(tmp_path / "moe")
    first, second = (tensors[f"model.layers.0.block_sparse_moe.experts.{expert}.w1.weight"] for expert in (0, 1))
    dense = llama.state_dict()["model.layers.0.mlp.gate_proj.weight"]
    assert not torch.equal(first, second)
    assert abs((first - dense).std() / dense.std() - 0.1) < 0.01
    assert report.logit_change > 1e-3
    assert f"changed by {report.logit_change:.1e}" in str(report)


def test_large_checkpoints_are_written_in_several_shards(llama, tmp_path, monkeypatch):
    monkeypatch.setattr("conversion.writing.SHARD_BYTES", 20_000)
    upcycle_checkpoint(str(tmp_path / "llama"), tmp_path / "moe", experts=4, top_k=2)
    names = sorted(path.name for path in (tmp_path / "moe").glob("*.safetensors"))
    assert len(names) > 5
    assert names[-1] == f"model-{len(names):05d}-of-{len(names):05d}.safetensors"
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "moe")
    assert relative_error(model.eval()(tokens()).logits, llama(tokens()).logits) <= 3e-6


def test_refusals(llama, tmp_path):
    for arguments, message in (
        ({"experts": 4, "top_k": 5}, "between 1 and the 4 experts, got 5"),
        ({"experts": 4, "top_k": 0}, "between 1 and the 4 experts, got 0"),
        ({"experts": 2, "top_k": 1, "expert_noise": -1.0}, "must be finite and not negative"),
    ):
        with pytest.raises(UserError, match=message):
            upcycle_checkpoint(str(tmp_path / "llama"), tmp_path / "moe", **arguments)
    edit_config(tmp_path / "llama", mlp_bias=True)
    with pytest.raises(UserError, match="mlp_bias is true, but Mixtral has no biases"):
        upcycle_checkpoint(str(tmp_path / "llama"), tmp_path / "moe", experts=2, top_k=1)
    BY_NAME["Qwen3Moe"].base_causal_lm().save_pretrained(tmp_path / "qwen")
    with pytest.raises(UserError, match="only 'llama' is upcycled, not 'qwen3_moe'"):
        upcycle_checkpoint(str(tmp_path / "qwen"), tmp_path / "moe", experts=2, top_k=1)
    assert not (tmp_path / "moe").exists()
