"""The lossless port: a base checkpoint becomes an Attention Residuals checkpoint that computes the same.

No tensor is loaded or changed. The shards are taken over as files; one more shard holds the depth parameters (zero
queries, unit norms); the config gains the Attention Residuals fields, with `attn_res_scale_norm_eps` on.
"""

import json
import shutil
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors.torch import save
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

import modeling_attnres
from modeling_attnres.modeling_attnres import FAMILIES

from .checkpoint import CONFIG_NAME, OTHER_WEIGHTS, Checkpoint, CheckpointError, open_source
from .files import check_target, complete_or_absent, take_over


@dataclass(frozen=True)
class PortReport:
    """What a port did."""

    target: Path
    config: modeling_attnres.AttnResLlamaConfig  # of whichever family
    parameters_added: int

    def __str__(self) -> str:
        config = self.config
        if config.attn_res_mode == "full":
            blocks = f"{2 * config.num_hidden_layers} sublayers, each a source of its own"
        else:
            starts = config.attn_res_block_starts
            ends = (*starts[1:], config.num_hidden_layers)
            layers = ", ".join(f"{a}-{b - 1}" if b - a > 1 else f"{a}" for a, b in zip(starts, ends))
            blocks = f"{len(starts)} (decoder layers {layers})"
        return (
            f"ported to  {self.target}\n"
            f"family     {config.model_type}\n"
            f"mode       {config.attn_res_mode}\n"
            f"blocks     {blocks}\n"
            f"parameters {self.parameters_added:,} added: a zero query and a unit norm for each of "
            f"{2 * config.num_hidden_layers + 1} sites\n\n"
            f"try it:\n{try_command(self.target)}"
        )


def try_command(target: Path) -> str:
    """A shell command that loads the checkpoint as remote code and continues a sentence."""
    return (
        'python -c "from transformers import pipeline; '
        f"print(pipeline('text-generation', '{target}', trust_remote_code=True)"
        "('The capital of France is', max_new_tokens=20)[0]['generated_text'])\""
    )


def block_fields(num_layers: int, block_size: int | None, num_blocks: int | None) -> dict:
    """The config fields for blocks given by size or by number; exactly `num_blocks` blocks, as even as they can be."""
    if block_size is not None and num_blocks is not None:
        raise CheckpointError(f"Give the block size ({block_size}) or the number of blocks ({num_blocks}), not both.")
    if num_blocks is None:
        return {"attn_res_block_size": block_size}
    if not 1 <= num_blocks <= num_layers:
        raise CheckpointError(f"The number of blocks must lie between 1 and the {num_layers} layers, got {num_blocks}.")
    size = -(-num_layers // num_blocks)
    if -(-num_layers // size) == num_blocks:
        return {"attn_res_block_size": size}
    return {"attn_res_block_boundaries": [index * num_layers // num_blocks for index in range(num_blocks)]}


def port(
    source: str,
    target: Path,
    mode: str = "block",
    block_size: int | None = None,
    num_blocks: int | None = None,
    link: bool = False,
) -> PortReport:
    """Port a checkpoint.

    Args:
        source: a local folder, a hub id or a GGUF file.
        target: a folder that does not exist or is empty. It appears when it is complete, or not at all.
        mode: `"block"` or `"full"`.
        block_size: decoder layers a block.
        num_blocks: the number of blocks, in place of their size.
        link: hard-link the shards in place of copying them.

    Raises:
        CheckpointError: the source, the target or the blocks cannot be used. Nothing has been written.
    """
    if mode not in ("block", "full"):
        raise CheckpointError(f"The mode must be 'block' or 'full', got {mode!r}.")
    if mode == "full" and (block_size is not None or num_blocks is not None):
        raise CheckpointError("Full mode has no blocks: drop the block size or number, or choose mode 'block'.")
    check_target(target, source)
    with open_source(source) as checkpoint:
        config = attnres_config(checkpoint, mode, block_size, num_blocks)
        checkpoint.check_fit(config)
        with complete_or_absent(target) as folder:
            added = write_port(checkpoint, config, folder, link)
    return PortReport(target, config, added)


def attnres_config(checkpoint: Checkpoint, mode: str, block_size: int | None, num_blocks: int | None):
    """The config of the port: the source's, with the Attention Residuals fields."""
    try:
        config = checkpoint.config_class.from_pretrained(checkpoint.folder)
        fields = {"attn_res_mode": mode, "attn_res_scale_norm_eps": True}
        if mode == "block":
            fields |= block_fields(config.num_hidden_layers, block_size, num_blocks)
        for name, value in fields.items():
            setattr(config, name, value)
        config.validate_attn_res()
    except (ValueError, TypeError) as error:
        raise CheckpointError(str(error)) from error
    config.architectures = [FAMILIES[type(config)][checkpoint.has_head].__name__]
    config.auto_map = config.remote_code()
    return config


def write_port(checkpoint: Checkpoint, config, folder: Path, link: bool) -> int:
    """Write the ported checkpoint into `folder`; returns the number of parameters added."""
    # The depth shard is the last, and all are named as transformers does, so that saving over them tidies up.
    count = len(checkpoint.shards) + 1
    names = {old: shard_name(index, count) for index, old in enumerate(checkpoint.shards, start=1)}
    take_over({checkpoint.folder / old: folder / new for old, new in names.items()}, link)

    prefix = "model." if checkpoint.has_head else ""
    depth = depth_tensors(config.num_hidden_layers, config.hidden_size, prefix)
    (folder / shard_name(count, count)).write_bytes(save(depth, metadata={"format": "pt"}))
    weight_map = {tensor: names[old] for tensor, old in checkpoint.weight_map.items()}
    weight_map |= dict.fromkeys(depth, shard_name(count, count))
    total_size = sum((folder / name).stat().st_size for name in set(weight_map.values()))
    write_json(
        folder / SAFE_WEIGHTS_INDEX_NAME,
        {"metadata": {"total_size": total_size}, "weight_map": dict(sorted(weight_map.items()))},
    )

    copy_other_files(checkpoint, folder)
    config.to_json_file(folder / CONFIG_NAME)
    copy_code(folder)
    return sum(tensor.numel() for tensor in depth.values())


def shard_name(index: int, count: int) -> str:
    return f"model-{index:05d}-of-{count:05d}.safetensors"


def depth_tensors(num_layers: int, hidden_size: int, prefix: str) -> dict[str, torch.Tensor]:
    """Zero queries and unit norms under their names on disk, in fp32."""
    sites = [f"layers.{layer}.{name}" for layer in range(num_layers) for name in ("self_attention_res", "mlp_res")]
    tensors = {}
    for site in [*sites, "output_attn_res"]:
        tensors[f"{prefix}{site}_proj.weight"] = torch.zeros(1, hidden_size)
        tensors[f"{prefix}{site}_norm.weight"] = torch.ones(hidden_size)
    return tensors


def copy_other_files(checkpoint: Checkpoint, folder: Path) -> None:
    """Keep what else lies in the source: tokenizer, chat template, generation config, license, …; no other weights."""
    written_anew = {CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME, *checkpoint.shards}
    for path in sorted(checkpoint.folder.iterdir()):
        if path.name in written_anew or path.name.startswith(".") or any(path.match(glob) for glob in OTHER_WEIGHTS):
            continue
        if path.is_dir():
            shutil.copytree(path, folder / path.name, ignore=shutil.ignore_patterns(*OTHER_WEIGHTS))
        else:
            shutil.copyfile(path, folder / path.name)


def copy_code(folder: Path) -> None:
    """Write the files of `modeling_attnres` that travel with a checkpoint."""
    package = Path(modeling_attnres.__file__).parent
    for path in sorted(package.glob("*.py")):
        if path.name != "__init__.py":
            shutil.copyfile(path, folder / path.name)


def write_json(path: Path, content: dict) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
