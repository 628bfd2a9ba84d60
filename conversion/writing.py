"""What every written checkpoint has in common: shards and their index, the config, the other files, the code."""

import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import torch
from safetensors.torch import save_file
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

import modeling_attnres
from common.files import take_over
from model_cards.card import write_card
from model_cards.provenance import Provenance, Verified, hash_files, of_card

from .checkpoint import CONFIG_NAME, OTHER_WEIGHTS, Checkpoint


SHARD_BYTES = 2**30


def shard_name(index: int, count: int) -> str:
    """As transformers names shards, so that `save_pretrained` over a folder removes those it does not replace."""
    return f"model-{index:05d}-of-{count:05d}.safetensors"


def copy_checkpoint(checkpoint: Checkpoint, folder: Path, link: bool = False) -> None:
    """Take over a whole checkpoint, its shards numbered from 1 of their count; no tensor is changed."""
    count = len(checkpoint.shards)
    names = {old: shard_name(index, count) for index, old in enumerate(checkpoint.shards, start=1)}
    take_over({checkpoint.folder / old: folder / new for old, new in names.items()}, link)
    write_index(folder, {tensor: names[old] for tensor, old in checkpoint.weight_map.items()})
    copy_other_files(checkpoint, folder)
    shutil.copyfile(checkpoint.folder / CONFIG_NAME, folder / CONFIG_NAME)


def add_shard(checkpoint: Checkpoint, tensors: dict[str, torch.Tensor]) -> None:
    """Add a shard, in its folder, to a checkpoint whose shards are numbered from 1 of their count."""
    folder, count = checkpoint.folder, len(checkpoint.shards) + 1
    names = {old: shard_name(index, count) for index, old in enumerate(checkpoint.shards, start=1)}
    for old, new in names.items():
        os.rename(folder / old, folder / new)
    weight_map = {tensor: names[old] for tensor, old in checkpoint.weight_map.items()}
    save_shard(tensors, folder / shard_name(count, count))
    write_index(folder, weight_map | dict.fromkeys(tensors, shard_name(count, count)))


def save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one safetensors file, readable by whoever may read the folder."""
    save_file(tensors, path, metadata={"format": "pt"})
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)
    os.umask(mask)
    return mask


def write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write a stream of tensors as numbered shards with an index; about one shard is held in memory."""
    shards: list[list[str]] = []
    pending: dict[str, torch.Tensor] = {}
    pending_bytes = 0

    def flush():
        if pending:
            save_shard(pending, folder / f"{len(shards)}.partial")
            shards.append(list(pending))
            pending.clear()

    for name, tensor in tensors:
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        if pending_bytes >= SHARD_BYTES:
            flush()
            pending_bytes = 0
    flush()
    weight_map = {}
    for index, names in enumerate(shards):
        final = shard_name(index + 1, len(shards))
        os.rename(folder / f"{index}.partial", folder / final)
        weight_map |= dict.fromkeys(names, final)
    write_index(folder, weight_map)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    total_size = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=2) + "\n", encoding="utf-8")


def copy_other_files(checkpoint: Checkpoint, folder: Path, without: tuple[str, ...] = ()) -> None:
    """Keep what else lies in the source: tokenizer, chat template, generation config, license, …; no other weights."""
    written_anew = {CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, *checkpoint.shards, *without}
    for path in sorted(checkpoint.folder.iterdir()):
        if path.name in written_anew or path.name.startswith(".") or any(path.match(glob) for glob in OTHER_WEIGHTS):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*OTHER_WEIGHTS))
        else:
            shutil.copyfile(path, folder / path.name)


def code_files() -> list[Path]:
    """The files of `modeling_attnres` that travel with a checkpoint."""
    package = Path(modeling_attnres.__file__).parent
    return sorted(path for path in package.glob("*.py") if path.name != "__init__.py")


def copy_code(folder: Path) -> None:
    for path in code_files():
        shutil.copyfile(path, folder / path.name)


def add_card(
    folder: Path,
    name: str,
    checkpoint: Checkpoint,
    source: str,
    made_by: str,
    verified: Verified | None = None,
    **details: str,
) -> None:
    """Record how the checkpoint `name`, in `folder`, was made, and write its card.

    It was made from `checkpoint`, which was given as `source` and whose weight files are hashed.
    """
    path = Path(source).expanduser()
    files = [path] if path.is_file() else [checkpoint.folder / name for name in checkpoint.shards]
    is_hub_id = not path.exists()
    Provenance(
        made_by=made_by,
        source=source if is_hub_id else path.resolve().name,
        shards=hash_files(files),
        details=details,
        verified=verified,
        **of_card(checkpoint.folder) | ({"base_model": source} if is_hub_id else {}),
    ).write(folder)
    write_card(folder, name=name)
