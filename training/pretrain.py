"""Training from random weights: the data tokenised once, the model with or without Attention Residuals, on Trainer."""

import json
import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedModel,
    default_data_collator,
    set_seed,
)

from .checkpoints import begin_run, checkpoint_to_resume, describe_run, holding_output
from .corpus import Corpus, prepare_corpus
from .loading import TrainingError, load_tokenizer, make_config
from .monitor import DepthMonitor, ExpertMonitor, Monitor, experts_of
from .options import Arguments, check_devices, check_trainer_options
from .pipeline import naming_lost_processes
from .pipeline_trainer import NO_PIPELINE, PipelineOptions, check_pipeline, choose_trainer, outline
from .scaling import describe_run as describe_for_scaling
from .trainer import DepthTrainer, save_results, telling_how_to_continue, train_and_evaluate


MODEL = "model"  # the folder that is there when a run is finished
TRAIN = "train"
POSITIONS = ("max_position_embeddings", "model_max_length")  # what a config calls the longest sequence
PROBE = 128  # tokens of the first held-out row that monitors read
SPECIAL = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class Pretraining:
    """What model to train on what; how long, how fast and where is said by `training.options.Arguments`."""

    _argument_group_name = "pre-training"

    config: str = field(
        metadata={
            "help": "A folder or hub id with the config.json of a model, with Attention Residuals or of a base family."
        }
    )
    data: list[str] = field(
        metadata={
            "help": "Files: .jsonl or .parquet with 'text', any other is one text. Or data sets of the hub.",
            "action": "extend",
        }
    )
    tokenizer: str | None = field(
        default=None,
        metadata={
            "help": f"A folder or hub id; '{TRAIN}': byte-level BPE of the config's vocab_size, trained on the data. "
            "Default: that of --config."
        },
    )
    mode: Literal["none", "block", "full"] | None = field(
        default=None,
        metadata={"help": "In place of the config's attn_res_mode; none: standard residuals, the baseline."},
    )
    fields: list[str] = field(
        default_factory=list,
        metadata={
            "help": "Other fields of the config, as NAME=VALUE: VALUE is JSON, or else a text.",
            "aliases": ["--set"],
            "action": "extend",
        },
    )
    length: int = field(default=512, metadata={"help": "The number of tokens per row."})
    held_out: float = field(
        default=0.01,
        metadata={"help": "The share of documents, every (1 / share)-th, rounded, that measure the held-out loss."},
    )
    shards: Path | None = field(
        default=None,
        metadata={"help": "Where the tokenised data lies, for other runs, too. Default: shards/ in the output folder."},
    )
    depth_lr_factor: float = field(
        default=1.0,
        metadata={"help": "The learning rate of the depth parameters, in learning rates. They have no weight decay."},
    )
    muon: bool = field(
        default=False,
        metadata={"help": "Train the matrices within layers with Muon, the rest with --optim, which must be AdamW."},
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code of a tokenizer that lies beside the config."}
    )


def read_fields(recipe: Pretraining) -> dict[str, object]:
    """Read what the config is to have in place of its own fields.

    Raises:
        TrainingError: one is not written as NAME=VALUE.
    """
    fields = {}
    for pair in recipe.fields:
        name, equals, value = pair.partition("=")
        if not equals:
            raise TrainingError(f"--set {pair}: expected NAME=VALUE.")
        try:
            fields[name] = json.loads(value)
        except json.JSONDecodeError:
            fields[name] = value
    return fields if recipe.mode is None else fields | {"attn_res_mode": recipe.mode}


def check_arguments(
    recipe: Pretraining, arguments: Arguments, stages: PipelineOptions = NO_PIPELINE
) -> PreTrainedConfig:
    """Refuse what cannot work before data is read; returns the model's config."""
    config = make_config(recipe.config, read_fields(recipe))
    if not 0 < recipe.held_out <= 0.5:
        raise TrainingError(f"--held-out must lie between 0 and 0.5, got {recipe.held_out}.")
    if recipe.length < 2:
        raise TrainingError(f"--length must be at least 2 tokens, got {recipe.length}.")
    for name in POSITIONS:
        if recipe.length > getattr(config, name, math.inf):
            raise TrainingError(f"--length {recipe.length}: the model has {getattr(config, name)} positions ({name}).")
    if not 0 <= recipe.depth_lr_factor < math.inf:
        raise TrainingError(f"--depth-lr-factor must be 0 or more, got {recipe.depth_lr_factor}.")
    if recipe.muon and arguments.optim not in ("adamw_torch", "adamw_torch_fused"):
        raise TrainingError(f"--muon goes with --optim adamw_torch or adamw_torch_fused, got {arguments.optim.value}.")
    check_trainer_options(arguments)
    if recipe.muon and arguments.fsdp and experts_of(outline(config)):
        raise TrainingError("--muon does not go with --fsdp for a mixture of experts: sharded experts are no matrices.")
    check_devices(arguments)
    check_pipeline(stages, config, arguments)
    return config


def pretrain_model(recipe: Pretraining, arguments: Arguments, stages: PipelineOptions = NO_PIPELINE) -> dict:
    """Train from random weights, and write `model/` and `result.json` to the output folder; returns the result.

    Example:
        ```python
        from training.options import Arguments
        from training.pretrain import Pretraining, pretrain_model

        recipe = Pretraining(config="demo/tiny", data=["LICENSE", "README.md"], tokenizer="train", held_out=0.5)
        result = pretrain_model(recipe, Arguments(output_dir="trained", max_steps=3, learning_rate=1e-3))
        print(result["held_out_loss"])
        ```

    Raises:
        UserError: before a model is made, but for a file that cannot be written.
    """
    config = check_arguments(recipe, arguments, stages)
    with holding_output(arguments):
        return _pretrain(recipe, arguments, stages, config)


def _pretrain(recipe: Pretraining, arguments: Arguments, stages: PipelineOptions, config: PreTrainedConfig) -> dict:
    output = Path(arguments.output_dir)
    if (output / MODEL).exists():
        raise TrainingError(f"{output / MODEL} exists: this run is finished. Choose another --output.")

    # The data, which one process tokenises
    with arguments.main_process_first(local=False, desc="tokenising"):
        corpus = open_corpus(recipe, output, config)
    rows, held_out_rows = (corpus.rows(part, recipe.length) for part in ("training", "held_out"))
    set_special_tokens(config, corpus.tokenizer)
    settings = asdict(recipe) | {"shards": str(corpus.folder)}
    decisive = {name: settings[name] for name in ("length", "depth_lr_factor", "muon")} | corpus.source
    decisive |= stages.decisive
    run, resume = describe_run(config.to_dict() | decisive, arguments), arguments.resume_from_checkpoint
    checkpoint = checkpoint_to_resume(output, resume, run)

    # The model and its trainer
    model = make_model(config, arguments.seed)
    probe = torch.from_numpy(held_out_rows[0]["input_ids"])[None, :PROBE]
    trainer = choose_trainer(
        stages,
        model,
        arguments,
        monitors_of(model, probe),
        data_collator=default_data_collator,
        train_dataset=rows,
        eval_dataset=held_out_rows,
        depth_lr=recipe.depth_lr_factor * arguments.learning_rate,
        muon=recipe.muon,
    )
    if stages.pipeline is not None:  # no process keeps the whole model; this is for what is counted
        model = outline(config)
    # Rows are equally long: the mean of batches' means, which experts' router losses go with, is that over all tokens
    # (but where a step accumulates an epoch's last, shorter batch, whose rows count for more)
    trainer.model_accepts_loss_kwargs = False
    if arguments.should_save:
        begin_run(output, resume, run, checkpoint)

    # The result
    with telling_how_to_continue(trainer), naming_lost_processes():
        losses = train_and_evaluate(trainer, checkpoint)
        result = {
            "held_out_loss": losses,
            "steps": trainer.state.global_step,
            "parameters": model.num_parameters(),
            "run": describe_for_scaling(model, recipe.length, count_tokens(trainer), arguments.seed, losses["after"]),
            "rows": {"training": len(rows), "held_out": len(held_out_rows)},
            "recipe": settings | stages.decisive,
            "log": trainer.state.log_history,
        }
        trainer.model.config.use_cache = True  # which Trainer turns off
        save_results(trainer, output / MODEL, result, run, corpus.tokenizer)
    if arguments.should_save:
        before, after, steps = losses["before"], losses["after"], result["steps"]
        print(f"held-out loss: {before:.4f} before, {after:.4f} after {steps} steps; {output / MODEL}")
    return result


def prepare_run(recipe: Pretraining, arguments: Arguments, stages: PipelineOptions = NO_PIPELINE) -> None:
    """Refuse what cannot work before a run starts, and tokenise the data if other runs share it.

    Raises:
        UserError: as `pretrain_model`.
    """
    config = check_arguments(recipe, arguments, stages)
    if recipe.shards is not None:
        corpus = open_corpus(recipe, Path(arguments.output_dir), config)
        for part in ("training", "held_out"):
            corpus.rows(part, recipe.length)


def count_tokens(trainer: DepthTrainer) -> int:
    """Count the tokens of all batches, every one as if it were full."""
    return trainer.state.global_step * trainer.get_total_train_batch_size(trainer.args) * trainer.train_dataset.length


def open_corpus(recipe: Pretraining, output: Path, config: PreTrainedConfig) -> Corpus:
    """Tokenise the data, unless that has been done."""
    tokenizer = None
    if recipe.tokenizer != TRAIN:
        tokenizer = load_tokenizer(recipe.tokenizer or recipe.config, recipe.trust_remote_code)
    folder = recipe.shards or output / "shards"
    return prepare_corpus(recipe.data, folder, tokenizer, vocab_size=config.vocab_size, held_out=recipe.held_out)


def set_special_tokens(config: PreTrainedConfig, tokenizer) -> None:
    """Have a config name its tokenizer's special tokens; padding that is the end, too, would not be learned."""
    for name in SPECIAL:
        setattr(config, name, getattr(tokenizer, name))
    if config.pad_token_id == config.eos_token_id:
        config.pad_token_id = None


def make_model(config: PreTrainedConfig, seed: int) -> PreTrainedModel:
    """Make a model with random weights: a seed gives all modes the same, as far as they have the same parameters."""
    residual = {name: value for name, value in config.to_dict().items() if not name.startswith("attn_res_")}
    baseline = AutoConfig.for_model(**residual | {"attn_res_mode": "none"})
    set_seed(seed)
    model = AutoModelForCausalLM.from_config(baseline, dtype=torch.float32)
    if config.attn_res_mode == "none":
        return model
    weights = model.state_dict()
    model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.load_state_dict(weights, strict=False)
    return model


def monitors_of(model: PreTrainedModel, probe: torch.Tensor) -> list[Monitor]:
    """Make the monitors of what a model has: depth attention, experts."""
    monitors = [DepthMonitor(probe)] if model.config.attn_res_mode != "none" else []
    return [*monitors, ExpertMonitor(probe)] if experts_of(model) else monitors
