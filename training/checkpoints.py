"""What a run leaves in its output folder to go on from: its recipe, and checkpoints that are marked when complete."""

import contextlib
import hashlib
import json
import math
import shutil
from collections.abc import Iterator
from pathlib import Path

from safetensors import SafetensorError
from transformers import TrainingArguments
from transformers.trainer import TRAINER_STATE_NAME

from common.errors import describe
from common.files import hold_folder, whole_file
from conversion.checkpoint import read_json

from .loading import TrainingError


COMPLETE = "complete"  # the file that a checkpoint gets last
RECIPE = "recipe.json"
MATTER = (
    *("seed", "data_seed", "world_size", "n_gpu", "per_device_train_batch_size", "gradient_accumulation_steps"),
    *("train_sampling_strategy", "dataloader_drop_last", "ignore_data_skip", "accelerator_config"),
    *("max_steps", "num_train_epochs", "learning_rate", "lr_scheduler_type", "lr_scheduler_kwargs", "warmup_steps"),
    *("optim", "optim_args", "weight_decay", "adam_beta1", "adam_beta2", "adam_epsilon", "max_grad_norm"),
    *("label_smoothing_factor", "neftune_noise_alpha", "bf16", "fp16", "average_tokens_across_devices"),
)  # of TrainingArguments: what a run learns depends on them


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Make of what safetensors and torch raise where a file cannot be written, as on a full disk, an `OSError`."""
    try:
        yield
    except (SafetensorError, RuntimeError) as error:
        raise OSError(f"{path} cannot be written: {describe(error)}") from error


@contextlib.contextmanager
def holding_output(arguments: TrainingArguments) -> Iterator[None]:
    """Hold the output folder alone of all runs, in the process that writes.

    Raises:
        UserError: another run holds it.
    """
    with contextlib.ExitStack() as stack:
        if arguments.should_save:
            busy = "another process trains there. Choose another --output."
            stack.enter_context(hold_folder(Path(arguments.output_dir), busy))
        yield


def describe_run(recipe: dict, arguments: TrainingArguments) -> dict:
    """Gather all that decides what a run learns, as JSON has it."""
    run = recipe | {name: getattr(arguments, name, None) for name in MATTER}  # releases differ in what they have
    return json.loads(json.dumps(run, default=str))


def finite_or_null(content: object) -> object:
    """Replace what JSON has no number for, infinity and NaN, by null."""
    if isinstance(content, dict):
        return {name: finite_or_null(value) for name, value in content.items()}
    if isinstance(content, list | tuple):
        return [finite_or_null(value) for value in content]
    return None if isinstance(content, float) and not math.isfinite(content) else content


def hash_file(path: str | Path) -> str:
    """Compute the SHA-256 of a file."""
    with open(path, "rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def all_checkpoints(output: Path) -> list[Path]:
    """List the checkpoints in a folder in order, complete or not."""
    steps = {path: path.name.removeprefix("checkpoint-") for path in output.glob("checkpoint-*")}
    return sorted((path for path in steps if steps[path].isdecimal()), key=lambda path: int(steps[path]))


def last_complete_checkpoint(output: Path) -> Path | None:
    """Find the newest checkpoint that was written to its end; what a kill left half done is not considered."""
    return next((path for path in reversed(all_checkpoints(output)) if (path / COMPLETE).exists()), None)


def checkpoint_to_resume(output: Path, resume: bool, run: dict) -> Path | None:
    """Find where a run continues; `None`: it starts. Writes nothing.

    Args:
        output: the folder of the run.
        resume: whether to continue if that is possible.
        run: what decides what it learns.

    Raises:
        TrainingError: there is a checkpoint and no `resume`, or one of another run.
    """
    checkpoint, recipe, begun = last_complete_checkpoint(output), output / RECIPE, all_checkpoints(output)
    if begun and not recipe.exists():
        raise TrainingError(f"{output} holds {begun[0].name} of something else: no {RECIPE}. Choose another --output.")
    if checkpoint is None:
        return None
    if not resume:
        raise TrainingError(f"{output} holds checkpoints. Continue with --resume, or choose another --output.")
    read_json(checkpoint / TRAINER_STATE_NAME)  # which Trainer takes to be whole
    before = read_json(recipe)
    for field, value in run.items():
        if before.get(field) != value:
            raise TrainingError(
                f"--resume: {field} is {value!r}, expected {before.get(field)!r} as {recipe} has it. Give that, or "
                "start anew in another --output."
            )
    return checkpoint


def begin_run(output: Path, resume: bool, run: dict, checkpoint: Path | None) -> None:
    """Remove what a kill left half done, write the recipe of a run that starts, and say where a run begins.

    Of several processes the one that writes calls this, when nothing is left that could be refused.
    """
    begun = all_checkpoints(output)
    for leftover in begun:
        if not (leftover / COMPLETE).exists():
            shutil.rmtree(leftover)
    if checkpoint is not None:
        print(f"{output}: continuing from {checkpoint.name}")
        return
    if begun or resume:
        print(f"{output}: no checkpoint is complete, starting anew")
    with whole_file(output / RECIPE) as file:
        file.write_text(json.dumps(run, indent=1) + "\n")
