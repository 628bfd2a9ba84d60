"""Saving and loading: names on disk, shards, missing tensors, Auto classes, remote code."""

import json
import re
import subprocess
import sys

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.utils import logging

import modeling_attnres
from tests.conftest import CODE_FILES, ROOT
from tests.conversion.checkpoints import all_tensors
from tests.families import BY_NAME, FAMILIES, randomise_depth, tokens
from tests.oracle import relative_error


HEADS = ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering")


def depth_shapes(layers, width, prefix="model."):
    """The depth tensors of a checkpoint: named as in memory, a row for every site."""
    return {f"{prefix}attn_res.{name}": [2 * layers + 1, width] for name in ("query", "norm")}


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
    """The names in memory for the depth tensors; for all others exactly what the base family saves."""
    model = family.ours(kind)(family.config())
    model.save_pretrained(tmp_path / "ours")
    family.base(kind)(family.base("Config")(**family.tiny)).save_pretrained(tmp_path / "base")
    found = {name: list(value.shape) for name, value in all_tensors(tmp_path / "ours").items()}
    base = {name: list(value.shape) for name, value in all_tensors(tmp_path / "base").items()}
    depth = depth_shapes(6, 32, prefix="model." if kind == "ForCausalLM" else "")
    assert found == base | depth
    assert {name: list(value.shape) for name, value in model.state_dict().items() if name in depth} == depth


def test_saving_a_model_loaded_from_a_base_checkpoint(family, base_checkpoint, tmp_path):
    """The names are the same whether or not the checkpoint that was loaded had depth tensors."""
    model = family.ours("ForCausalLM").from_pretrained(base_checkpoint)
    model.save_pretrained(tmp_path / "saved")
    saved, base = all_tensors(tmp_path / "saved"), all_tensors(base_checkpoint)
    assert saved.keys() - base.keys() == depth_shapes(6, 32).keys()
    assert all(torch.equal(saved[name], value) for name, value in base.items())


def test_a_base_checkpoint_is_loaded_without_changing_what_it_computes(family, base_checkpoint, mode):
    base = family.base("ForCausalLM").from_pretrained(base_checkpoint).eval()
    model = family.ours("ForCausalLM").from_pretrained(base_checkpoint, **mode).eval()
    with torch.no_grad():
        expected = base(tokens()).logits
        assert relative_error(model(tokens()).logits, expected) <= 3e-6
    assert (
        not family.ours("Config")
        .from_pretrained(base_checkpoint, attn_res_scale_norm_eps=False)
        .attn_res_scale_norm_eps
    )


@pytest.mark.parametrize(
    "changed",
    [{"attn_res_block_size": 3}, {"attn_res_mode": "full"}, {"attn_res_mode": "none"}, {"num_hidden_layers": 4}],
)
def test_a_config_that_no_longer_describes_the_model_is_not_saved(changed, tmp_path):
    for kind in ("ForCausalLM", "Model"):
        model = BY_NAME["Llama"].ours(kind)(BY_NAME["Llama"].config(attn_res_block_size=2))
        for name, value in changed.items():
            setattr(model.config, name, value)
        with pytest.raises(ValueError, match=r"from 6 decoder layers in blocks that start at \[0, 2, 4\]"):
            model.save_pretrained(tmp_path)
        assert not list(tmp_path.iterdir())


def test_a_base_familys_config_is_refused_by_name():
    base = BY_NAME["Llama"].base("Config")()
    for kind in ("ForCausalLM", "Model"):
        with pytest.raises(TypeError, match="expected a config of AttnResLlamaConfig, got LlamaConfig"):
            BY_NAME["Llama"].ours(kind)(base)


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


@pytest.mark.parametrize("name", ["query", "norm"])
def test_depth_tensors_of_another_number_of_sites_are_refused(family, tmp_path, name):
    """Some layers' rows without the others' are a broken checkpoint, not a base checkpoint."""
    family.causal_lm().save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors[f"model.attn_res.{name}"] = tensors[f"model.attn_res.{name}"][:-1].clone()
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    expected = rf"model\.attn_res\.{name} of the checkpoint has 12 rows, expected 13: .* 6 decoder layers"
    with pytest.raises(RuntimeError, match=expected):
        family.ours("ForCausalLM").from_pretrained(tmp_path)


@pytest.mark.parametrize("kept", [1, 4])
def test_fewer_layers_than_the_checkpoint_has(family, layout, base_checkpoint, kept, tmp_path):
    """Refused with two ways out; both compute what the base computes with as many layers."""
    model = family.ours("ForCausalLM").from_pretrained(base_checkpoint, attn_res_scale_norm_eps=True, **layout)
    model.save_pretrained(tmp_path / "ported")
    ids = tokens()
    base = family.base("ForCausalLM").from_pretrained(base_checkpoint)
    base.model.layers = base.model.layers[:kept]
    expected = base.eval()(ids, use_cache=False).logits

    if layout.get("attn_res_block_boundaries", [0])[-1] >= kept:
        with pytest.raises(ValueError, match=f"within the {kept} decoder layers"):
            AutoModelForCausalLM.from_pretrained(tmp_path / "ported", num_hidden_layers=kept)
    else:
        says = rf"has 13 rows, expected {2 * kept + 1}: .* model\.model\.layers\[:{kept}\]"
        with pytest.raises(RuntimeError, match=says):
            AutoModelForCausalLM.from_pretrained(tmp_path / "ported", num_hidden_layers=kept)
        anew = AutoModelForCausalLM.from_pretrained(
            tmp_path / "ported", num_hidden_layers=kept, ignore_mismatched_sizes=True
        )
        assert relative_error(anew.eval()(ids, use_cache=False).logits, expected) <= 3e-6
    cut = AutoModelForCausalLM.from_pretrained(tmp_path / "ported")
    cut.model.layers = cut.model.layers[:kept]
    assert relative_error(cut.eval()(ids, use_cache=False).logits, expected) <= 3e-6


def test_a_mismatch_of_other_tensors_too_is_told_by_transformers(tmp_path):
    FAMILIES[0].causal_lm().save_pretrained(tmp_path)
    with pytest.raises(RuntimeError, match=r"(?s)ignore_mismatched_sizes.*above report"):
        AutoModelForCausalLM.from_pretrained(tmp_path, num_hidden_layers=4, intermediate_size=64)


def test_one_depth_tensor_without_the_other_is_named(family, tmp_path):
    model = family.causal_lm()
    model.save_pretrained(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.attn_res.norm"]
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    again, info = family.ours("ForCausalLM").from_pretrained(tmp_path, output_loading_info=True)
    assert info["missing_keys"] == {"model.attn_res.norm"}
    assert torch.equal(again.model.attn_res.query, model.model.attn_res.query)
    assert torch.equal(again.model.attn_res.norm, torch.ones(13, 32))


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
    expected = {"AutoConfig": f"configuration_attnres.AttnRes{family.name}Config"}
    for base_kind in ("Model", "ForCausalLM", *HEADS):
        if hasattr(transformers, family.name + base_kind):
            auto_class = "AutoModel" + base_kind.removeprefix("Model")
            expected[auto_class] = f"modeling_attnres.AttnRes{family.name}{base_kind}"
    assert auto_map == expected


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
    assert {path.name for path in (tmp_path / "again").glob("*.py")} == CODE_FILES


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
    assert output.count("tested with transformers >= 5.16.0, < 5.25.0; found 5.99.0") == 1


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


def head_model(head):
    """A tiny Llama with a head, its depth parameters away from their start."""
    torch.manual_seed(0)
    llama = FAMILIES[0]
    model = llama.ours(head)(llama.config(num_labels=2)).eval()
    randomise_depth(model)
    return model


def numbers(outputs):
    """What a head computes: scores of labels, or of where an answer starts and ends."""
    found = [outputs.get(name) for name in ("logits", "start_logits", "end_logits")]
    return torch.cat([one.flatten() for one in found if one is not None])


@pytest.mark.parametrize("head", HEADS)
def test_heads_through_auto_classes(head, tmp_path):
    model = head_model(head)
    model.save_pretrained(tmp_path)
    again = getattr(transformers, f"AutoModel{head}").from_pretrained(tmp_path)
    assert type(again) is type(model) is getattr(modeling_attnres, f"AttnResLlama{head}")
    assert isinstance(again, getattr(transformers, f"Llama{head}"))
    assert type(again.base_model) is modeling_attnres.AttnResLlamaModel
    assert torch.equal(numbers(again(tokens())), numbers(model(tokens())))
    assert len(again(tokens(), output_depth_attentions=True).depth_attentions) == 13


@pytest.mark.parametrize("head", HEADS)
def test_names_on_disk_of_heads(head, tmp_path):
    head_model(head).save_pretrained(tmp_path / "ours")
    llama = FAMILIES[0]
    llama.base(head)(llama.base("Config")(**llama.tiny, num_labels=2)).save_pretrained(tmp_path / "base")
    found = {name: list(value.shape) for name, value in all_tensors(tmp_path / "ours").items()}
    base = {name: list(value.shape) for name, value in all_tensors(tmp_path / "base").items()}
    prefix = "transformer." if head == "ForQuestionAnswering" else "model."
    assert found == base | depth_shapes(6, 32, prefix=prefix)


@pytest.mark.parametrize("head", HEADS)
def test_a_head_computes_what_its_base_computes(head, mode, tmp_path):
    """And learns: a step of training moves queries that start at zero."""
    llama = FAMILIES[0]
    torch.manual_seed(0)
    base = llama.base(head)(llama.base("Config")(**llama.tiny, num_labels=2)).eval()
    base.save_pretrained(tmp_path)
    model = llama.ours(head).from_pretrained(tmp_path, attn_res_scale_norm_eps=True, **mode).eval()
    with torch.no_grad():
        assert relative_error(numbers(model(tokens())), numbers(base(tokens()))) <= 3e-6
    numbers(model(tokens())).sum().backward()
    assert model.base_model.attn_res.query.grad[1:].abs().amin(0).max() > 0


def test_heads_as_remote_code_where_the_project_cannot_be_imported(tmp_path, run_isolated):
    for head in HEADS:
        model = head_model(head)
        model.save_pretrained(tmp_path / head)
        torch.save(numbers(model(tokens())), tmp_path / f"{head}.pt")
    torch.save(tokens(), tmp_path / "ids.pt")
    run_isolated(
        f"""
import torch, transformers
for head in {HEADS}:
    auto_class = getattr(transformers, "AutoModel" + head)
    model = auto_class.from_pretrained(head, trust_remote_code=True).eval()
    model.save_pretrained("again")
    again = auto_class.from_pretrained("again", trust_remote_code=True).eval()
    expected = torch.load(head + ".pt")
    for outputs in (model(torch.load("ids.pt")), again(torch.load("ids.pt"))):
        found = [outputs.get(name) for name in ("logits", "start_logits", "end_logits")]
        torch.testing.assert_close(torch.cat([one.flatten() for one in found if one is not None]), expected)
"""
    )


def test_a_causal_model_and_heads_load_each_others_checkpoints(tmp_path):
    """A classifier is fine-tuned from a port: depth parameters come with it."""
    model = FAMILIES[0].causal_lm()
    model.save_pretrained(tmp_path)
    classifier = modeling_attnres.AttnResLlamaForSequenceClassification.from_pretrained(tmp_path)
    assert torch.equal(classifier.model.attn_res.query, model.model.attn_res.query)
    assert torch.equal(classifier.model(tokens())[0], model.model(tokens())[0])


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("AttnResBertForCausalLM", r"transformers .* has no BertForCausalLM"),
        ("AttnResBertLMHeadModel", r"does not qualify.*BertLayer"),
        ("AttnResBertForSequenceClassification", r"does not qualify.*BertLayer"),
        ("AttnResGPT2Model", r"does not qualify.*GPT2Block"),
        ("AttnResCohereForCausalLM", r"does not qualify.*CohereDecoderLayer"),
        ("AttnResApertusForCausalLM", r"does not qualify.*ApertusDecoderLayer"),
        ("AttnResLamaForCausalLM", r"has no LamaForCausalLM.*Near names:.*AttnResLlamaForCausalLM"),
        ("AttnResLlamaForCasualLM", r"has no LlamaForCasualLM.*Near names:.*AttnResLlamaForCausalLM"),
        ("AttnResLamaConfig", r"has no LamaConfig.*Near names:.*AttnResLlamaConfig"),
        ("AttnResCLIPConfig", r"CLIPConfig is composite"),
        ("AttnResLlamaTokenizer", r"LlamaTokenizer"),
        ("AttnResLamaDecoderLayer", r"no decoder layer LamaDecoderLayer"),
        ("AttnRes", r"AttnRes"),
        ("Llama", r"no attribute 'Llama'"),
    ],
)
def test_asking_for_what_is_not_there_says_why(name, why):
    for module in (modeling_attnres, modeling_attnres.modeling_attnres):
        if name.endswith("Config"):
            module = modeling_attnres
        with pytest.raises(AttributeError, match=why):
            getattr(module, name)
        assert not hasattr(module, name)


def test_an_import_of_what_is_not_there_says_why():
    with pytest.raises(ImportError, match=r"has no BertForCausalLM.*Near names"):
        from modeling_attnres import AttnResBertForCausalLM  # noqa: F401


def test_a_name_that_does_not_qualify_names_near_ones_that_do():
    for name in ("AttnResBertForCausalLM", "AttnResCohereForCausalLM"):
        with pytest.raises(AttributeError) as refusal:
            getattr(modeling_attnres, name)
        near = re.findall(r"AttnRes\w+", str(refusal.value).partition("Near names:")[2])
        assert near
        assert all(hasattr(modeling_attnres, one) for one in near)


IMPORTED = """
import sys
import modeling_attnres
def families():
    return [name for name in sys.modules if name.startswith("transformers.models.") and ".modeling_" in name
            and not name.startswith("transformers.models.auto.")]
"""


def run_python(code):
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT).stdout


def test_importing_the_package_imports_no_family():
    assert run_python(IMPORTED + "print(families())").strip() == "[]"


def test_asking_for_a_family_imports_no_other():
    output = run_python(IMPORTED + "modeling_attnres.AttnResQwen3ForCausalLM; print(families())")
    assert output.strip() == "['transformers.models.qwen3.modeling_qwen3']"
