"""Saving and loading: names on disk, shards, missing tensors, Auto classes, remote code."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging

from tests.conversion.checkpoints import all_tensors
from tests.families import FAMILIES, tokens


DEPTH_NAMES = ["self_attention_res_proj", "self_attention_res_norm", "mlp_res_proj", "mlp_res_norm"]


def depth_shapes(layers, width, prefix="model."):
    """The depth tensors of a checkpoint, as Kimi K3 names them."""
    shapes = {
        f"{prefix}layers.{layer}.{name}.weight": [1, width] if name.endswith("proj") else [width]
        for layer in range(layers)
        for name in DEPTH_NAMES
    }
    return shapes | {
        f"{prefix}output_attn_res_proj.weight": [1, width],
        f"{prefix}output_attn_res_norm.weight": [width],
    }


@pytest.mark.parametrize("shard_size", ["5GB", "20KB"])
def test_round_trip(family, mode, tmp_path, shard_size):
    model = family.causal_lm(**mode)
    model.save_pretrained(tmp_path, max_shard_size=shard_size)
    assert (len(list(tmp_path.glob("*.safetensors"))) > 1) == (shard_size == "20KB")
    again = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert type(again) is family.ours("ForCausalLM")
    for name, value in model.state_dict().items():
        assert torch.equal(again.state_dict()[name], value), name
    assert torch.equal(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
def test_names_on_disk(family, tmp_path, kind):
    """Kimi K3's names for the depth tensors; for all others exactly what the base family saves."""
    family.ours(kind)(family.config()).save_pretrained(tmp_path / "ours")
    family.base(kind)(family.base("Config")(**family.tiny)).save_pretrained(tmp_path / "base")
    found = {name: list(value.shape) for name, value in all_tensors(tmp_path / "ours").items()}
    base = {name: list(value.shape) for name, value in all_tensors(tmp_path / "base").items()}
    assert found == base | depth_shapes(6, 32, prefix="model." if kind == "ForCausalLM" else "")


def test_saving_a_model_loaded_from_a_base_checkpoint(family, base_checkpoint, tmp_path):
    """The names are the same whether or not the checkpoint that was loaded had depth tensors."""
    model = family.ours("ForCausalLM").from_pretrained(base_checkpoint)
    model.save_pretrained(tmp_path / "saved")
    saved, base = all_tensors(tmp_path / "saved"), all_tensors(base_checkpoint)
    assert saved.keys() - base.keys() == depth_shapes(6, 32).keys()
    assert all(torch.equal(saved[name], value) for name, value in base.items())


def test_head_and_base_checkpoints_load_into_each_other(family, tmp_path):
    model = family.causal_lm()
    model.save_pretrained(tmp_path / "lm")
    base = family.ours("Model").from_pretrained(tmp_path / "lm")
    assert torch.equal(base(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)
    base.save_pretrained(tmp_path / "base")
    again = family.ours("ForCausalLM").from_pretrained(tmp_path / "base")
    assert torch.equal(again.model(tokens()).last_hidden_state, model.model(tokens()).last_hidden_state)


@pytest.mark.parametrize("device_map", [None, "cpu"])
def test_missing_depth_tensors_are_named_and_start_neutral(family, base_checkpoint, device_map, monkeypatch, caplog):
    """Never whatever memory held: `torch.empty` is made to return junk."""
    real_empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda *a, **k: real_empty_like(*a, **k).fill_(7.0))
    logging.enable_propagation()
    caplog.clear()
    model, info = family.ours("ForCausalLM").from_pretrained(
        base_checkpoint, device_map=device_map, output_loading_info=True
    )
    logging.disable_propagation()
    names = {f"model.attn_res.{name}" for name, _ in model.model.attn_res.named_parameters()}
    assert info["missing_keys"] == names
    assert all(name in caplog.text for name in names)
    for name, parameter in model.model.attn_res.named_parameters():
        assert torch.equal(parameter, torch.full_like(parameter, 0.0 if "query" in name else 1.0))


def test_partly_missing_depth_tensors_are_refused(family, tmp_path):
    """Some layers' queries without the others' are a broken checkpoint, not a base checkpoint."""
    family.causal_lm().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.3.mlp_res_proj.weight"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(RuntimeError, match=r"(?s)ignore_mismatched_sizes|mismatch"):
        family.ours("ForCausalLM").from_pretrained(tmp_path)


def test_auto_classes_where_the_package_is_imported(family, tmp_path):
    config = family.config()
    assert type(AutoModel.from_config(config)) is family.ours("Model")
    assert type(AutoModelForCausalLM.from_config(config)) is family.ours("ForCausalLM")
    config.save_pretrained(tmp_path)
    assert type(AutoConfig.from_pretrained(tmp_path)) is family.ours("Config")


@pytest.mark.parametrize("kind", ["Model", "ForCausalLM"])
def test_auto_map_names_every_auto_class(family, tmp_path, kind):
    family.ours(kind)(family.config()).save_pretrained(tmp_path)
    auto_map = json.loads((tmp_path / "config.json").read_text())["auto_map"]
    assert auto_map == {
        "AutoConfig": f"configuration_attnres.AttnRes{family.name}Config",
        "AutoModel": f"modeling_attnres.AttnRes{family.name}Model",
        "AutoModelForCausalLM": f"modeling_attnres.AttnRes{family.name}ForCausalLM",
    }


def test_remote_code_where_the_project_cannot_be_imported(family, mode, tmp_path, run_isolated):
    """Load, compute, save and load again, with only the files beside the checkpoint."""
    model = family.causal_lm(**mode)
    model.save_pretrained(tmp_path / "checkpoint")
    torch.save(tokens(), tmp_path / "ids.pt")
    run_isolated(
        """
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
ids = torch.load("ids.pt")
config = AutoConfig.from_pretrained("checkpoint", trust_remote_code=True)
AutoModelForCausalLM.from_config(config, trust_remote_code=True)
base = AutoModel.from_pretrained("checkpoint", trust_remote_code=True)
model = AutoModelForCausalLM.from_pretrained("checkpoint", trust_remote_code=True).eval()
model.save_pretrained("again")
again = AutoModelForCausalLM.from_pretrained("again", trust_remote_code=True).eval()
logits, reloaded = model(ids).logits, again(ids).logits
assert torch.equal(logits, reloaded)
assert torch.equal(model.model(ids).last_hidden_state, base.eval()(ids).last_hidden_state)
torch.save(logits, "logits.pt")
"""
    )
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), model(tokens()).logits)
    again, first = all_tensors(tmp_path / "again"), all_tensors(tmp_path / "checkpoint")
    assert again.keys() == first.keys()
    assert (tmp_path / "again" / "attention_residuals.py").exists()


def test_a_note_about_an_untested_transformers(tmp_path, run_isolated):
    FAMILIES[0].causal_lm().save_pretrained(tmp_path / "checkpoint")
    code = """
import sys, transformers
transformers.__version__ = "5.99.0"
from transformers import AutoModelForCausalLM
AutoModelForCausalLM.from_pretrained("checkpoint", trust_remote_code=True)
AutoModelForCausalLM.from_pretrained("checkpoint", trust_remote_code=True)
"""
    run_isolated("import sys; sys.stderr = sys.stdout\n" + code)
    output = run_isolated("import sys; sys.stderr = sys.stdout\n" + code)
    assert output.count("tested with transformers >= 5.24.0, < 5.25.0; found 5.99.0") == 1


def test_offloading_to_cpu_and_disk(family, mode, tmp_path):
    """Layers entered through `__call__`, depth parameters through `forward`: accelerate's hooks find them all."""
    model = family.causal_lm(**mode)
    model.save_pretrained(tmp_path / "checkpoint", max_shard_size="20KB")
    expected = model(tokens()).logits
    device_map = {"model.embed_tokens": "cpu", "model.norm": "cpu", "lm_head": "cpu", "model.attn_res": "disk"}
    device_map |= {f"model.layers.{index}": "disk" if index % 2 else "cpu" for index in range(6)}
    if hasattr(model.model, "rotary_emb"):
        device_map["model.rotary_emb"] = "cpu"
    offloaded = AutoModelForCausalLM.from_pretrained(
        tmp_path / "checkpoint", device_map=device_map, offload_folder=tmp_path / "offload"
    )
    assert {parameter.device.type for parameter in offloaded.model.attn_res.parameters()} == {"meta"}
    torch.testing.assert_close(offloaded(tokens()).logits, expected)
