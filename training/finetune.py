"""Fine-tuning: PEFT on top of transformers' Trainer, the depth queries trained in full beside LoRA."""

import contextlib
import json
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, get_peft_model, prepare_model_for_kbit_training
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import BitsAndBytesConfig, PreTrainedConfig, PreTrainedModel, Trainer, TrainingArguments, set_seed
from transformers.trainer_utils import rotate_checkpoints

from common.errors import describe, reading
from common.files import complete_or_absent, whole_file
from modeling_attnres import is_depth_parameter

from .checkpoints import (
    COMPLETE,
    RECIPE,
    checkpoint_to_resume,
    claimed,
    describe_run,
    last_complete_checkpoint,
    writing,
)
from .data import IGNORED, Collator, DataError, hold_out, make_rows, read_documents
from .loading import TrainingError, load_attnres_config, load_tokenizer, load_weights
from .monitor import DepthMonitor


COUNTS = ("per_device_train_batch_size", "per_device_eval_batch_size", "gradient_accumulation_steps")
MIXERS = ("self_attn", "linear_attn", "mamba")  # what attention, or what stands in its place, is called in a layer


@dataclass
class Recipe:
    """What to train on what; how long, how fast and where is said by transformers' `TrainingArguments`.

    Args:
        model: a local folder or hub id of a model with Attention Residuals.
        data: files, see `training.data`.
        lora: `"all-linear"`, `"attention"`, `"experts"` or `"none"`.
        depth: train the depth parameters in full; `None`: where the model has any.
        depth_lr: their learning rate; weight decay never applies to them.
        control: load the model with standard residuals (`attn_res_mode="none"`).
        quantise: `"4bit"` or `"8bit"` for the frozen weights, with bitsandbytes.
        trust_remote_code: let a tokenizer that is code beside the checkpoint run (Kimi's is).
    """

    model: str
    data: Sequence[Path]
    lora: str = "all-linear"
    rank: int = 16
    alpha: int = 32
    dora: bool = False
    rslora: bool = False
    depth: bool | None = None
    depth_lr: float = 1e-4
    length: int = 512
    packed: bool = True
    held_out: float = 0.05
    control: bool = False
    quantise: str | None = None
    trust_remote_code: bool = False


class DepthTrainer(Trainer):
    """Trainer with a group of its own for the depth parameters.

    Its held-out loss is that of a token, and its checkpoints say when they are complete.
    """

    def __init__(self, *args, depth_lr: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.depth_lr = depth_lr
        self.losses: list[torch.Tensor] = []  # of rows that are held out: the sum over learned tokens, and their number

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        created = self.optimizer is None
        optimizer = super().create_optimizer(model)
        if created:
            named = (self.model if model is None else model).named_parameters()
            depth = {
                id(parameter): parameter
                for name, parameter in named
                if is_depth_parameter(name) and parameter.requires_grad
            }
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in depth]
            if depth:
                optimizer.add_param_group({"params": list(depth.values()), "lr": self.depth_lr, "weight_decay": 0.0})
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def _run_epoch(self, *args, **kwargs) -> None:
        """Take no step more where a run is resumed from its last one, as Trainer would."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """Give the mean over all learned tokens: Trainer's own is one of batches, and depends on their size."""
        self.losses.clear()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, tokens = torch.cat(self.losses).cpu().double().sum(0).tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / tokens
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, None, None]:
        """Keep the losses of a batch's rows, of all processes; `gather_for_metrics` leaves out rows that come twice."""
        inputs = self._prepare_inputs(inputs)
        labels_BT = inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits_BTV = model(**inputs).logits
        rows = [
            torch.stack(
                [cross_entropy(logits[:-1].float(), labels[1:], reduction="sum"), (labels[1:] != IGNORED).sum()]
            )
            for logits, labels in zip(logits_BTV, labels_BT, strict=True)
        ]
        self.losses.append(self.accelerator.gather_for_metrics(torch.stack(rows)))
        return None, None, None

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def _save_checkpoint(self, model, trial) -> None:
        """Mark a checkpoint, which Trainer writes file by file under its final name; only then remove older ones."""
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        path = Path(self.args.output_dir) / f"checkpoint-{self.state.global_step}"
        try:
            with writing(path):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        PartialState().wait_for_everyone()  # each process wrote its part
        if self.args.should_save:
            (path / COMPLETE).touch()
            rotate_checkpoints(self.args.output_dir, limit, self.state.best_model_checkpoint)


def load_model(recipe: Recipe, config, dtype: torch.dtype) -> PreTrainedModel:
    """The model to be fine-tuned, frozen weights quantised if asked."""
    kwargs = {}
    if recipe.control:
        config.attn_res_mode = "none"
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


def lora_config(recipe: Recipe, model: PreTrainedModel) -> LoraConfig:
    """What PEFT trains of this model.

    Raises:
        TrainingError: there is nothing to train, or no experts to adapt.
    """
    depth = has_depth(recipe, model.config)
    targets, parameters = {
        "all-linear": ("all-linear", None),
        "attention": (_linear_layers_of_attention(model), None),
        "experts": ([], _expert_parameters(model)),
        "none": (DUMMY_TARGET_MODULES, None),
    }[recipe.lora]
    if recipe.lora == "experts" and not parameters:
        raise TrainingError(f"--lora experts: {recipe.model} ({model.config.model_type}) has no experts.")
    if recipe.lora == "none" and not depth:
        raise TrainingError("--lora none without depth parameters leaves nothing to train.")
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


def has_depth(recipe: Recipe, config) -> bool:
    """Whether depth parameters are trained."""
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


def check_arguments(recipe: Recipe, arguments: TrainingArguments) -> PreTrainedConfig:
    """Refuse what cannot work before data is read; returns the model's config."""
    config = load_attnres_config(recipe.model)
    if not 0 < recipe.held_out < 1:
        raise TrainingError(f"--held-out must lie between 0 and 1, got {recipe.held_out}.")
    if recipe.length < 2:
        raise TrainingError(f"--length must be at least 2 tokens, got {recipe.length}.")
    if not 0 <= recipe.depth_lr < math.inf:
        raise TrainingError(f"--depth-lr must be 0 or more, got {recipe.depth_lr}.")
    for name, value in (
        ("--rank", recipe.rank),
        ("--alpha", recipe.alpha),
        *((f"--{name}", getattr(arguments, name)) for name in COUNTS),
    ):
        if value < 1:
            raise TrainingError(f"{name} must be at least 1, got {value}.")
    if arguments.metric_for_best_model not in (None, "loss", "eval_loss"):
        raise TrainingError(f"--metric_for_best_model {arguments.metric_for_best_model}: only 'loss' is measured.")
    with reading("an option of the optimiser"):  # as it checks them itself
        optimiser, settings = Trainer.get_optimizer_cls_and_kwargs(arguments)
        optimiser([nn.Parameter(torch.zeros(1))], **settings)
    if recipe.packed and "linear_attention" in getattr(config, "layer_types", []):
        raise TrainingError(
            f"--packed: the linear attention of {config.model_type} carries its state from one packed text into the "
            "next. Use --no-packed."
        )
    if has_depth(recipe, config) and arguments.fsdp and arguments.fsdp_config.get("activation_checkpointing"):
        raise TrainingError(
            "fsdp_config['activation_checkpointing']: accelerate would wrap the depth parameters that PEFT trains, and "
            "PEFT could not save them. Use --activation_checkpointing True."
        )
    if arguments.fsdp and arguments.device.type == "cpu":
        raise TrainingError("--fsdp: accelerate shards on accelerators only; on CPUs it would train with DDP unasked.")
    return config


def finetune_model(recipe: Recipe, arguments: TrainingArguments, resume: bool) -> dict:
    """Train, and write `adapter/` and `result.json` to the output folder, together; returns the result.

    Raises:
        UserError: before a model is loaded, but for a file that cannot be written.
    """
    config = check_arguments(recipe, arguments)
    with claimed(Path(arguments.output_dir)) if arguments.should_save else contextlib.nullcontext():
        return _finetune(recipe, arguments, config, resume)


def _finetune(recipe: Recipe, arguments: TrainingArguments, config: PreTrainedConfig, resume: bool) -> dict:
    output = Path(arguments.output_dir)
    if (output / "adapter").exists():
        raise TrainingError(f"{output / 'adapter'} exists: this run is finished. Choose another --output.")
    tokenizer = load_tokenizer(recipe.model, recipe.trust_remote_code)
    documents = read_documents(recipe.data, tokenizer, config.vocab_size)
    training, held_out = hold_out(documents, recipe.held_out)
    rows = make_rows(training, recipe.length, recipe.packed)
    held_out_rows = make_rows(held_out, recipe.length, recipe.packed)
    if not rows or not held_out_rows:
        raise DataError(
            f"{', '.join(map(str, recipe.data))}: {len(rows)} rows to train on and {len(held_out_rows)} held out; "
            "expected some of both. Give more data or another --held-out."
        )
    settings = {name: _plain(value) for name, value in vars(recipe).items()}
    run = describe_run(settings | {"depth": has_depth(recipe, config)}, arguments)
    checkpoint = checkpoint_to_resume(output, resume, run, arguments.should_save)

    set_seed(arguments.seed)
    dtype = torch.bfloat16 if arguments.bf16 and recipe.quantise is None else torch.float32
    base = load_model(recipe, config, dtype)
    if recipe.quantise is not None:
        base = prepare_model_for_kbit_training(base, arguments.activation_checkpointing)
    model = get_peft_model(base, lora_config(recipe, base))
    if arguments.activation_checkpointing and (arguments.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        model.enable_input_require_grads()
    model.print_trainable_parameters()

    padding = tokenizer.pad_token_id
    with reading("TrainingArguments"):
        trainer = DepthTrainer(
            model,
            arguments,
            data_collator=Collator(padding if padding is not None and padding < config.vocab_size else 0),
            train_dataset=rows,
            eval_dataset=held_out_rows,
            depth_lr=recipe.depth_lr,
        )
    if not recipe.control and config.attn_res_mode != "none":
        probe = torch.tensor([held_out_rows[0]["input_ids"][:128]])
        DepthMonitor(probe, moves=has_depth(recipe, config)).attach(trainer)
    # Trainer measures it, not `evaluate()` before `train()`: that would leave the model without DDP or FSDP
    trainer.args.eval_on_start = checkpoint is None
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
        before = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
        after = trainer.evaluate()["eval_loss"]
        if not math.isfinite(after):
            raise TrainingError(f"The held-out loss ended at {after}: nothing was saved. Try a lower --learning_rate.")
        result = {
            "held_out_loss": {"before": before, "after": after},
            "steps": trainer.state.global_step,
            "rows": {"training": len(rows), "held_out": len(held_out_rows)},
            "recipe": settings,
            "log": trainer.state.log_history,
        }
        save(trainer, output, result, run)
    except (OSError, torch.OutOfMemoryError) as error:
        kept = last_complete_checkpoint(output)
        way_on = "No checkpoint is complete." if kept is None else f"{kept.name} is complete: continue with --resume."
        step = trainer.state.global_step
        raise TrainingError(f"training stopped at step {step}: {describe(error)}. {way_on}") from error
    if trainer.args.should_save:
        steps, where = result["steps"], output / "adapter"
        print(f"held-out loss: {before:.4f} before, {after:.4f} after {steps} steps; {where}")
    return result


def save(trainer: Trainer, output: Path, result: dict, run: dict) -> None:
    """Write the result and then the adapter, each complete or not at all: where the adapter is, the run is finished."""
    state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None  # by all processes
    if not trainer.args.should_save:
        return
    with complete_or_absent(output / "adapter") as folder, writing(output / "adapter"):
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder, state_dict=state)
        (folder / RECIPE).write_text(json.dumps(run, indent=1) + "\n")
        with whole_file(output / "result.json") as file:
            file.write_text(json.dumps(result, indent=1) + "\n")


def _plain(value):
    return [str(entry) for entry in value] if isinstance(value, list | tuple) else value
