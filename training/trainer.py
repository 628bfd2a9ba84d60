"""transformers' Trainer for models with Attention Residuals, whatever they are trained for."""

import contextlib
import json
import math
import warnings
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch
from accelerate import PartialState
from torch import nn
from torch.nn.functional import cross_entropy
from transformers import PreTrainedTokenizerBase, Trainer
from transformers.trainer_utils import rotate_checkpoints

from common.errors import describe, reading
from common.files import complete_or_absent, whole_file
from modeling_attnres import is_depth_parameter

from .checkpoints import COMPLETE, RECIPE, finite_or_null, last_complete_checkpoint, writing
from .data import IGNORED
from .loading import TrainingError
from .monitor import Monitor
from .muon import make_muon


LOSSES = ("loss", "eval_loss")  # what the log calls that of training, and that of held-out rows


class DepthTrainer(Trainer):
    """Trainer with an optimizer group of their own for the depth parameters, and monitors of what they do.

    Its held-out loss is the mean per token, and its checkpoints say when they are complete.

    Args:
        depth_lr: the learning rate of the depth parameters (of matrices by `depth_rate`), without weight decay.
        muon: whether the matrices within layers are trained with Muon.
        monitors: what they measure is added to the log of every training loss.
    """

    def __init__(self, *args, depth_lr: float, muon: bool = False, monitors: Sequence[Monitor] = (), **kwargs):
        super().__init__(*args, **kwargs)
        self.depth_lr, self.muon = depth_lr, muon
        self.monitors = monitors
        for monitor in monitors:
            self.add_callback(monitor)  # which may remember where training began
        self.held_out_loss = torch.zeros(2, dtype=torch.float64)  # the sum over learned tokens, and their number

    def create_optimizer(self, model: nn.Module | None = None) -> torch.optim.Optimizer:
        """Move the depth parameters to a group of their own."""
        is_new, trained = self.optimizer is None, self.model if model is None else model
        if is_new and self.muon:
            _, settings = self.get_optimizer_cls_and_kwargs(self.args)
            decayed = self.get_decay_parameter_names(trained)
            self.optimizer = make_muon(trained, decayed, weight_decay=self.args.weight_decay, **settings)
        optimizer = super().create_optimizer(model)
        if is_new:
            depth = {
                id(parameter): parameter
                for name, parameter in trained.named_parameters()
                if is_depth_parameter(name) and parameter.requires_grad
            }
            for group in optimizer.param_groups:
                group["params"] = [parameter for parameter in group["params"] if id(parameter) not in depth]
            by_rate = defaultdict(list)
            for parameter in depth.values():
                by_rate[depth_rate(parameter, self.depth_lr)].append(parameter)
            for rate, parameters in by_rate.items():
                optimizer.add_param_group({"params": parameters, "lr": rate, "weight_decay": 0.0})
            optimizer.param_groups[:] = [group for group in optimizer.param_groups if group["params"]]
        return optimizer

    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Add what the monitors measure to the log of a training loss; stop at a loss that is not finite."""
        loss = logs.get("loss", logs.get("eval_loss", 0.0))
        if not math.isfinite(loss):
            self.control.should_training_stop, self.control.should_save = True, False
            warnings.warn(
                f"The loss at step {self.state.global_step} is {loss}. Training stops. Try a lower --learning_rate, "
                "--depth-lr or --depth-lr-factor, --warmup_steps, --max_grad_norm 1, or bf16 in place of fp16.",
                stacklevel=2,
            )
        elif "loss" in logs:
            for monitor in self.monitors:
                logs |= monitor.measure(self.model, self.state.global_step)
        super().log(logs, start_time)

    def _run_epoch(self, *args, **kwargs) -> None:
        """Take no further step where a run is resumed from its last one, as Trainer would."""
        if self.state.global_step < self.state.max_steps:
            super()._run_epoch(*args, **kwargs)

    def get_eval_dataloader(self, *args, **kwargs):
        """Give all held-out rows: `dataloader_drop_last` is about batches to train on."""
        given, self.args.dataloader_drop_last = self.args.dataloader_drop_last, False
        try:
            return super().get_eval_dataloader(*args, **kwargs)
        finally:
            self.args.dataloader_drop_last = given

    def evaluation_loop(self, *args, metric_key_prefix: str = "eval", **kwargs):
        """Give the mean over all learned tokens: Trainer's own is the mean of batches, and depends on their size."""
        self.held_out_loss.zero_()
        output = super().evaluation_loop(*args, metric_key_prefix=metric_key_prefix, **kwargs)
        total, tokens = self.held_out_loss.tolist()
        output.metrics[f"{metric_key_prefix}_loss"] = total / tokens
        return output

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, None, None]:
        """Add up the loss of each row of a batch, of all processes; `gather_for_metrics` leaves out repeated rows."""
        inputs = self._prepare_inputs(inputs)
        labels_BT = inputs.pop("labels")
        with torch.no_grad(), self.compute_loss_context_manager():
            logits_BTV = model(**inputs).logits
        self.add_held_out(self.accelerator.gather_for_metrics(row_losses(logits_BTV, labels_BT)))
        return None, None, None

    def add_held_out(self, losses: torch.Tensor) -> None:
        """Add the losses of rows `[B, 2]`; kept until the end, small as they are, they would leave holes."""
        self.held_out_loss += losses.detach().cpu().double().sum(0)

    def _load_from_checkpoint(self, resume_from_checkpoint, model=None) -> None:
        with reading(resume_from_checkpoint):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_optimizer_and_scheduler(self, checkpoint) -> None:
        with reading(checkpoint):
            super()._load_optimizer_and_scheduler(checkpoint)

    def save_trained(self, target: Path, add_files: Callable[[Path], None]) -> None:
        """Write what was trained, complete or not at all; every process calls it.

        Args:
            target: the folder, which is absent or empty.
            add_files: writes what else belongs there, in the process that writes.
        """
        state = self.accelerator.get_state_dict(self.model) if self.is_fsdp_enabled else None  # by all processes
        if not self.args.should_save:
            return
        with complete_or_absent(target) as folder, writing(target):
            model = self.accelerator.unwrap_model(self.model, keep_torch_compile=False)
            model.save_pretrained(folder, state_dict=state)
            add_files(folder)

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


def depth_rate(parameter: nn.Parameter, depth_lr: float) -> float:
    """Return the learning rate of a depth parameter.

    A matrix per site, `[S, D, R]`, makes each number of a query of R others, so the query moves R times as far as the
    matrix does: at the rate of learned queries softmaxes are one-hot after a few steps. Its rate is divided by R.
    """
    return depth_lr / parameter.shape[-1] if parameter.dim() == 3 else depth_lr


def row_losses(logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
    """Return for each row the sum of the loss over its learned tokens, and their number, `[B, 2]`."""
    rows = [
        torch.stack([cross_entropy(logits[:-1].float(), labels[1:], reduction="sum"), (labels[1:] != IGNORED).sum()])
        for logits, labels in zip(logits_BTV, labels_BT, strict=True)
    ]
    return torch.stack(rows)


def train_and_evaluate(trainer: Trainer, checkpoint: Path | None) -> dict[str, float]:
    """Train, from a checkpoint on where there is one; returns the held-out loss `before` and `after`.

    Raises:
        TrainingError: training ended early, or the loss is not finite afterwards.
    """
    # Trainer measures it, not `evaluate()` before `train()`: that would leave the model without DDP or FSDP
    trainer.args.eval_on_start = checkpoint is None
    trainer.train(resume_from_checkpoint=None if checkpoint is None else str(checkpoint))
    before = next(entry["eval_loss"] for entry in trainer.state.log_history if "eval_loss" in entry)
    step, steps = trainer.state.global_step, trainer.state.max_steps
    if step == steps:
        after = trainer.evaluate()["eval_loss"]
    else:  # a loss or a signal ended it
        *_, after = (entry[name] for entry in trainer.state.log_history for name in LOSSES if name in entry)
    if not math.isfinite(after):
        raise TrainingError(f"The loss ended at {after}, after step {step} of {steps}. Try a lower --learning_rate.")
    if step < steps:
        raise TrainingError(f"Training ended after step {step} of {steps}. Continue with --resume.")
    return {"before": before, "after": after}


def save_results(
    trainer: DepthTrainer, target: Path, result: dict, run: dict, tokenizer: PreTrainedTokenizerBase | None = None
) -> None:
    """Write the result and then what was trained, complete or not at all: where that is, the run is finished.

    Args:
        trainer: of the model; every process calls it.
        target: the folder to write, beside `result.json`.
        result: what the run measured.
        run: what decided it.
        tokenizer: to go with a model.
    """
    trainer.save_trained(target, lambda folder: save_records(folder, target, result, run, tokenizer))


def save_records(
    folder: Path, target: Path, result: dict, run: dict, tokenizer: PreTrainedTokenizerBase | None
) -> None:
    """Write what goes with a trained model into its folder, which becomes `target`, and the result beside that."""
    if tokenizer is not None:
        tokenizer.save_pretrained(folder)
    (folder / RECIPE).write_text(json.dumps(run, indent=1) + "\n")
    with whole_file(target.with_name("result.json")) as file:
        file.write_text(json.dumps(finite_or_null(result), indent=1) + "\n")


@contextlib.contextmanager
def telling_how_to_continue(trainer: Trainer) -> Iterator[None]:
    """Say where a full disk or memory stopped training, and from which checkpoint it can be continued.

    Raises:
        TrainingError: in place of the `OSError` or `OutOfMemoryError`.
    """
    try:
        yield
    except (OSError, torch.OutOfMemoryError) as error:
        checkpoint = last_complete_checkpoint(Path(trainer.args.output_dir))
        if checkpoint is None:
            advice = "No checkpoint is complete."
        else:
            advice = f"{checkpoint.name} is complete: continue with --resume."
        step = trainer.state.global_step
        raise TrainingError(f"training stopped at step {step}: {describe(error)}. {advice}") from error
