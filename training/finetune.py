"""Fine-tuning: PEFT on top of transformers' Trainer, the depth queries trained in full beside LoRA."""

import json
import math
import shutil
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from accelerate import PartialState
from peft import LoraConfig, PeftModel, get_peft_model, prepare_model_for_kbit_training
from peft.utils.constants import DUMMY_TARGET_MODULES
from torch import nn
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    BitsAndBytesConfig,
    PreTrainedModel,
    Trainer,
    TrainerCallback,
    TrainingArguments,
    set_seed,
)

from common.errors import UserError
from common.files import complete_or_absent, whole_file
from conversion.checkpoint import open_source
from conversion.writing import add_card
from modeling_attnres import is_depth_parameter

from .data import Collator, DataError, hold_out, make_rows, read_documents
from .monitor import DepthMonitor


COMPLETE = "complete"  # the file that a checkpoint gets last
MIXERS = ("self_attn", "linear_attn", "mamba")  # what attention, or what stands in its place, is called in a layer


class TrainingError(UserError):
    """A setting that cannot work; the message says which, what was found and what was expected."""


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
    """Trainer with a group of its own for the depth parameters, and checkpoints that say when they are complete."""

    def __init__(self, *args, depth_lr: float, **kwargs):
        super().__init__(*args, **kwargs)
        self.depth_lr = depth_lr

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


class MarkComplete(TrainerCallback):
    """Trainer writes a checkpoint file by file under its final name: this one comes last, and resuming asks for it."""

    def on_save(self, args, state, control, **kwargs):
        PartialState().wait_for_everyone()  # each process wrote its part
        if args.should_save:
            (Path(args.output_dir) / f"checkpoint-{state.global_step}" / COMPLETE).touch()


def last_complete_checkpoint(output: Path) -> Path | None:
    """The newest checkpoint that was written to its end; what a kill left half done is not considered."""
    found = [path.parent for path in output.glob(f"checkpoint-*/{COMPLETE}")]
    return max(found, key=lambda path: int(path.name.rsplit("-", 1)[1]), default=None)


def checkpoint_to_resume(output: Path, resume: bool) -> Path | None:
    """Where to continue, if asked to; what a kill left half done is removed."""
    checkpoint = last_complete_checkpoint(output) if resume else None
    if resume and checkpoint is None:
        raise TrainingError(f"--resume: no complete checkpoint in {output}.")
    if not resume and any(output.glob("checkpoint-*")):
        raise TrainingError(f"{output} holds checkpoints. Continue with --resume, or choose another --output.")
    for leftover in output.glob("checkpoint-*"):
        if not (leftover / COMPLETE).exists():
            shutil.rmtree(leftover, ignore_errors=True)  # by the first of several processes
    return checkpoint


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
    model = AutoModelForCausalLM.from_pretrained(recipe.model, config=config, dtype=dtype, **kwargs)
    model.config.use_cache = False
    return model


def load_tokenizer(path: str | Path, trust_remote_code: bool):
    """The tokenizer of a checkpoint.

    Raises:
        TrainingError: there is none, or it is code that was not allowed to run.
    """
    try:
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
    except (OSError, ValueError) as error:
        way_on = "" if trust_remote_code else " If it is code that you trust: --trust-remote-code."
        raise TrainingError(f"{path}: no tokenizer can be loaded: {error}{way_on}") from error


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


def check_arguments(recipe: Recipe, arguments: TrainingArguments):
    """Refuse what cannot work before data is read; returns the model's config."""
    config = AutoConfig.from_pretrained(recipe.model)
    if not hasattr(config, "attn_res_mode"):
        raise TrainingError(
            f"{recipe.model} is a {config.model_type!r}, without Attention Residuals. Port it first: "
            f"python -m conversion port {recipe.model} TARGET"
        )
    if not 0 < recipe.held_out < 1:
        raise TrainingError(f"--held-out must lie between 0 and 1, got {recipe.held_out}.")
    if recipe.length < 2:
        raise TrainingError(f"--length must be at least 2 tokens, got {recipe.length}.")
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
    adapter = Path(arguments.output_dir) / "adapter"
    if adapter.exists():
        raise TrainingError(f"{adapter} exists: this run is finished. Choose another --output.")
    return config


def finetune(recipe: Recipe, arguments: TrainingArguments, resume: bool) -> dict:
    """Train, and write `adapter/` and `result.json` to the output folder; returns the result.

    Raises:
        TrainingError, DataError: before a model is loaded.
    """
    output = Path(arguments.output_dir)
    config = check_arguments(recipe, arguments)
    tokenizer = load_tokenizer(recipe.model, recipe.trust_remote_code)
    training, held_out = hold_out(read_documents(recipe.data, tokenizer), recipe.held_out)
    rows = make_rows(training, recipe.length, recipe.packed)
    held_out_rows = make_rows(held_out, recipe.length, recipe.packed)
    if not rows or not held_out_rows:
        raise DataError(
            f"{', '.join(map(str, recipe.data))}: {len(rows)} rows to train on and {len(held_out_rows)} held out; "
            "expected some of both. Give more data or another --held-out."
        )
    checkpoint = checkpoint_to_resume(output, resume)

    set_seed(arguments.seed)
    dtype = torch.bfloat16 if arguments.bf16 and recipe.quantise is None else torch.float32
    base = load_model(recipe, config, dtype)
    if recipe.quantise is not None:
        base = prepare_model_for_kbit_training(base, arguments.activation_checkpointing)
    model = get_peft_model(base, lora_config(recipe, base))
    if arguments.activation_checkpointing and (arguments.activation_checkpointing_kwargs or {}).get("use_reentrant"):
        model.enable_input_require_grads()
    model.print_trainable_parameters()

    padding = tokenizer.pad_token_id if tokenizer.pad_token_id is not None else tokenizer.eos_token_id
    trainer = DepthTrainer(
        model,
        arguments,
        data_collator=Collator(padding or 0),
        train_dataset=rows,
        eval_dataset=held_out_rows,
        callbacks=[MarkComplete()],
        depth_lr=recipe.depth_lr,
    )
    if not recipe.control and config.attn_res_mode != "none":
        probe = torch.tensor([held_out_rows[0]["input_ids"][:128]])
        DepthMonitor(probe, moves=has_depth(recipe, config)).attach(trainer)
    # Trainer measures it, not `evaluate()` before `train()`: that would leave the model without DDP or FSDP
    trainer.args.eval_on_start = checkpoint is None
    try:
        trainer.train(resume_from_checkpoint=str(checkpoint) if checkpoint else None)
    except OSError as error:
        kept = last_complete_checkpoint(output)
        way_on = "No checkpoint is complete." if kept is None else f"{kept.name} is complete: continue with --resume."
        raise TrainingError(f"training stopped at step {trainer.state.global_step}: {error}. {way_on}") from error
    before = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    after = trainer.evaluate()["eval_loss"]
    if not math.isfinite(after):
        raise TrainingError(f"The held-out loss ended at {after}: nothing was saved. Try a lower --learning_rate.")

    result = {
        "held_out_loss": {"before": before, "after": after},
        "steps": trainer.state.global_step,
        "rows": {"training": len(rows), "held_out": len(held_out_rows)},
        "recipe": {name: _plain(value) for name, value in vars(recipe).items()},
        "log": trainer.state.log_history,
    }
    save(trainer, output, result)
    if trainer.args.should_save:
        steps, where = result["steps"], output / "adapter"
        print(f"held-out loss: {before:.4f} before, {after:.4f} after {steps} steps; {where}")
    return result


def save(trainer: Trainer, output: Path, result: dict) -> None:
    """Write the adapter, complete or not at all, and the result beside it."""
    state = trainer.accelerator.get_state_dict(trainer.model) if trainer.is_fsdp_enabled else None  # by all processes
    if not trainer.args.should_save:
        return
    with complete_or_absent(output / "adapter") as folder:
        trainer.accelerator.unwrap_model(trainer.model).save_pretrained(folder, state_dict=state)
    with whole_file(output / "result.json") as file:
        file.write_text(json.dumps(result, indent=1) + "\n")


def merge(adapter: Path, target: Path, trust_remote_code: bool = False) -> None:
    """Merge an adapter into its base: a model that needs no PEFT, complete or absent."""
    from peft import AutoPeftModelForCausalLM

    model: PeftModel = AutoPeftModelForCausalLM.from_pretrained(adapter, dtype="auto")
    base = model.peft_config["default"].base_model_name_or_path
    rank = getattr(model.peft_config["default"], "r", None)
    details = {"with the adapter": f"`{adapter.resolve().parent.name}/{adapter.name}`"}
    details |= {"of rank": str(rank)} if rank else {}
    tokenizer = load_tokenizer(base, trust_remote_code)
    merged = model.merge_and_unload()
    with complete_or_absent(target) as folder, open_source(base) as checkpoint:
        merged.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
        add_card(folder, target.name, checkpoint, base, "merge", **details)


def _plain(value):
    return [str(entry) for entry in value] if isinstance(value, list | tuple) else value
