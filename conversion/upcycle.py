"""Sparse upcycling: a dense Llama becomes a Mixtral whose experts start as copies of the MLP, with depth attention.

Mixtral's router weights sum to one, so experts that are all the same MLP compute that MLP, whatever the router says.
It is written one output shard at a time; to measure what noise changed, source and result are then loaded in turn.
"""

import json
import math
import re
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from tqdm import tqdm
from transformers import MixtralConfig
from transformers.tokenization_utils_base import TOKENIZER_CONFIG_FILE

from common.files import check_space, check_target, complete_or_absent, move, write_new

from .checkpoint import CONFIG_NAME, Checkpoint, CheckpointError, open_source, read_json
from .port import Blocks, Form, PortReport, check_portable, depth_tensors
from .verify import load_tokenizer, relative_difference
from .writing import WRITTEN_ANEW, add_card, copy_other_files, write_port, write_shards


MLP_TENSOR = re.compile(r"(?P<layer>.*layers\.\d+\.)mlp\.(?P<part>gate_proj|up_proj|down_proj)\.weight$")
PUBLISHED_NAME = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
CARRIED_FIELDS = (
    *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads"),
    *("num_key_value_heads", "head_dim", "hidden_act", "max_position_embeddings", "initializer_range", "rms_norm_eps"),
    *("use_cache", "pad_token_id", "bos_token_id", "eos_token_id", "tie_word_embeddings", "attention_dropout"),
    *("rope_parameters", "dtype"),
)


@dataclass(frozen=True)
class UpcycleReport:
    """What an upcycling did."""

    port: PortReport
    experts: int
    top_k: int
    expert_noise: float
    logit_change: float

    def __str__(self) -> str:
        noise = f"noise of {self.expert_noise:g} standard deviations" if self.expert_noise else "no noise"
        return (
            f"experts    {self.experts}, top {self.top_k}, copies of the MLP with {noise}\n"
            f"logits     changed by {self.logit_change:.1e} (relative) against the source\n{self.port}"
        )


def upcycle_checkpoint(
    source: str,
    target: Path,
    experts: int,
    top_k: int,
    blocks: Blocks = Blocks(),  # noqa: B008 (it is frozen)
    expert_noise: float = 0.0,
    seed: int = 0,
    form: Form = Form(),  # noqa: B008
) -> UpcycleReport:
    """Write a Llama checkpoint as a Mixtral whose experts are copies of its MLPs, with depth attention.

    Args:
        source: a local folder, a hub id or a GGUF file.
        target: a folder that does not exist or is empty.
        experts: the number of experts per layer.
        top_k: the number of experts per token.
        blocks: mode and blocks of depth attention.
        expert_noise: standard deviation of noise added to each expert, in units of its weight's own; 0 changes nothing
            and leaves it to the router to break the symmetry.
        seed: of the routers and the noise.
        form: of depth attention.

    Raises:
        UserError: the source is no plain Llama checkpoint, or a number is out of range.

    Example:
        from pathlib import Path
        from conversion.upcycle import upcycle_checkpoint

        source = "demo/checkpoints/SmolLM2-135M-Instruct"  # or a hub id
        print(upcycle_checkpoint(source, Path("upcycled"), experts=4, top_k=2))
    """
    if not 1 <= top_k <= experts:
        raise CheckpointError(f"top-k must lie between 1 and the {experts} experts, got {top_k}.")
    if not 0 <= expert_noise < math.inf:
        raise CheckpointError(f"The expert noise must be finite and not negative, got {expert_noise}.")
    if not 0 <= seed < 2**63:
        raise CheckpointError(f"The seed must lie between 0 and {2**63 - 1}, got {seed}.")
    check_target(target, source)
    with complete_or_absent(target) as folder, open_source(source, folder) as checkpoint:
        # Check all that can be checked before tensors are written.
        config = mixtral_config(checkpoint, experts, top_k)
        check_portable(checkpoint, blocks, form)
        check_space(folder, experts * mlp_bytes(checkpoint))
        # Write a Mixtral beside the target, and port it by moving its shards.
        with tempfile.TemporaryDirectory(prefix=".base-", dir=folder) as base:
            tensors = mixtral_tensors(checkpoint, config, expert_noise, torch.Generator().manual_seed(seed))
            write_shards(Path(base), tensors)
            write_new(Path(base) / CONFIG_NAME, config.to_json_string())
            upcycled = Checkpoint(Path(base))
            attnres = check_portable(upcycled, blocks, form)
            depth = depth_tensors(attnres, upcycled.depth_prefix)
            write_port(upcycled, folder, attnres, depth, move)
        # Add the source's other files, measure what noise has changed, and record how it was made.
        copy_other_files(checkpoint, folder, (*WRITTEN_ANEW, TOKENIZER_CONFIG_FILE))
        write_tokenizer_config(checkpoint.folder, folder)
        change = relative_difference(checkpoint, Checkpoint(folder))
        made = {
            "with experts": f"{experts}, {top_k} of them a token",
            "noise": f"{expert_noise:g}",
            "seed": f"{seed}",
        }
        add_card(folder, target, checkpoint, source, "upcycle", **made)
    added = sum(tensor.numel() for tensor in depth.values())
    return UpcycleReport(PortReport(target, attnres, added), experts, top_k, expert_noise, change)


def mlp_bytes(checkpoint: Checkpoint) -> int:
    """Return the size of the MLPs, of which every expert is a copy."""
    sizes = {name: math.prod(shape) * _bits(dtype) // 8 for name, (shape, dtype) in checkpoint.describe().items()}
    return sum(size for name, size in sizes.items() if MLP_TENSOR.match(name))


def _bits(dtype: str) -> int:
    """Return the bits of a number, by how safetensors names its type: F32, BF16, F8_E4M3, …"""
    return int(re.search(r"\d+|$", dtype)[0] or 8)


def mixtral_config(checkpoint: Checkpoint, experts: int, top_k: int) -> MixtralConfig:
    """Return the Mixtral config of an upcycled Llama."""
    if checkpoint.config["model_type"] != "llama":
        raise CheckpointError(
            f"{checkpoint.folder}: only 'llama' is upcycled, not {checkpoint.config['model_type']!r}."
        )
    if checkpoint.quantisation is not None:
        raise CheckpointError(f"{checkpoint.folder} is quantised; upcycle the checkpoint it was made from.")
    llama = checkpoint.read_config()
    for field in ("attention_bias", "mlp_bias"):
        if getattr(llama, field):
            raise CheckpointError(f"{checkpoint.folder / CONFIG_NAME}: {field} is true, but Mixtral has no biases.")
    fields = {name: getattr(llama, name) for name in CARRIED_FIELDS}
    config = MixtralConfig(**fields, num_local_experts=experts, num_experts_per_tok=top_k, sliding_window=None)
    config.architectures = ["MixtralForCausalLM" if checkpoint.has_head else "MixtralModel"]
    return config


def mixtral_tensors(
    checkpoint: Checkpoint, config: MixtralConfig, expert_noise: float, generator: torch.Generator
) -> Iterator[tuple[str, torch.Tensor]]:
    """Yield the tensors in Mixtral's published layout, one by one."""
    with checkpoint.open_tensors() as read:
        for name in tqdm(checkpoint.weight_map, desc="upcycling", unit="tensor"):
            tensor, match = read(name), MLP_TENSOR.match(name)
            if match is None:
                yield name, tensor
                continue
            # Each MLP matrix becomes one per expert; the first of a layer brings its router along.
            moe = f"{match['layer']}block_sparse_moe."
            for expert in range(config.num_local_experts):
                noisy = with_noise(tensor, expert_noise, generator)
                yield f"{moe}experts.{expert}.{PUBLISHED_NAME[match['part']]}.weight", noisy
            if match["part"] == "gate_proj":
                router = torch.randn(config.num_local_experts, config.hidden_size, generator=generator)
                yield f"{moe}gate.weight", (router * config.initializer_range).to(tensor.dtype)


def with_noise(tensor: torch.Tensor, scale: float, generator: torch.Generator) -> torch.Tensor:
    """Return a copy with noise of `scale` standard deviations of the tensor's values."""
    if scale == 0:
        return tensor.clone()
    noise = torch.randn(tensor.shape, generator=generator)
    return (tensor.float() + noise * (scale * tensor.float().std())).to(tensor.dtype)


def write_tokenizer_config(source: Path, target: Path) -> None:
    """Write the tokenizer's settings with its class, which AutoTokenizer may else choose by the family, now another."""
    tokenizer, file = load_tokenizer(source), source / TOKENIZER_CONFIG_FILE
    settings = read_json(file) if file.exists() else {}
    if tokenizer is not None:
        settings["tokenizer_class"] = type(tokenizer).__name__
    if settings:
        write_new(target / TOKENIZER_CONFIG_FILE, json.dumps(settings, indent=2, ensure_ascii=False) + "\n")
