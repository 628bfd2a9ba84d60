"""Fine-tuning on transformers' Trainer: LoRA by PEFT with the depth queries in full beside it, or all weights."""

import math
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Literal

import torch
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers import (
    BitsAndBytesConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    set_seed,
)

from modeling_attnres import is_depth_parameter

from .checkpoints import begin_run, checkpoint_to_resume, describe_run, hash_file, holding_output
from .data import Collator, read_rows
from .loading import TrainingError, load_attnres_config, load_tokenizer, load_weights
from .monitor import DepthMonitor, experts_of
from .options import Arguments, check_devices, check_trainer_options
from .pipeline import naming_lost_processes
from .pipeline_trainer import NO_PIPELINE, PipelineOptions, check_pipeline, choose_trainer, outline
from .pretrain import MODEL
from .trainer import DepthTrainer, save_results, telling_how_to_continue, train_and_evaluate


ADAPTER = "adapter"  # the folder that is there when a run is finished; MODEL where all weights were trained
MIXERS = ("self_attn", "linear_attn", "mamba")  # what attention, or what stands in its place, is called in a layer
PROBE = 128  # tokens of the first held-out row that the monitor reads depth weights of


@dataclass
class Tuning:
    """What of a model to train on what text; how long, how fast and where is said by `training.options.Arguments`."""

    model: str = field(metadata={"help": "A local folder or hub id of a model with Attention Residuals."})
    data: list[Path] = field(
        metadata={"help": "Files: .jsonl with 'text' or 'messages', any other is one text.", "action": "extend"}
    )
    lora: Literal["all-linear", "attention", "experts", "none", "full"] = field(
        default="all-linear",
        metadata={
            "help": "The modules that LoRA adapts; full: no LoRA, all weights are trained and a model is written."
        },
    )
    rank: int = field(default=16, metadata={"help": "LoRA's rank."})
    alpha: int = field(default=32, metadata={"help": "LoRA's alpha."})
    dora: bool = field(default=False, metadata={"help": "Use weight-decomposed LoRA (DoRA)."})
    rslora: bool = field(default=False, metadata={"help": "Scale LoRA by alpha / √rank."})
    length: int = field(default=512, metadata={"help": "The number of tokens per row, at most."})
    packed: bool = field(
        default=True, metadata={"help": "Whether several texts, which do not see each other, share a row."}
    )
    held_out: float = field(
        default=0.05, metadata={"help": "The share of tokens, the last ones, that measure the held-out loss."}
    )
    trust_remote_code: bool = field(
        default=False, metadata={"help": "Run the code of a tokenizer that lies beside the checkpoint."}
    )

    @property
    def is_full(self) -> bool:
        """Whether all weights are trained."""
        return self.lora == "full"


@dataclass
class Recipe(Tuning):
    """What to fine-tune, and its depth parameters."""

    _argument_group_name = "recipe"

    depth: bool | None = field(
        default=None,
        metadata={
            "help": "Train the depth parameters, in full. Neither this nor --no-depth: where the model has any.",
            "nargs": "?",
            "const": True,
        },
    )
    depth_lr: float = field(
        default=1e-4,
        metadata={"help": "The learning rate of the depth parameters; weight decay never applies to them."},
    )
    control: bool = field(default=False, metadata={"help": "Load the model with standard residuals, for comparison."})
    quantise: Literal["4bit", "8bit"] | None = field(
        default=None, metadata={"help": "Quantise the frozen weights (with bitsandbytes)."}
    )


def load_model(recipe: Recipe, config: PreTrainedConfig, dtype: torch.dtype) -> PreTrainedModel:
    """Load the model to be fine-tuned, with its frozen weights quantised if asked."""
    kwargs = {}
    if recipe.quantise is not None:
        kwargs["quantization_config"] = BitsAndBytesConfig(
            load_in_4bit=recipe.quantise == "4bit",
            load_in_8bit=recipe.quantise == "8bit",
            bnb_4bit_quant_type="nf4",
            bnb_4bit_compute_dtype=torch.bfloat16,
        )
    model = load_weights(recipe.model, config, dtype=dtype, **kwargs)
    model.config.use_cache = False
    return model


def lora_config(recipe: Tuning, model: PreTrainedModel, depth: bool = False) -> LoraConfig:
    """Say what PEFT trains of this model, its depth parameters included if `depth`."""
    # Modules are adapted by name; experts are one tensor per layer, which PEFT calls a parameter
    targets, parameters = {
        "all-linear": ("all-linear", None),
        "attention": (_linear_layers_of_attention(model), None),
        "experts": ([], _expert_parameters(model)),
        "none": (DUMMY_TARGET_MODULES, None),
    }[recipe.lora]
    return LoraConfig(
        task_type="CAUSAL_LM",
        r=recipe.rank,
        lora_alpha=recipe.alpha,
        target_modules=targets,
        target_parameters=parameters,
        modules_to_save=["attn_res"] if depth else None,
        use_dora=recipe.dora,
        use_rslora=recipe.rslora,
    )


def has_depth(recipe: Recipe, config: PreTrainedConfig) -> bool:
    """Tell whether depth parameters are trained.

    Raises:
        TrainingError: they are asked for, and there are none.
    """
    exists = not recipe.control and config.attn_res_mode != "none"
    if recipe.depth and not exists:
        raise TrainingError("--depth: a model with standard residuals has no depth parameters to train.")
    return exists if recipe.depth is None else recipe.depth


def _linear_layers_of_attention(model: PreTrainedModel) -> list[str]:
    linear = [name for name, module in model.named_modules() if isinstance(module, nn.Linear)]
    within = {(mixer, name.rsplit(".", 1)[-1]) for name in linear for mixer in MIXERS if f".{mixer}." in name}
    elsewhere = {name.rsplit(".", 1)[-1] for name in linear if not any(f".{mixer}." in name for mixer in MIXERS)}
    return sorted({f"{mixer}.{name}" if name in elsewhere else name for mixer, name in within})


def _expert_parameters(model: PreTrainedModel) -> list[str]:
    return sorted(
        {
            ".".join(name.rsplit(".", 3)[1:])
            for name, parameter in model.named_parameters()
            if ".experts." in name and parameter.ndim == 3
        }
    )


def check_tuning(recipe: Tuning, arguments: Arguments, config: PreTrainedConfig, depth: bool = False) -> None:
    """Refuse numbers out of range, and what a model of this config cannot be trained with; `depth`: its depth, too."""
    if not 0 < recipe.held_out < 1:
        raise TrainingError(f"--held-out must lie between 0 and 1, got {recipe.held_out}.")
    if recipe.length < 2:
        raise TrainingError(f"--length must be at least 2 tokens, got {recipe.length}.")
    for name, value in (
        ("--rank", recipe.rank),
        ("--alpha", recipe.alpha),
    ):
        if value < 1:
            raise TrainingError(f"{name} must be at least 1, got {value}.")
    for option, is_given in (("--dora", recipe.dora), ("--rslora", recipe.rslora)):
        if recipe.is_full and is_given:
            raise TrainingError(f"{option}: a kind of LoRA, and --lora full has none.")
    if recipe.lora == "none" and not depth:
        raise TrainingError("--lora none without depth parameters leaves nothing to train.")
    if recipe.lora == "experts" and recipe.dora:
        raise TrainingError("--dora: PEFT adapts experts by LoRA alone.")
    if recipe.lora == "experts" and not experts_of(outline(config)):
        raise TrainingError(f"--lora experts: {recipe.model} ({config.model_type}) has no experts.")
    check_trainer_options(arguments)
    if recipe.packed and "linear_attention" in getattr(config, "layer_types", []):
        raise TrainingError(
            f"--packed: the linear attention of {config.model_type} carries its state from one packed text into the "
            "next. Use --no-packed."
        )


def check_arguments(recipe: Recipe, arguments: Arguments, stages: PipelineOptions = NO_PIPELINE) -> PreTrainedConfig:
    """Refuse what cannot work before data is read; returns the model's config."""
    config = load_attnres_config(recipe.model)
    if recipe.control:
        config.attn_res_mode = "none"
    depth = has_depth(recipe, config)
    check_tuning(recipe, arguments, config, depth)
    if not 0 <= recipe.depth_lr < math.inf:
        raise TrainingError(f"--depth-lr must be 0 or more, got {recipe.depth_lr}.")
    if recipe.is_full and recipe.quantise is not None:
        raise TrainingError(f"--quantise {recipe.quantise}: quantised weights are frozen, and --lora full trains them.")
    if recipe.quantise is not None and stages.pipeline is not None:
        raise TrainingError(f"--quantise {recipe.quantise} does not go with --pipeline.")
    if depth and not recipe.is_full and arguments.fsdp and arguments.fsdp_config.get("activation_checkpointing"):
        raise TrainingError(
            "fsdp_config['activation_checkpointing']: accelerate would wrap the depth parameters that PEFT trains, and "
            "PEFT could not save them. Use --activation_checkpointing True."
        )
    check_devices(arguments)
    check_pipeline(stages, config, arguments)
    return config


def finetune_model(recipe: Recipe, arguments: Arguments, stages: PipelineOptions = NO_PIPELINE) -> dict:
    """Train, and write `adapter/` (or `model/`: all weights) and `result.json` to the output folder, together.

    Returns the result.

    Example:
        ```python
        from pathlib import Path

        from training.finetune import Recipe, finetune_model
        from training.options import Arguments

        recipe = Recipe(model="ported", data=[Path("LICENSE")], length=128)
        result = finetune_model(recipe, Arguments(output_dir="tuned", max_steps=3, learning_rate=2e-4))
        print(result["held_out_loss"])
        ```

    Raises:
        UserError: before a model is loaded, but for a file that cannot be written.
    """
    config = check_arguments(recipe, arguments, stages)
    with holding_output(arguments):
        return _finetune(recipe, arguments, stages, config)


def _finetune(recipe: Recipe, arguments: Arguments, stages: PipelineOptions, config: PreTrainedConfig) -> dict:
    output = Path(arguments.output_dir)
    target = new_target(output, MODEL if recipe.is_full else ADAPTER)

    # The data, which is read before anything is written
    tokenizer = load_tokenizer(recipe.model, recipe.trust_remote_code)
    rows, held_out_rows = rows_of(recipe, tokenizer, config)
    settings, decisive = settings_of(recipe)
    decisive |= {"depth": has_depth(recipe, config)} | stages.decisive
    run, resume = describe_run(settings | decisive, arguments), arguments.resume_from_checkpoint
    checkpoint = checkpoint_to_resume(output, resume, run)

    # The model and its trainer
    set_seed(arguments.seed)
    model = load_adapted_model(recipe, arguments, config)
    if not recipe.is_full:
        model.print_trainable_parameters()
    trainer = make_trainer(recipe, arguments, stages, model, tokenizer, rows, held_out_rows)
    del model  # in a pipeline no process keeps the whole one
    if arguments.should_save:
        begin_run(output, resume, run, checkpoint)

    # The result
    with telling_how_to_continue(trainer), naming_lost_processes():
        losses = train_and_evaluate(trainer, checkpoint)
        result = {
            "held_out_loss": losses,
            "steps": trainer.state.global_step,
            "rows": {"training": len(rows), "held_out": len(held_out_rows)},
            "recipe": settings | stages.decisive,
            "log": trainer.state.log_history,
        }
        trainer.model.config.use_cache = True  # which is off while training
        save_results(trainer, target, result, run, tokenizer if recipe.is_full else None)
    if arguments.should_save:
        before, after, steps = losses["before"], losses["after"], result["steps"]
        print(f"held-out loss: {before:.4f} before, {after:.4f} after {steps} steps; {target}")
    return result


def new_target(output: Path, name: str) -> Path:
    """Return the folder that a run is to write, unless one has been written.

    Raises:
        TrainingError: the run is finished.
    """
    for target in (output / ADAPTER, output / MODEL):
        if target.exists():
            raise TrainingError(f"{target} exists: this run is finished. Choose another --output.")
    return output / name


def rows_of(
    recipe: Tuning, tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig
) -> tuple[list[dict], list[dict]]:
    """Read the rows to train on, and those held out."""
    how = {"length": recipe.length, "packed": recipe.packed, "held_out": recipe.held_out}
    return read_rows(recipe.data, tokenizer, config.vocab_size, **how)


def settings_of(recipe: Tuning) -> tuple[dict, dict]:
    """Return the settings as they were given, and what decides of them, wherever model and data lie."""
    settings = asdict(recipe) | {"data": [str(path) for path in recipe.data]}
    return settings, {"model": identify(recipe.model), "data": [hash_file(path) for path in recipe.data]}


def identify(model: str) -> str:
    """Name a model the same from every folder."""
    folder = Path(model)
    return str(folder.resolve()) if folder.exists() else model


def load_adapted_model(recipe: Recipe, arguments: Arguments, config: PreTrainedConfig) -> PreTrainedModel | PeftModel:
    """Load the model with what is trained of it, by PEFT unless all weights are: those are fp32, under autocast."""
    frozen = torch.bfloat16 if arguments.bf16 and recipe.quantise is None else torch.float32
    base = load_model(recipe, config, torch.float32 if recipe.is_full else frozen)
    if recipe.is_full:
        for name, parameter in base.named_parameters():
            parameter.requires_grad_(has_depth(recipe, config) or not is_depth_parameter(name))
        return base
    if recipe.quantise is not None:
        base = prepare_model_for_kbit_training(base, arguments.activation_checkpointing)
    model = get_peft_model(base, lora_config(recipe, base, has_depth(recipe, config)))
    if arguments.activation_checkpointing and (arguments.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        model.enable_input_require_grads()
    return model


def make_trainer(
    recipe: Recipe,
    arguments: Arguments,
    stages: PipelineOptions,
    model: PreTrainedModel | PeftModel,
    tokenizer: PreTrainedTokenizerBase,
    rows: list[dict],
    held_out_rows: list[dict],
) -> DepthTrainer:
    """Make the trainer of a model, with a monitor where the model has depth attention."""
    config, monitors = model.config, []
    if config.attn_res_mode != "none":
        probe = torch.tensor([held_out_rows[0]["input_ids"][:PROBE]])
        monitors.append(DepthMonitor(probe, moves=has_depth(recipe, config)))
    trainer = choose_trainer(
        stages,
        model,
        arguments,
        monitors,
        data_collator=make_collator(tokenizer, config),
        train_dataset=rows,
        eval_dataset=held_out_rows,
        depth_lr=recipe.depth_lr,
    )
    if getattr(config, "output_router_logits", False):
        # Router losses are means over a batch. Trainer would add them up over the batches of a step, so here the loss
        # is the mean of the batches' means.
        trainer.model_accepts_loss_kwargs = False
    return trainer


def make_collator(tokenizer: PreTrainedTokenizerBase, config: PreTrainedConfig) -> Collator:
    """Make the collator: padding is not read, but must have an embedding."""
    padding = tokenizer.pad_token_id
    return Collator(padding if padding is not None and padding < config.vocab_size else 0)
