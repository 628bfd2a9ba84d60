"""The lossless port: a base checkpoint becomes an Attention Residuals checkpoint that computes the same.

No tensor is loaded or changed. The shards are taken over as files; one more shard holds the depth parameters (zero
queries, unit norms); the config gains the Attention Residuals fields, with `attn_res_scale_norm_eps` on in the paper's
form. Other forms start as losslessly, or are refused.
"""

import math
import shlex
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import torch
from huggingface_hub.constants import REPOCARD_NAME
from transformers import PreTrainedConfig

from common.errors import AnswerIsNo, UserError, describe
from common.files import check_target, complete_or_absent, take_over
from model_cards.blocks import describe_blocks, describe_form
from modeling_attnres import DepthAttention

from .checkpoint import Checkpoint, CheckpointError, is_known_lossless, model_class, open_source
from .export import drops_sources
from .verify import Verification, verify_checkpoints
from .writing import add_card, copy_other_files, numbered, other_files, write_port


@dataclass(frozen=True)
class Blocks:
    """How a port is divided: every sublayer a source (`mode="full"`), or blocks given by size or by number."""

    mode: str = "block"
    size: int | None = None
    number: int | None = None

    def __post_init__(self):
        if self.mode not in ("block", "full"):
            raise CheckpointError(f"The mode must be 'block' or 'full', got {self.mode!r}.")
        if self.mode == "full" and (self.size is not None or self.number is not None):
            raise CheckpointError("Full mode has no blocks: drop the block size or number, or choose mode 'block'.")
        if self.size is not None and self.number is not None:
            raise CheckpointError(
                f"Give the block size ({self.size}) or the number of blocks ({self.number}), not both."
            )

    def fields(self, num_layers: int) -> dict:
        """Return the config fields; with `number` exactly so many blocks, as even as they can be."""
        if self.mode == "full":
            return {"attn_res_mode": "full"}
        fields = {"attn_res_mode": "block", "attn_res_block_size": self.size}
        if self.number is None:
            return fields
        if not 1 <= self.number <= num_layers:
            raise CheckpointError(
                f"The number of blocks must lie between 1 and the {num_layers} layers, got {self.number}."
            )
        # A size will do where blocks of it, the last one smaller, are as many as asked for; else boundaries.
        size = math.ceil(num_layers / self.number)
        if math.ceil(num_layers / size) == self.number:
            return fields | {"attn_res_block_size": size}
        return fields | {"attn_res_block_boundaries": [i * num_layers // self.number for i in range(self.number)]}


@dataclass(frozen=True)
class Form:
    """The form of a port's depth attention: the config's `attn_res_…` fields of these names; the paper's by default."""

    form: str = "replace"
    heads: int = 1
    query: str = "learned"
    query_rank: int | None = None
    weights: str = "softmax"
    key_norm: bool = True
    window: int | None = None

    def fields(self) -> dict:
        """Return the config fields."""
        # the form "add" reads the stream as the base does, with the base's eps
        return {f"attn_res_{name}": value for name, value in asdict(self).items()} | {
            "attn_res_scale_norm_eps": self.form != "add"
        }


@dataclass(frozen=True)
class PortReport:
    """What a port did."""

    target: Path
    config: PreTrainedConfig
    parameters_added: int
    verification: Verification | None = None

    def __str__(self) -> str:
        verified = f"\n{self.verification}\n" if self.verification is not None else ""
        if self.verification is not None and not is_known_lossless(self.config):
            verified = f"\nverified, for its family is not among those tested to be lossless:{verified}"
        return (
            f"ported to  {self.target}\n"
            f"family     {self.config.model_type}\n"
            f"mode       {self.config.attn_res_mode}\n"
            f"blocks     {describe_blocks(self.config)}\n"
            f"form       {describe_form(self.config)}\n"
            f"parameters {self.parameters_added:,} added, for {self.config.attn_res_layout.num_sites} sites\n"
            f"card       {self.target / REPOCARD_NAME}\n"
            f"{verified}\n"
            f"try it:\n{try_command(self.target)}"
        )


def try_command(target: Path) -> str:
    """Return a shell command that loads the checkpoint as remote code and continues a sentence."""
    code = (
        "import sys; from transformers import pipeline; "
        'print(pipeline("text-generation", sys.argv[1], trust_remote_code=True)'
        '("The capital of France is", max_new_tokens=20)[0]["generated_text"])'
    )
    return f"python -c {shlex.quote(code)} {shlex.quote(str(target))}"


def port_checkpoint(
    source: str,
    target: Path,
    blocks: Blocks = Blocks(),
    link: bool = False,
    verify: bool = False,
    form: Form = Form(),
) -> PortReport:
    """Port a checkpoint: write one with depth attention that computes the same.

    Args:
        source: a local folder, a hub id or a GGUF file.
        target: a folder that does not exist or is empty. It appears when it is complete, or not at all.
        blocks: mode and blocks.
        link: hard-link the shards in place of copying them.
        verify: compare tensors, tokenizer and logits with the source's before the target appears. Done anyway for a
            family whose ports are not tested to be lossless.
        form: of depth attention; `Form("add")` ports families that the paper's form cannot take.

    Raises:
        UserError: the source, the target or the blocks cannot be used. The target has not been written.
        AnswerIsNo: the port does not compute what its source computes. The target has not been written.

    Example:
        from pathlib import Path
        from conversion.port import Blocks, port_checkpoint

        source = "demo/checkpoints/SmolLM2-135M-Instruct"  # or a hub id
        print(port_checkpoint(source, Path("ported"), Blocks(number=8)))
    """
    check_target(target, source)
    with complete_or_absent(target) as folder, open_source(source, folder) as checkpoint:
        # Write shards, config, code and what else lies in the source.
        config = check_portable(checkpoint, blocks, form)
        depth = depth_tensors(config, checkpoint.depth_prefix)
        write_port(checkpoint, folder, config, depth, partial(take_over, link=link))
        copy_other_files(checkpoint, folder)
        # Compare the port with its source.
        verification = None
        if verify or not is_known_lossless(config):
            try:
                verification = verify_checkpoints(checkpoint, Checkpoint(folder))
            except UserError as error:
                if isinstance(error.__cause__, AttributeError | TypeError):  # as in `check_fit`, when the model is run
                    raise checkpoint.not_portable(describe(error.__cause__)) from error
                raise
            if not verification.passed:
                raise AnswerIsNo(f"the port of {source} does not compute what it computes: {verification.in_one_line}")
        # Record how it was made.
        record = verification.record() if verification is not None else None
        taken_over = numbered(checkpoint.shards, len(checkpoint.shards) + 1)
        add_card(folder, target, checkpoint, source, "port", record, taken_over)
    return PortReport(target, config, sum(tensor.numel() for tensor in depth.values()), verification)


def check_portable(checkpoint: Checkpoint, blocks: Blocks, form: Form = Form()) -> PreTrainedConfig:
    """Return the config of the port, after all checks that need nothing written.

    Raises:
        UserError: says why there can be none.
    """
    config = attnres_config(checkpoint, blocks, form)
    checkpoint.check_fit(config)
    other_files(checkpoint)
    return config


def attnres_config(checkpoint: Checkpoint, blocks: Blocks, form: Form) -> PreTrainedConfig:
    """Return the config of the port: the source's, with the Attention Residuals fields."""
    if checkpoint.is_attnres:
        model_type = checkpoint.config["model_type"]
        raise CheckpointError(f"{checkpoint.folder} is an Attention Residuals checkpoint already ({model_type}).")
    config = checkpoint.read_config()
    try:
        for name, value in (blocks.fields(config.num_hidden_layers) | form.fields()).items():
            setattr(config, name, value)
        config.validate_attn_res()
    except (ValueError, TypeError) as error:
        raise CheckpointError(describe(error)) from error
    if form.form == "replace" and drops_sources(config):
        raise CheckpointError(
            f"A window of {form.window} hides sources from some sites, whose mean then is not that of all that came "
            "before: the port would not compute what its source does. The form 'add' goes with a window."
        )
    config.architectures = [model_class(type(config), checkpoint.has_head).__name__]
    config.auto_map = config.remote_code()
    return config


def depth_tensors(config: PreTrainedConfig, prefix: str) -> dict[str, torch.Tensor]:
    """Return the parameters of depth attention as they are at the start, in fp32, the same each time."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return {f"{prefix}{name}": tensor for name, tensor in DepthAttention.from_config(config).state_dict().items()}
