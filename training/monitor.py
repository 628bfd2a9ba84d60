"""A Trainer callback that logs what depth attention does as it trains, and warns when it does nothing or too much."""

import math
import warnings
from statistics import mean

import torch
from transformers import Trainer, TrainerCallback

from modeling_attnres import is_depth_parameter

from .depth import mean_depth_weights, site_statistics


class DepthMonitor(TrainerCallback):
    """Adds to every log: `depth/query_norm_mean`, `…_max`, `depth/entropy_of_mean`, `depth/reach`,
    `depth/largest_weight`.

    Entropy (of a site's mean weights) and reach are means over sites of their values on one probe text
    (`training.depth.site_statistics`).
    Whatever tracker Trainer reports to receives them. Warns, and says what to try, when

    - queries are where they were after `patience` logs,
    - a site puts more than `collapsed` of its weight on one of several sources,
    - a loss is not finite (training stops).

    Args:
        probe_ids: token ids `[1, T]` of the probe.
        moves: whether the queries are trained, and so expected to move.
    """

    patience, collapsed = 5, 0.999

    def __init__(self, probe_ids: torch.Tensor, moves: bool = True):
        self.probe_ids, self.moves = probe_ids, moves
        self.at_start: torch.Tensor | None = None
        self.logs = 0
        self.warned: set[str] = set()

    def attach(self, trainer: Trainer) -> None:
        """Add it to a trainer, ahead of the trackers, which then see what it adds."""
        trainer.callback_handler.callbacks.insert(0, self)

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        self.at_start = query_norms(model)

    def on_log(self, args, state, control, model=None, logs=None, **kwargs):
        loss = logs.get("loss", logs.get("eval_loss", 0.0))
        if not math.isfinite(loss):
            self._warn(
                "loss",
                f"The loss at step {state.global_step} is {loss}. Training stops. Try a lower --learning_rate or "
                "--depth-lr, --warmup_steps, --max_grad_norm 1, or bf16 in place of fp16.",
            )
            control.should_training_stop = True
            return control
        if "loss" not in logs or model is None:
            return control
        norms = query_norms(model)
        weights = self._probe(model)
        choices = [
            (site, one) for site, one in enumerate(site_statistics(model.config, weights)) if len(weights[site]) > 1
        ]
        added = {
            "depth/query_norm_mean": norms.mean().item(),
            "depth/query_norm_max": norms.max().item(),
            "depth/entropy_of_mean": mean(one.entropy_of_mean for _, one in choices),
            "depth/reach": mean(one.reach for _, one in choices),
            "depth/largest_weight": max(one.largest for _, one in choices),
        }
        logs.update(added)
        if state.log_history:
            state.log_history[-1].update(added)
        self._judge(state.global_step, norms, choices)
        return control

    def _probe(self, model) -> list[torch.Tensor]:
        training = model.training
        model.eval()
        try:
            return mean_depth_weights(model, self.probe_ids.to(next(model.parameters()).device))
        finally:
            model.train(training)

    def _judge(self, step: int, norms: torch.Tensor, choices: list) -> None:
        self.logs += 1
        if self.moves and self.at_start is not None and self.logs >= self.patience:
            moved = (norms - self.at_start).abs().max().item()
            if moved < 1e-6:
                self._warn(
                    "queries",
                    f"After {step} steps no pseudo-query has moved (largest change of a norm {moved:.1e}). Try a "
                    "higher --depth-lr, and check that the depth parameters are trained (no --no-depth).",
                )
        for site, one in choices:
            if one.largest > self.collapsed:
                self._warn(
                    f"site {site}",
                    f"At step {step} site {site} (decoder layer {site // 2}) puts {one.largest:.4f} of its weight on "
                    "one source. Try a lower --depth-lr, or a longer warmup.",
                )

    def _warn(self, about: str, message: str) -> None:
        if about not in self.warned:  # once each
            self.warned.add(about)
            warnings.warn(message, stacklevel=3)


def query_norms(model) -> torch.Tensor:
    """The norms of all pseudo-queries `[S]`, whichever way the model is wrapped: an adapter's where it has its own."""
    query_SD = next(
        parameter
        for name, parameter in model.named_parameters()
        if is_depth_parameter(name) and name.endswith(".query") and ".original_module." not in name
    )
    whole_SD = query_SD.full_tensor() if hasattr(query_SD, "full_tensor") else query_SD
    return whole_SD.detach().float().norm(dim=-1).cpu()
