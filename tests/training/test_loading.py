"""What a user names and cannot be opened is refused in one line by every command that opens it."""

import os
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.conversion.checkpoints import edit_config

from .conftest import refused, words
from .test_finetune import command


def config(**fields):
    return lambda model: edit_config(model, **fields)


def tensors(part):
    def spoil(model):
        file = model / "model.safetensors"
        save_file(part(load_file(file)), file, metadata={"format": "pt"})

    return spoil


def replace(name, content):
    return lambda model: (model / name).write_bytes(content)


BROKEN = {
    "an epsilon that is no number": (config(rms_norm_eps=float("nan")), "rms_norm_eps"),
    "a config of nothing": (replace("config.json", b"\xff{"), ""),
    "a family of nobody": (config(model_type="nobody"), ""),
    "no config": (lambda model: (model / "config.json").unlink(), ""),
    "a shard that is cut off": (lambda model: os.truncate(model / "model.safetensors", 5000), ""),
    "a shard that is none": (replace("model.safetensors", b"\0" * 100), ""),
    "no shard": (lambda model: (model / "model.safetensors").unlink(), ""),
    "a tensor of another shape": (
        tensors(lambda one: one | {"model.layers.2.mlp.up_proj.weight": torch.ones(1, 1)}),
        "up_proj.weight has shape",
    ),
    "no queries": (
        tensors(lambda one: {k: v for k, v in one.items() if "query" not in k}),
        "attn_res.query is missing",
    ),
    "a tokenizer of nothing": (replace("tokenizer.json", b"\x00\x01"), "its tokenizer"),
    "a tokenizer of another kind": (replace("tokenizer.json", b'{"model": 3}'), "its tokenizer"),
    "fewer embeddings than tokens": (
        lambda model: (
            config(vocab_size=40)(model),
            tensors(lambda one: {k: v[:40] if len(v) == 99 else v for k, v in one.items()})(model),
        ),
        r"(data.jsonl, line \d+: the tokenizer gives|text.txt:) the token \d+.* for 40",
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_models_that_cannot_be_opened(name, save_model, text_file, tmp_path):
    spoil, message = BROKEN[name]
    model = save_model()
    spoil(model)
    (tmp_path / "text.txt").write_text(words(60))
    message = f"{model}.*{message}" if "tokens" not in name else message
    refused(message, *command(model, text_file, tmp_path / "out"))
    refused(message, "diagnose", model, "--text", tmp_path / "text.txt", "--output", tmp_path / "pictures")
    assert not (tmp_path / "pictures").exists()
    assert not list((tmp_path / "out").glob("*")) or "tensor" in name or "shard" in name or "queries" in name


def test_files_that_are_none(save_model, text_file, tmp_path):
    model, pipe = save_model(), tmp_path / "pipe"
    os.mkfifo(pipe)
    for path in (pipe, Path("/dev/zero"), tmp_path, tmp_path / "missing"):
        refused(str(path), *command(model, path, tmp_path / "out"))
        refused(str(path), "diagnose", model, "--text", path, "--output", tmp_path / "pictures")
    shutil.rmtree(model)
    for path in (pipe, Path("/dev/null"), "no such/model at/all"):
        refused("", *command(path, text_file, tmp_path / "out"))
        refused("", "diagnose", path, "--output", tmp_path / "pictures")
        refused("", "merge", path, tmp_path / "merged")
