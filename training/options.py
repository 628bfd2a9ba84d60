"""Dataclasses as the options of a command: given one by one, or in a YAML or JSON file."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

import torch
import yaml
from torch import nn
from transformers import HfArgumentParser, Trainer, TrainingArguments, get_scheduler

from common.errors import reading
from common.files import check_file
from conversion.checkpoint import read_json

from .loading import TrainingError


REFUSED = {
    "bf16_full_eval": "it would round the weights that are saved",
    "fp16_full_eval": "it would round the weights that are saved",
    "save_only_model": "no run could go on from such checkpoints",
    "deepspeed": "not supported; --fsdp shards the model, the gradients and the optimiser's state",
}
COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")


@dataclass
class Arguments(TrainingArguments):
    """transformers' TrainingArguments with this project's defaults, written as `--output` and `--resume`, too."""

    _argument_group_name = "transformers' TrainingArguments"

    output_dir: str = field(metadata={"help": "Where the result and checkpoints are written.", "aliases": ["--output"]})
    resume_from_checkpoint: bool = field(
        default=False,
        metadata={"help": "Continue from the last complete checkpoint in the output folder.", "aliases": ["--resume"]},
    )
    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={"help": "Leave losses that are not finite out of the log. Training would not stop at one then."},
    )
    remove_unused_columns: bool = field(
        default=False, metadata={"help": "Leave out of a batch what the model's forward does not take."}
    )
    fsdp: bool = field(
        default=False, metadata={"help": "Shard the model over GPUs with FSDP2, which --fsdp_config tunes."}
    )
    dataloader_pin_memory: bool = field(
        default=torch.accelerator.is_available(), metadata={"help": "Pin batches in memory, for an accelerator."}
    )


class OptionParser(HfArgumentParser):
    """The options of a command. What is wrong with them is raised, where argparse would print them all and exit."""

    def __init__(self, *dataclasses: type, **kwargs):
        super().__init__(dataclasses, allow_abbrev=False, **kwargs)

    def error(self, message: str):
        raise ValueError(message)

    def parse(self, options: list[str]) -> tuple:
        """Make the dataclasses from options; a file of options may come first, and the options after it override it.

        Raises:
            UserError: the file cannot be read, an option is unknown or missing, or its value is wrong.
        """
        source = "the options"
        if options and Path(options[0]).suffix.lower() in (".yaml", ".yml", ".json"):
            file, *options = options
            source = f"{file}, with the options after it,"
            overridden = {underscored(part) for part in options if part.startswith("--")}
            in_file = {name: value for name, value in read_options(Path(file)).items() if name not in overridden}
            options = [*as_command(in_file), *options]
        with reading(source):  # whatever argparse and transformers find wrong with them
            *parsed, unknown = self.parse_args_into_dataclasses(
                options, return_remaining_strings=True, look_for_args_file=False
            )
            if unknown:
                self.error(f"unknown: {' '.join(unknown)}")
        return tuple(parsed)


def check_trainer_options(arguments: Arguments) -> None:
    """Refuse options that Trainer would check late, or fail on.

    Raises:
        UserError: names the option.
    """
    for name in COUNTS:
        if getattr(arguments, name) < 1:
            raise TrainingError(f"--{name} must be at least 1, got {getattr(arguments, name)}.")
    for name, reason in REFUSED.items():
        if getattr(arguments, name):
            raise TrainingError(f"--{name}: {reason}.")
    if arguments.resume_from_checkpoint and sampling_of(arguments) == "group_by_length":
        raise TrainingError(
            "--resume: with --train_sampling_strategy group_by_length rows would come in another order."
        )
    if arguments.metric_for_best_model not in (None, "loss", "eval_loss"):
        raise TrainingError(f"--metric_for_best_model {arguments.metric_for_best_model}: only 'loss' is measured.")
    with reading("an option of the optimiser"):  # as it checks them itself
        optimiser, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        made = optimiser([nn.Parameter(torch.zeros(1))], **settings)
    steps = arguments.max_steps if arguments.max_steps > 0 else 1000  # of so many epochs it is not known yet
    with reading(f"--lr_scheduler_type {arguments.lr_scheduler_type.value}"):
        get_scheduler(
            arguments.lr_scheduler_type,
            made,
            arguments.get_warmup_steps(steps),
            steps,
            scheduler_specific_kwargs=arguments.lr_scheduler_kwargs,
        )


def sampling_of(arguments: TrainingArguments) -> str:
    """Return in which order rows come, of which older releases have no choice."""
    return str(getattr(arguments, "train_sampling_strategy", "random"))


def check_devices(arguments: Arguments) -> None:
    """Refuse processes that would each train alone, and to shard where accelerate would not.

    Raises:
        TrainingError: on CPUs transformers takes each process for the only one, or there are only CPUs to shard over.
    """
    if (launched := int(os.environ.get("WORLD_SIZE", 1))) > arguments.world_size == 1:
        raise TrainingError(f"{launched} processes were launched, and each would train alone. On CPUs use --use-cpu.")
    if arguments.fsdp and arguments.device.type == "cpu":
        raise TrainingError("--fsdp: accelerate shards on accelerators only; on CPUs it would train with DDP unasked.")


def underscored(option: str) -> str:
    """Name an option by its field: `--depth-lr=0` is `depth_lr`."""
    return option.partition("=")[0].removeprefix("--").replace("-", "_")


def read_options(path: Path) -> dict[str, object]:
    """Read the options in a YAML or JSON file, by the names of their fields.

    Raises:
        UserError: it cannot be read, or holds anything else.
    """
    if path.suffix.lower() == ".json":
        options = read_json(path, unique_keys=True)
    else:
        check_file(path)
        with reading(path):
            options = yaml.safe_load(path.read_text(encoding="utf-8"))
    if not isinstance(options, dict):
        raise TrainingError(f"{path}: expected options as 'name: value', found {str(options)[:60]!r}.")
    return {underscored(str(name)): value for name, value in options.items()}


def as_command(options: dict[str, object]) -> Iterator[str]:
    """Write options as they are given on a command line, where argparse checks their types; null is not given."""
    for name, value in options.items():
        if isinstance(value, list):
            yield f"--{name}"
            yield from map(str, value)
        elif isinstance(value, dict):
            yield f"--{name}={json.dumps(value)}"
        elif value is not None:
            yield f"--{name}={value}"
