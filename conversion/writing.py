"""Write the parts of a checkpoint: shards and their index, the config, the other files, the code, the card."""

import filecmp
import json
import os
from collections.abc import Callable, Iterable, Iterator
from fnmatch import fnmatchcase
from pathlib import Path

import torch
from huggingface_hub.constants import REPOCARD_NAME
from safetensors import SafetensorError
from safetensors.torch import save_file
from transformers import PreTrainedConfig
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME

import modeling_attnres
from common.errors import UserError, describe
from common.files import check_link, copy_new, expand_user, files_below, write_new
from model_cards.card import write_card
from model_cards.provenance import NAME as PROVENANCE
from model_cards.provenance import Provenance, Verified, hash_files, of_card

from .checkpoint import CONFIG_NAME, OTHER_WEIGHTS, Checkpoint


WEIGHTS = (*OTHER_WEIGHTS, "*.safetensors", "*.index.json")  # not other files; what an index names is taken over
WRITTEN_ANEW = (REPOCARD_NAME, PROVENANCE)
SHARD_BYTES = 2**30  # a shard is closed once it has as many


def shard_name(index: int, count: int) -> str:
    """Return transformers' name of a shard, by which `save_pretrained` removes old ones that it does not replace."""
    return f"model-{index:05d}-of-{count:05d}.safetensors"


def numbered(shards: Iterable[str], count: int) -> dict[str, str]:
    """Return for each shard's name a new one, numbered from 1, of `count`."""
    return {old: shard_name(index, count) for index, old in enumerate(sorted(shards), start=1)}


def write_port(
    checkpoint: Checkpoint,
    folder: Path,
    config: PreTrainedConfig,
    depth: dict[str, torch.Tensor],
    take_over: Callable[[dict[Path, Path]], None],
) -> None:
    """Write a checkpoint with depth attention.

    Args:
        checkpoint: whose shards are taken over.
        folder: where to write.
        config: the config to write.
        depth: the depth tensors, which become one more shard.
        take_over: makes each target, by source, the same file.
    """
    # The shards, as they are but for their names, and the depth tensors' as the last
    count = len(checkpoint.shards) + 1
    names, last = numbered(checkpoint.shards, count), shard_name(count, count)
    take_over({checkpoint.folder / old: folder / new for old, new in names.items()})
    save_shard(depth, folder / last)
    # What says what lies where, and what it is
    weight_map = {tensor: names[old] for tensor, old in checkpoint.weight_map.items()}
    write_index(folder, weight_map | dict.fromkeys(depth, last))
    write_new(folder / CONFIG_NAME, config.to_json_string())
    for path in code_files():
        copy_new(path, folder / path.name)


def save_shard(tensors: dict[str, torch.Tensor], path: Path) -> None:
    """Write one safetensors file, where none is yet, readable by whoever may read the folder."""
    path.touch(exist_ok=False)
    try:
        save_file(tensors, path, metadata={"format": "pt"})
    except SafetensorError as error:  # no space left
        raise UserError(f"{path} cannot be written: {describe(error)}") from error
    path.chmod(0o666 & ~_umask())


def _umask() -> int:
    mask = os.umask(0)  # it can be read only by setting it
    os.umask(mask)
    return mask


def write_shards(folder: Path, tensors: Iterator[tuple[str, torch.Tensor]]) -> None:
    """Write a stream of tensors as numbered shards with an index; about one shard is held in memory."""
    shards: list[list[str]] = []  # the tensors' names in each shard that is written
    pending: dict[str, torch.Tensor] = {}  # the tensors of the shard to come
    pending_bytes = 0

    def flush():
        if pending:
            save_shard(pending, folder / f"{len(shards)}.partial")
            shards.append(list(pending))
            pending.clear()

    # Collect tensors, and write them whenever there are enough for a shard.
    for name, tensor in tensors:
        pending[name] = tensor
        pending_bytes += tensor.nbytes
        if pending_bytes >= SHARD_BYTES:
            flush()
            pending_bytes = 0
    flush()
    # A shard's final name holds the number of shards, which is known only now.
    weight_map = {}
    for index, names in enumerate(shards):
        final = shard_name(index + 1, len(shards))
        os.rename(folder / f"{index}.partial", folder / final)
        weight_map |= dict.fromkeys(names, final)
    write_index(folder, weight_map)


def write_index(folder: Path, weight_map: dict[str, str]) -> None:
    """Write the index of a folder's shards, given the shard of each tensor."""
    total_size = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    index = {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))}
    write_new(folder / SAFE_WEIGHTS_INDEX_NAME, json.dumps(index, indent=2) + "\n")


def other_files(checkpoint: Checkpoint, without: Iterable[str] = WRITTEN_ANEW) -> list[Path]:
    """List what else lies in a folder, by relative path: tokenizer, chat template, generation config, license, …

    Left out are weights that no index names, adapters, checkpoints of a training, and what is written anew: config, the
    code of this library, and `without`.

    Raises:
        UserError: a link leads out of the folder.
    """
    folder = checkpoint.folder
    paths = list(files_below(folder))
    # Leave out weights and whatever lies in an adapter's folder.
    adapters = {path.parent for path in paths if path.name == ADAPTER_CONFIG_NAME}
    written_anew = {folder / name for name in (CONFIG_NAME, *(path.name for path in code_files()), *without)}
    kept = []
    for path in paths:
        relative = path.relative_to(folder)
        is_weights = any(fnmatchcase(relative.as_posix().lower(), glob) for glob in WEIGHTS)
        if is_weights or not adapters.isdisjoint(path.parents):
            continue
        # Keep the rest. A link to a folder stays behind: its files are found where it leads, within the checkpoint.
        check_link(path, folder)
        if path not in written_anew and not path.is_dir():
            kept.append(relative)
    return kept


def copy_other_files(checkpoint: Checkpoint, folder: Path, without: Iterable[str] = WRITTEN_ANEW) -> None:
    """Copy what else lies in a checkpoint's folder, see `other_files`."""
    for path in other_files(checkpoint, without):
        copy_new(checkpoint.folder / path, folder / path)


def code_files() -> list[Path]:
    """List the files of `modeling_attnres` that travel with a checkpoint."""
    package = Path(modeling_attnres.__file__).parent
    return sorted(path for path in package.glob("*.py") if path.name != "__init__.py")


def differing_code(folder: Path, source: Path | None = None) -> list[str]:
    """Name the code files of a checkpoint that are missing, or neither this library's nor the same as in its source."""
    expected = {path.name: path for path in code_files()}
    present = {str(path.relative_to(folder)): path for path in files_below(folder) if path.suffix == ".py"}
    if source is not None:
        expected = {name: source / name for name in present} | expected

    def is_as_expected(name: str) -> bool:
        if name not in present or name not in expected or not expected[name].is_file():
            return False
        return filecmp.cmp(present[name], expected[name], shallow=False)

    return sorted(name for name in present.keys() | expected.keys() if not is_as_expected(name))


def add_card(
    folder: Path,
    target: Path,
    checkpoint: Checkpoint,
    source: str,
    made_by: str,
    verified: Verified | None = None,
    taken_over: dict[str, str] | None = None,
    **details: str,
) -> None:
    """Record how the checkpoint in `folder`, which becomes `target`, was made, and write its card.

    It was made from `checkpoint`, which was given as `source` and whose weight files are hashed. Those that were taken
    over, given from old to new name, are not hashed again.
    """
    # The source's weight files: those of a folder, or the one GGUF file
    path = expand_user(source)
    shards = hash_files([path] if path.is_file() else [checkpoint.folder / name for name in checkpoint.shards])
    # The checkpoint's own: those taken over have the hashes of the source's
    files = {new: shards[old] for old, new in (taken_over or {}).items() if old in shards}
    own = [file for file in folder.iterdir() if file.suffix in (".safetensors", ".py") and file.name not in files]
    is_hub_id = not path.exists()
    Provenance(
        made_by=made_by,
        source=source if is_hub_id else path.resolve().name,
        shards=shards,
        files=files | hash_files(sorted(own)),
        details=details,
        verified=verified,
        **of_card(checkpoint.folder) | ({"base_model": source} if is_hub_id else {}),
    ).write(folder)
    write_card(folder, name=target.resolve().name)
