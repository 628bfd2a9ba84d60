"""Damage to checkpoints on disk, and views of them."""

import json
import struct

import torch
from safetensors.torch import load_file, save_file


def all_tensors(folder):
    return {name: value for path in sorted(folder.glob("*.safetensors")) for name, value in load_file(path).items()}


def edit_config(folder, **fields):
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | fields))


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
