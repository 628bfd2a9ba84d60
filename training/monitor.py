"""What depth attention does as it trains: measured for the log, with warnings when it does nothing or too much."""

import contextlib
import warnings
from collections.abc import Iterator
from statistics import mean

import torch
from torch import nn
from transformers import TrainerCallback

from conversion.inspection import site_name
from modeling_attnres import is_depth_parameter
from modeling_attnres.configuration_attnres import BlockLayout

from .depth import SiteStatistics, mean_depth_weights, site_statistics


class Monitor(TrainerCallback):
    """What `training.trainer.DepthTrainer` asks for something to log."""

    def measure(self, model, step: int) -> dict[str, float]:
        """Measure what is to be logged of a model after a step."""
        raise NotImplementedError


class DepthMonitor(Monitor):
    """Measures `depth/query_norm_mean`, `…_max`, `depth/entropy_of_mean`, `depth/reach` and `depth/largest_weight`.

    In other forms than the paper's `query` is what starts at zero there: `gate`, `query_up` or `static`.

    `training.trainer.DepthTrainer` adds them to the log of every training loss, so that whatever tracker it reports to
    receives them. Entropy (of a site's mean weights) and reach are means over sites of their values on one probe text
    (`training.depth.site_statistics`). Warns, and says what to try, when

    - queries (or gates, …) have not moved after `patience` logs,
    - a site puts more than `collapsed` of its weight on one of several sources.

    Args:
        probe_ids: token ids `[1, T]` of the probe.
        moves: whether the depth parameters are trained, and so expected to move.
    """

    patience, collapsed = 5, 0.999

    def __init__(self, probe_ids: torch.Tensor, moves: bool = True):
        self.probe_ids, self.moves = probe_ids, moves
        self.norms_at_start: torch.Tensor | None = None
        self.measurements = 0
        self.warned: set[str] = set()

    def on_train_begin(self, args, state, control, model=None, **kwargs):
        """Remember the queries' norms."""
        _, self.norms_at_start = moving_norms(model)

    def measure(self, model, step: int) -> dict[str, float]:
        """Measure what is to be logged of a model after a step, and warn of what is wrong with it."""
        name, norms = moving_norms(model)
        weights = self._weights_of_probe(model)
        # A site with one source has no choice, so nothing to measure
        statistics = {
            site: of_site
            for site, of_site in enumerate(site_statistics(model.config, weights))
            if len(weights[site]) > 1
        }
        self.measurements += 1
        self._warn_of_queries(step, name, norms)
        self._warn_of_sites(step, statistics, model.config.attn_res_layout)
        return {
            f"depth/{name}_norm_mean": norms.mean().item(),
            f"depth/{name}_norm_max": norms.max().item(),
            "depth/entropy_of_mean": mean(of_site.entropy_of_mean for of_site in statistics.values()),
            "depth/reach": mean(of_site.reach for of_site in statistics.values()),
            "depth/largest_weight": max(of_site.largest for of_site in statistics.values()),
        }

    def _weights_of_probe(self, model) -> list[torch.Tensor]:
        with evaluating(model):
            return mean_depth_weights(model, self.probe_ids.to(next(model.parameters()).device))

    def _warn_of_queries(self, step: int, name: str, norms: torch.Tensor) -> None:
        if not self.moves or self.norms_at_start is None or self.measurements < self.patience:
            return
        moved = (norms - self.norms_at_start).abs().max().item()
        if moved < 1e-6:
            self._warn(
                "queries",
                f"After {step} steps no {name} has moved (largest change of a norm {moved:.1e}). Try a higher "
                "--depth-lr (of pretrain: --depth-lr-factor), and check that the depth parameters are trained.",
            )

    def _warn_of_sites(self, step: int, statistics: dict[int, SiteStatistics], layout: BlockLayout) -> None:
        for site, of_site in statistics.items():
            if of_site.largest > self.collapsed:
                self._warn(
                    f"site {site}",
                    f"At step {step} site {site} ({site_name(site, layout)}) puts {of_site.largest:.4f} of its weight "
                    "on one source. Try a lower --depth-lr (of pretrain: --depth-lr-factor), or a longer warmup.",
                )

    def _warn(self, subject: str, message: str) -> None:
        if subject not in self.warned:  # once each
            self.warned.add(subject)
            warnings.warn(message, stacklevel=3)


class ExpertMonitor(Monitor):
    """Measures how evenly a mixture's experts are used, on one probe text; means over layers.

    `experts/largest_load` is what the most used expert of a layer gets, in times an even share (1: all get the same);
    `experts/unused` is the share of experts that get nothing.

    Args:
        probe_ids: token ids `[1, T]` of the probe.
    """

    def __init__(self, probe_ids: torch.Tensor):
        self.probe_ids = probe_ids

    def measure(self, model, step: int) -> dict[str, float]:
        """Count where the routers send the probe's tokens: transformers hands each layer's experts their indices."""
        loads = []

        def count(experts, args, kwargs):
            chosen = args[1] if len(args) > 1 else kwargs["top_k_index"]
            loads.append(torch.bincount(chosen.flatten(), minlength=experts.num_experts).cpu().double())

        hooks = [module.register_forward_pre_hook(count, with_kwargs=True) for module in experts_of(model)]
        with evaluating(model), torch.no_grad():
            model(input_ids=self.probe_ids.to(next(model.parameters()).device), use_cache=False)
        for hook in hooks:
            hook.remove()
        return {
            "experts/largest_load": mean((load.max() / load.mean()).item() for load in loads),
            "experts/unused": mean((load == 0).double().mean().item() for load in loads),
        }


def experts_of(model) -> list[nn.Module]:
    """List the experts of each layer that is a mixture of them."""
    return [module for name, module in model.named_modules() if name.endswith(".experts")]


@contextlib.contextmanager
def evaluating(model) -> Iterator[None]:
    """Have a model in eval mode within the block."""
    training = model.training
    model.eval()
    try:
        yield
    finally:
        model.train(training)


def moving_norms(model) -> tuple[str, torch.Tensor]:
    """Name what starts at zero in this form, and compute its norm at each site `[S]`, of any wrapped model.

    An adapter's where it has its own.
    """
    named = {
        name.rsplit(".", 1)[-1]: parameter
        for name, parameter in model.named_parameters()
        if is_depth_parameter(name) and ".original_module." not in name
    }
    name = next(name for name in ("gate", "query", "query_up", "static") if name in named)
    parameter = named[name]
    whole = parameter.full_tensor() if hasattr(parameter, "full_tensor") else parameter
    return name, whole.detach().float().flatten(1).norm(dim=-1).cpu()
