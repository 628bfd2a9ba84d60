"""Distillation: what a model with Attention Residuals learned, brought into its plain base, to be served anywhere."""

import copy
import math
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal

import torch
from peft import PeftModel, get_peft_model
from torch.nn.functional import cross_entropy, kl_div, log_softmax
from transformers import PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase, set_seed

from common.errors import reading

from .checkpoints import begin_run, checkpoint_to_resume, describe_run, holding_output
from .data import IGNORED
from .finetune import Tuning, check_tuning, identify, lora_config, make_collator, new_target, rows_of, settings_of
from .loading import TrainingError, load_config, load_tokenizer, load_weights
from .options import Arguments, check_devices
from .pretrain import MODEL
from .trainer import DepthTrainer, save_results, telling_how_to_continue, train_and_evaluate


@dataclass(kw_only=True)
class Distillation(Tuning):
    """What to teach whom, on what text; LoRA is merged at the end."""

    _argument_group_name = "distillation"

    model: str = field(metadata={"help": "The student: a local folder or hub id of a base family's model."})
    lora: Literal["all-linear", "attention", "experts", "full"] = field(
        default="all-linear",
        metadata={"help": "The modules that LoRA adapts, which is merged at the end; full: all weights are trained."},
    )
    teacher: str = field(
        metadata={"help": "The model to learn from, with the same tokens: a trained port, its adapter merged."}
    )
    temperature: float = field(
        default=1.0, metadata={"help": "What both models' logits are divided by; the loss is multiplied by its square."}
    )
    cross_entropy: float = field(
        default=0.0, metadata={"help": "The weight of the loss of the text itself, beside the teacher's."}
    )


class DistillationTrainer(DepthTrainer):
    """Trainer whose training loss is the divergence from a teacher; the held-out loss stays that of the text.

    Args:
        teacher: what to learn from; it is on the student's device, and not trained.
        temperature, cross_entropy: as in `Distillation`.
    """

    def __init__(self, *args, teacher: PreTrainedModel, temperature: float, cross_entropy: float, **kwargs):
        super().__init__(*args, compute_loss_func=self.divergence, depth_lr=0.0, **kwargs)
        self.teacher = teacher.to(self.args.device).eval().requires_grad_(False)
        self.temperature, self.cross_entropy = temperature, cross_entropy
        self.taught_BTV: torch.Tensor | None = None  # the teacher's logits of the batch

    def compute_loss(self, model, inputs, *args, **kwargs):
        """Ask the teacher first."""
        with torch.no_grad(), self.compute_loss_context_manager():
            asked = {name: value for name, value in inputs.items() if name != "labels"}
            self.taught_BTV = self.teacher(**asked, use_cache=False).logits
        return super().compute_loss(model, inputs, *args, **kwargs)

    def divergence(self, outputs, labels_BT: torch.Tensor, num_items_in_batch=None) -> torch.Tensor:
        """Compute the mean over learned tokens of KL(teacher ‖ student), and of the text's own loss as far as asked.

        `num_items_in_batch` counts the learned tokens of all batches that a step accumulates.
        """
        text_M = labels_BT[:, 1:].flatten()
        places_N = (text_M != IGNORED).nonzero().flatten()
        student_NV, teacher_NV = (
            logits_BTV[:, :-1].flatten(0, 1).index_select(0, places_N).float()
            for logits_BTV in (outputs.logits, self.taught_BTV)
        )
        loss = self.temperature**2 * kl_div(
            log_softmax(student_NV / self.temperature, -1),
            log_softmax(teacher_NV / self.temperature, -1),
            reduction="sum",
            log_target=True,
        )
        if self.cross_entropy:
            loss = loss + self.cross_entropy * cross_entropy(
                student_NV, text_M.index_select(0, places_N), reduction="sum"
            )
        return loss / (len(places_N) if num_items_in_batch is None else num_items_in_batch)


def check_arguments(recipe: Distillation, arguments: Arguments) -> tuple[PreTrainedConfig, PreTrainedConfig]:
    """Refuse what cannot work before data is read; returns the configs of student and teacher."""
    student, teacher = load_config(recipe.model), load_config(recipe.teacher)
    check_tuning(recipe, arguments, student)
    if hasattr(student, "attn_res_mode"):
        raise TrainingError(
            f"{recipe.model} has Attention Residuals; expected a model of the base family, as the port was made from."
        )
    if student.vocab_size != teacher.vocab_size:
        raise TrainingError(
            f"{recipe.teacher}: vocab_size {teacher.vocab_size}, expected {student.vocab_size} as in {recipe.model}."
        )
    if not 0 < recipe.temperature < math.inf:
        raise TrainingError(f"--temperature must be above 0, got {recipe.temperature}.")
    if not 0 <= recipe.cross_entropy < math.inf:
        raise TrainingError(f"--cross-entropy must be 0 or more, got {recipe.cross_entropy}.")
    if arguments.label_smoothing_factor:
        raise TrainingError("--label_smoothing_factor: the teacher's words are learned, not the text's.")
    if arguments.fsdp:
        raise TrainingError("--fsdp: the teacher, which does not train, would not be sharded. Use DDP: without --fsdp.")
    check_devices(arguments)
    return student, teacher


def load_both_tokenizers(recipe: Distillation) -> PreTrainedTokenizerBase:
    """Load the student's tokenizer.

    Raises:
        UserError: there is none, or the teacher's has other tokens.
    """
    own, teachers = (load_tokenizer(path, recipe.trust_remote_code) for path in (recipe.model, recipe.teacher))
    if own.get_vocab() != teachers.get_vocab():
        raise TrainingError(f"{recipe.teacher}: its tokenizer has other tokens than that of {recipe.model}.")
    return own


def distil_model(recipe: Distillation, arguments: Arguments) -> dict:
    """Teach, and write `model/`, complete and of the base family, and `result.json` to the output folder, together.

    Returns the result: `held_out_loss` of the student before and after, and of the teacher.

    Example:
        ```python
        from pathlib import Path

        from training.distil import Distillation, distil_model
        from training.options import Arguments

        recipe = Distillation(model="base", teacher="merged", data=[Path("LICENSE")], length=128, lora="full")
        result = distil_model(recipe, Arguments(output_dir="plain", max_steps=3, learning_rate=1e-4))
        print(result["held_out_loss"])
        ```

    Raises:
        UserError: before a model is loaded, but for a file that cannot be written.
    """
    student, teacher = check_arguments(recipe, arguments)
    with holding_output(arguments):
        return _distil(recipe, arguments, student, teacher)


def _distil(recipe: Distillation, arguments: Arguments, student: PreTrainedConfig, teacher: PreTrainedConfig) -> dict:
    output = Path(arguments.output_dir)
    target = new_target(output, MODEL)

    # The data, which is read before anything is written
    tokenizer = load_both_tokenizers(recipe)
    rows, held_out_rows = rows_of(recipe, tokenizer, student)
    settings, decisive = settings_of(recipe)
    decisive |= {"teacher": identify(recipe.teacher)}
    run, resume = describe_run(settings | decisive, arguments), arguments.resume_from_checkpoint
    checkpoint = checkpoint_to_resume(output, resume, run)

    # The models, and the trainer
    set_seed(arguments.seed)
    model = load_student(recipe, student)
    common = {"data_collator": make_collator(tokenizer, student), "eval_dataset": held_out_rows}
    with reading("TrainingArguments"):
        trainer = DistillationTrainer(
            model,
            arguments,
            train_dataset=rows,
            teacher=load_weights(recipe.teacher, teacher, dtype="auto"),
            temperature=recipe.temperature,
            cross_entropy=recipe.cross_entropy,
            **common,
        )
    if arguments.should_save:
        begin_run(output, resume, run, checkpoint)

    # The result
    with telling_how_to_continue(trainer):
        losses = train_and_evaluate(trainer, checkpoint)
        quiet = copy.copy(arguments)
        quiet.report_to = []  # a tracker would take it for the student's
        losses["teacher"] = DepthTrainer(trainer.teacher, quiet, depth_lr=0.0, **common).evaluate()["eval_loss"]
        result = {
            "held_out_loss": losses,
            "steps": trainer.state.global_step,
            "rows": {"training": len(rows), "held_out": len(held_out_rows)},
            "recipe": settings,
            "log": trainer.state.log_history,
        }
        if not recipe.is_full:
            trainer.model = trainer.model.merge_and_unload()
        trainer.model.config.use_cache = True  # which Trainer turns off
        save_results(trainer, target, result, run, tokenizer)
    if arguments.should_save:
        before, after, steps = losses["before"], losses["after"], result["steps"]
        print(
            f"held-out loss: {before:.4f} before, {after:.4f} after {steps} steps, {losses['teacher']:.4f} the "
            f"teacher's; {target}"
        )
    return result


def load_student(recipe: Distillation, config: PreTrainedConfig) -> PreTrainedModel | PeftModel:
    """Load the student in fp32, with what is trained of it."""
    model = load_weights(recipe.model, config, dtype=torch.float32)
    return model if recipe.is_full else get_peft_model(model, lora_config(recipe, model))
