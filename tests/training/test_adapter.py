"""Merging: what is whole is merged and keeps what its base had, what is not is refused, the base is never touched."""

import shutil
from hashlib import sha256

import pytest
import torch
from peft import AutoPeftModelForCausalLM
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

from conversion.checkpoint import Checkpoint
from tests.conversion.checkpoints import edit_json
from tests.families import BY_NAME, tokens
from tests.oracle import relative_error

from .conftest import refused, succeed
from .test_finetune import command


def hashes(folder):
    return {path.relative_to(folder): sha256(path.read_bytes()).hexdigest() for path in folder.rglob("*.*")}


def logits(model):
    with torch.no_grad():
        return model.eval()(tokens()).logits


def train(model, data, output, *flags):
    succeed(*command(model, data, output, "--learning_rate", "0.1", *flags))
    return output / "adapter"


@pytest.mark.parametrize("lora", ["all-linear", "experts", "none"])
def test_merge_computes_the_same_and_keeps_what_the_base_had(lora, family, save_model, text_file, tmp_path):
    if lora == "experts" and family.name == "Llama":
        pytest.skip("no experts")
    base, merged = save_model(family.name), tmp_path / "merged"
    others = {"LICENSE": "Apache", "NOTICE": "by us", "assets/words.txt": "w1"}
    for name, content in others.items():
        (base / name).parent.mkdir(exist_ok=True)
        (base / name).write_text(content)
    before = hashes(base)
    flags = ["--no-packed"] if family.name == "KimiLinear" else []
    adapter = train(base, text_file, tmp_path / "out", "--lora", lora, *flags)
    succeed("merge", adapter, merged)
    assert hashes(base) == before
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(adapter))
    assert relative_error(logits(AutoModelForCausalLM.from_pretrained(base)), expected) > 1e-3
    assert relative_error(logits(AutoModelForCausalLM.from_pretrained(merged)), expected) <= 1e-5
    assert Checkpoint(merged).weight_map.keys() == Checkpoint(base).weight_map.keys()
    assert {name: (merged / name).read_text() for name in others} == others
    for name in ("modeling_attnres.py", "tokenizer.json", "generation_config.json"):
        assert (merged / name).exists()
    card = (merged / "README.md").read_text()
    assert "fine-tuned." in card
    assert f"Merged from `model-{family.name}`, with the adapter `out/adapter`, of rank" in card


@pytest.mark.parametrize(
    "fields",
    [
        {"attn_res_form": "add", "attn_res_heads": 4},
        {"attn_res_query": "input", "attn_res_query_rank": 3},
        {"attn_res_weights": "static"},
    ],
    ids=["add", "input", "static"],
)
def test_every_form_is_trained_and_merged(fields, save_model, text_file, tmp_path):
    """PEFT trains all of its parameters in full, and the merged model computes what base and adapter do."""
    base = save_model(**fields)
    model = AutoModelForCausalLM.from_pretrained(base)
    model.model.attn_res.get_parameter(model.model.attn_res.moving).data.mul_(0.1)  # or rounding shows in every logit
    model.save_pretrained(base)
    adapter = train(base, text_file, tmp_path / "out")
    succeed("merge", adapter, tmp_path / "merged")
    models = [AutoModelForCausalLM.from_pretrained(folder) for folder in (base, tmp_path / "merged")]
    before, after = (dict(model.model.attn_res.named_parameters()) for model in models)
    for name, parameter in before.items():
        assert not torch.equal(parameter, after[name]), name
    expected = logits(AutoPeftModelForCausalLM.from_pretrained(adapter))
    assert relative_error(logits(models[0]), expected) > 1e-3
    assert relative_error(logits(models[1]), expected) <= 1e-5


def test_layers_for_multi_token_prediction_are_kept(save_model, text_file, tmp_path):
    base = save_model("DeepseekV3", num_nextn_predict_layers=1)
    shard = base / "model.safetensors"
    extra = {f"model.layers.6.{name}.weight": torch.randn(3, 4) for name in ("eh_proj", "mlp.experts.0.up_proj")}
    save_file(load_file(shard) | extra, shard, metadata={"format": "pt"})
    adapter = train(base, text_file, tmp_path / "out")
    printed = succeed("merge", adapter, tmp_path / "merged")
    assert "kept 2 tensors that no model of transformers reads" in printed
    written = Checkpoint(tmp_path / "merged")
    assert written.config["num_nextn_predict_layers"] == 1
    assert written.weight_map.keys() == Checkpoint(base).weight_map.keys()
    with written.open_tensors() as read:
        for name, tensor in extra.items():
            assert torch.equal(read(name), tensor)


def test_an_adapter_of_standard_residuals_is_merged_into_a_model_of_them(save_model, text_file, tmp_path):
    base = save_model()
    adapter = train(base, text_file, tmp_path / "out", "--control")
    succeed("merge", adapter, tmp_path / "merged")
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "merged")
    assert merged.config.attn_res_mode == "none"
    assert not Checkpoint(tmp_path / "merged").depth_names
    (base / "config.json").write_text((tmp_path / "merged/config.json").read_text())
    expected = AutoPeftModelForCausalLM.from_pretrained(adapter)
    assert expected.config.attn_res_mode == "none"
    assert relative_error(logits(merged), logits(expected)) <= 1e-5


def change(part):
    """A way to spoil an adapter: by what its tensors become."""

    def spoil(adapter):
        file = adapter / "adapter_model.safetensors"
        save_file(part(load_file(file)), file)

    return spoil


def without(part):
    return change(lambda tensors: {name: value for name, value in tensors.items() if part not in name})


def settings(**fields):
    return lambda adapter: edit_json(adapter / "adapter_config.json", **fields)


def cut(adapter):
    file = adapter / "adapter_model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


NOT_WHOLE = {
    "no B": (without("lora_B"), "lora_B.weight is missing, one of 42"),
    "a layer less": (without("layers.3.mlp.up_proj.lora_"), "layers.3.mlp.up_proj.lora_A.weight is missing, one of 2"),
    "no queries": (without("attn_res.query"), "no queries .*attn_res.query"),
    "more": (change(lambda one: one | {"base_model.model.x": torch.ones(1)}), "model.x has no place in this model"),
    "depth that its config has not": (settings(modules_to_save=None), "attn_res.* has no place in this model"),
    "fewer targets in its config": (settings(target_modules=["q_proj"]), "has no place in this model"),
    "not finite": (change(lambda one: {name: value / 0 for name, value in one.items()}), "not finite"),
    "cut off": (cut, "adapter_model.safetensors"),
    "another rank": (settings(r=4), "size mismatch"),
    "no weights": (lambda adapter: (adapter / "adapter_model.safetensors").unlink(), "adapter_model.safetensors"),
    "targets of another family": (settings(target_modules=["c_attn"]), "No modules were targeted"),
    "no base": (settings(base_model_name_or_path=None), "base_model_name_or_path is None"),
    "a relative base": (settings(base_model_name_or_path="nowhere/ported"), "base_model_name_or_path: nowhere/ported"),
    "no LoRA": (settings(peft_type="IA3"), "peft_type is 'IA3', expected 'LORA'"),
    "a broken config": (lambda adapter: (adapter / "adapter_config.json").write_text("{"), "adapter_config.json"),
    "a pattern that never ends": (settings(target_modules="(a+)+$"), "target_modules has .*, expected plain names"),
    **{
        f"such a pattern in {field}": (settings(**{field: value}), f"{field} has .*, expected plain names")
        for field, value in {
            "exclude_modules": "(.*.*)*x",
            "modules_to_save": ["attn_res", "(m|.)*"],
            "layers_pattern": ["(l+)+"],
            "rank_pattern": {"(.+)+z": 3},
            "alpha_pattern": {"(.+)+z": 3},
        }.items()
    },
}


def test_what_is_not_whole_or_not_of_the_base_is_refused(save_model, text_file, tmp_path):
    base = save_model()
    whole = train(base, text_file, tmp_path / "out")
    before = hashes(base)
    for name, (spoil, message) in NOT_WHOLE.items():
        adapter = tmp_path / name
        shutil.copytree(whole, adapter)
        spoil(adapter)
        refused(message, "merge", adapter, tmp_path / "merged")
        diagnosed = "relative base" not in name
        if diagnosed:
            refused(message, "diagnose", base, "--adapter", adapter, "--output", tmp_path / "merged")
        assert not (tmp_path / "merged").exists()
    for folder in ("missing", base):
        refused("adapter_config.json", "merge", tmp_path / folder, tmp_path / "merged")
    refused("is an adapter, expected a model. Merge it first", *command(whole, text_file, tmp_path / "again"))
    refused("lies inside the source", "merge", whole, base / "merged")
    assert hashes(base) == before


def test_an_adapter_of_another_model_is_refused(save_model, text_file, tmp_path):
    """Its base has become another: of other sizes, another family, none with Attention Residuals, or not whole."""
    base = save_model()
    adapter = train(base, text_file, tmp_path / "out")
    shutil.move(base, tmp_path / "own")
    # Another model in its place
    for other, message in (
        (BY_NAME["Llama"].causal_lm(hidden_size=64), "size mismatch"),
        (BY_NAME["Llama"].causal_lm(num_hidden_layers=3), "size mismatch"),
        (BY_NAME["Mixtral"].causal_lm(), "is missing|has no place|not found"),
        (BY_NAME["Llama"].base_causal_lm(), "is a 'llama', without Attention Residuals"),
    ):
        shutil.rmtree(base, ignore_errors=True)
        other.save_pretrained(base)
        refused(message, "merge", adapter, tmp_path / "merged")
    # Its own, but not whole
    shutil.rmtree(base)
    shutil.copytree(tmp_path / "own", base)
    for spoil, message in (
        (lambda one: {name: value for name, value in one.items() if "layers.2.mlp.up" not in name}, "up.* is missing"),
        (lambda one: {"model.x": torch.ones(1)}, "is missing|no tensor"),
    ):
        save_file(spoil(load_file(tmp_path / "own/model.safetensors")), base / "model.safetensors", {"format": "pt"})
        refused(message, "merge", adapter, tmp_path / "merged")
    (base / "model.safetensors").write_bytes(b"no weights")
    refused("model.safetensors", "merge", adapter, tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_a_full_disk_leaves_no_merged_model(save_model, text_file, tmp_path, monkeypatch):
    from safetensors import SafetensorError

    adapter = train(save_model(), text_file, tmp_path / "out")

    def full(*args, **kwargs):
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    monkeypatch.setattr("transformers.modeling_utils.safe_save_file", full)
    refused("merged cannot be written: .*No space left on device", "merge", adapter, tmp_path / "merged")
    assert not [path for path in tmp_path.iterdir() if "merged" in path.name]
