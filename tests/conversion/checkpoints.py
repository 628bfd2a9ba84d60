"""Damage to checkpoints on disk, views of them, and the commands as a user types them."""

import json
import struct

import torch
from safetensors.torch import load_file, save_file
from tokenizers import Tokenizer
from tokenizers.models import BPE
from tokenizers.pre_tokenizers import WhitespaceSplit
from tokenizers.trainers import BpeTrainer
from typer.testing import CliRunner

from common.text import SAMPLE
from conversion.__main__ import app


def command(*arguments):
    """Run a command; returns its status and its error, or output. A failure is one line, no traceback."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    assert result.exit_code in (0, 1, 2), result.output
    errors = [line for line in result.output.splitlines() if line.startswith("error: ")]
    assert len(errors) == (result.exit_code == 2) or result.exit_code == 1, result.output
    return result.exit_code, errors[0] if errors else result.output


def contents(folder):
    """The bytes of every file below a folder, by relative path."""
    return {path.relative_to(folder): path.read_bytes() for path in sorted(folder.rglob("*")) if path.is_file()}


def all_tensors(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def edit_json(path, **fields):
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


def edit_config(folder, **fields):
    edit_json(folder / "config.json", **fields)


def edit_tensors(folder, **changes):
    """Change tensors in whichever shard holds them: `None` removes one."""
    for path in sorted(folder.glob("*.safetensors")):
        tensors = load_file(path)
        new = {name: changes.get(name, value) for name, value in tensors.items()}
        new = {name: value for name, value in new.items() if value is not None}
        if new.keys() != tensors.keys() or any(name in changes for name in tensors):
            save_file(new, path, metadata={"format": "pt"})


def merge_shards(folder):
    """Put all tensors into one file without an index."""
    tensors = all_tensors(folder)
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})


def edit_header(path, change):
    """Rewrite a safetensors header in place, leaving the data as it is."""
    content = path.read_bytes()
    size = struct.unpack("<Q", content[:8])[0]
    header = json.loads(content[8 : 8 + size])
    change(header)
    new = json.dumps(header).encode()
    path.write_bytes(struct.pack("<Q", len(new)) + new + content[8 + size :])


def train_queries(folder, scale=0.5):
    """Give an Attention Residuals checkpoint queries as if it had been trained."""
    generator = torch.Generator().manual_seed(0)
    query = all_tensors(folder)["model.attn_res.query"]
    edit_tensors(folder, **{"model.attn_res.query": torch.randn(query.shape, generator=generator) * scale})


def set_query(folder, site, value):
    """Set one site's query to a value."""
    query = all_tensors(folder)["model.attn_res.query"].clone()
    query[site] = value
    edit_tensors(folder, **{"model.attn_res.query": query})


def add_tokenizer(folder, **settings):
    """A small tokenizer whose file says all of it."""
    tokenizer = Tokenizer(BPE(unk_token="<unk>"))
    tokenizer.pre_tokenizer = WhitespaceSplit()
    tokenizer.train_from_iterator([SAMPLE], BpeTrainer(vocab_size=98, special_tokens=["<unk>"], show_progress=False))
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
