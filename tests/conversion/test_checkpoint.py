"""Checkpoints that would hang or fill the memory, or that libraries fail on in ways of their own: one line each."""

import json
import os
import re

import pytest
import torch
from safetensors.torch import load_file, save_file

from conversion.checkpoint import Checkpoint
from tests.conversion.checkpoints import command, edit_config
from tests.families import BY_NAME


@pytest.fixture
def source(tmp_path):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "source", max_shard_size="100KB")
    return tmp_path / "source"


def refusal(source, target, *options):
    status, line = command("port", source, target, *options)
    assert status == 2
    assert not target.exists()
    return line


@pytest.mark.parametrize(
    "name",
    [
        *("config.json", "model.safetensors.index.json", "model-00001-of-00003.safetensors", "model.safetensors"),
        *("README.md", "tokenizer.json", "generation_config.json", "provenance.json", "sub/file"),
    ],
)
@pytest.mark.parametrize("kind", ["pipe", "device", "dead link"])
def test_what_is_no_file_is_not_opened(source, tmp_path, name, kind):
    path = source / name
    path.unlink(missing_ok=True)
    path.parent.mkdir(exist_ok=True)
    if kind == "pipe":
        os.mkfifo(path)
    else:
        path.symlink_to("/dev/zero" if kind == "device" else "/nowhere")
    message = "which is missing" if kind == "dead link" else "is no file but a pipe, socket or device"
    assert message in refusal(source, tmp_path / "target", "--verify")
    for arguments in (("inspect", source), ("verify", source, source), ("export", source, tmp_path / "target")):
        status, line = command(*arguments)
        assert status == 2
        assert name in line


def test_pipes_in_place_of_texts_and_sources(source, tmp_path):
    os.mkfifo(tmp_path / "pipe.gguf")
    assert "is no file but a pipe" in refusal(tmp_path / "pipe.gguf", tmp_path / "target")
    for arguments in (("verify", source, source), ("inspect", source)):
        assert command(*arguments, "--text", tmp_path / "pipe.gguf")[0] == (0 if arguments[0] == "inspect" else 2)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"num_hidden_layers": 10**9}, "num_hidden_layers is 1000000000, but the tensors' names have 6 layers"),
        ({"head_dim": 10**9}, "head_dim is 1000000000, expected at most"),
        ({"num_labels": 10**9}, "num_labels is 1000000000, expected at most"),
        ({"linear_attn_config": {"num_heads": 10**9}}, "num_heads is 1000000000, expected at most"),
        *(({"rms_norm_eps": value}, "rms_norm_eps is .*, expected a finite") for value in (-1e-5, 1e999, float("nan"))),
        ({"layer_norm_epsilon": float("nan")}, "layer_norm_epsilon is nan, expected a finite"),
        ({"num_attention_heads": 0}, r"config.json \(num_attention_heads is 0\) cannot be read|do not fit"),
        ({"intermediate_size": -1}, r"do not fit config.json \(intermediate_size is -1\): "),
        ({"num_hidden_layers": "12"}, 'config.json: num_hidden_layers is "12", expected int[.]'),
        ({"hidden_size": None}, "config.json: hidden_size is null, expected int[.]"),
        ({"bos_token_id": [[1]]}, r"config.json: bos_token_id is \[\[1\]\], expected int( or list)? or null[.]"),
        ({"initializer_range": 1.5}, "config.json: initializer_range: Value must be .*, got 1.5"),
        ({"index_head_dim": "12", "vocab_size": -1}, r'\(vocab_size is -1, index_head_dim is "12"\)'),
        ({"dtype": -1}, 'config.json: dtype is -1, expected a name such as "bfloat16"'),
        ({"hidden_act": "nothing"}, "do not fit config.json: "),
        ({"quantization_config": ["fp8"]}, "quantization_config is no object|config.json cannot be read"),
        ({"model_type": ["llama"]}, "no model_type"),
    ],
)
def test_configs_that_no_model_can_have(source, tmp_path, fields, message):
    edit_config(source, **fields)
    assert re.search(message, refusal(source, tmp_path / "target"))
    assert re.search(message, command("inspect", source)[1])  # "portable no"


@pytest.mark.parametrize("name", ["config.json", "model.safetensors.index.json", "tokenizer.json"])
@pytest.mark.parametrize("text", ["[" * 10**5, '{"a":' * 10**5, f'{{"model_type": {"9" * 5000}}}', "\ud800", ""])
def test_json_that_is_none(source, tmp_path, name, text):
    (source / name).write_bytes(text.encode(errors="surrogatepass"))
    assert name in refusal(source, tmp_path / "target", "--verify")


@pytest.mark.parametrize("weight_map", [[], None, {"a": 1}, {"a": ["b"]}, {"a": ".."}, {"a": ""}, {"a": "\0"}, {}])
def test_indices_of_the_wrong_shape(source, tmp_path, weight_map):
    (source / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    refusal(source, tmp_path / "target")


def test_a_tokenizer_that_tokenizers_fails_on(source, tmp_path):
    """With a bare `Exception`."""
    (source / "tokenizer.json").write_text(json.dumps({"version": "1.0", "model": {"type": "Nothing"}}))
    (source / "tokenizer_config.json").write_text(json.dumps({"tokenizer_class": "TokenizersBackend"}))
    assert "its tokenizer cannot be read: " in refusal(source, tmp_path / "target", "--verify")


@pytest.mark.parametrize("prefix", ["other.", "model.layers.0."])
def test_a_second_pair_of_depth_tensors(source, tmp_path, prefix):
    assert command("port", source, tmp_path / "port")[0] == 0
    file = tmp_path / "port" / Checkpoint(tmp_path / "port").shards[-1]
    tensors = load_file(file)
    added = {f"{prefix}attn_res.query": torch.ones_like(tensors["model.attn_res.query"])}
    save_file(tensors | added, file, metadata={"format": "pt"})
    index = tmp_path / "port" / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"] |= dict.fromkeys(added, file.name)
    index.write_text(json.dumps(content))
    for arguments in (("export", tmp_path / "port", tmp_path / "back"), ("inspect", tmp_path / "port")):
        status, line = command(*arguments)
        assert status == 2
        assert f"{prefix}attn_res.query" in line
    status, output = command("verify", source, tmp_path / "port")
    assert status == 1
    assert f"differs: {prefix}attn_res.query" in output


@pytest.mark.parametrize("count", [1, 2])
def test_layers_that_predict_further_tokens_are_kept(tmp_path, count):
    """DeepSeek's MTP: whatever index the config explains, and no other."""
    source = tmp_path / "source"
    BY_NAME["DeepseekV3"].base_causal_lm(num_nextn_predict_layers=count).save_pretrained(source)
    tensors = load_file(source / "model.safetensors")
    layer = {name.removeprefix("model.layers.5."): value for name, value in tensors.items() if ".layers.5." in name}
    for index in range(count):
        tensors |= {f"model.layers.{6 + index}.{name}": value.clone() for name, value in layer.items()}
        tensors[f"model.layers.{6 + index}.eh_proj.weight"] = torch.zeros(32, 64)
    save_file(tensors, source / "model.safetensors", metadata={"format": "pt"})
    edit_config(source, num_nextn_predict_layers=count)
    status, output = command("port", source, tmp_path / "port", "--verify")
    assert status == 0, output
    assert Checkpoint(tmp_path / "port").weight_map.keys() >= tensors.keys()
    edit_config(source, num_nextn_predict_layers=count - 1)
    assert f"model.layers.{5 + count}." in refusal(source, tmp_path / "target")
