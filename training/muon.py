"""Muon for the matrices within layers, AdamW for the rest, as one optimiser that Trainer steps, saves and loads."""

import torch
from torch import nn
from torch.optim import AdamW, Muon, Optimizer

from modeling_attnres import is_depth_parameter


class MuonWithAdamW(Optimizer):
    """Step each group of parameters with torch's Muon where it says `muon`, and else with torch's AdamW.

    Args:
        groups: of parameters, as any optimiser's.
        muon: a Muon, for its settings.
        adamw: an AdamW, for its settings.
    """

    def __init__(self, groups: list[dict], muon: Muon, adamw: AdamW):
        self.muon, self.adamw = muon, adamw
        super().__init__(groups, {"lr": adamw.defaults["lr"]})  # which some schedules read

    def add_param_group(self, group: dict) -> None:
        """Add a group, which has the settings of its optimiser but for those that it says itself."""
        settings = self.muon.defaults if group.get("muon") else self.adamw.defaults
        super().add_param_group({"muon": False} | settings | group)

    @torch.no_grad()
    def step(self, closure=None) -> torch.Tensor | None:
        """Step both, each on its groups."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        self.adamw.state, self.adamw.param_groups = self.state, [g for g in self.param_groups if not g["muon"]]
        self.adamw.step()
        for group in self.param_groups:
            if group["muon"]:
                self.muon.param_groups, self.muon.state = self._by_matrix(group)
                self.muon.step()
        return loss

    def _by_matrix(self, group: dict) -> tuple[list[dict], dict]:
        """Make of experts, which are one tensor a layer, matrices: views of it, of its gradient and of its momentum."""
        matrices, state = [], {}
        for parameter in group["params"]:
            if parameter.grad is None:
                continue
            if "momentum_buffer" not in self.state[parameter]:
                self.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
            momentum = self.state[parameter]["momentum_buffer"]
            views = [
                [tensor] if tensor.ndim == 2 else tensor.unbind()
                for tensor in (parameter.detach(), parameter.grad, momentum)
            ]
            for matrix, gradient, its_momentum in zip(*views):
                matrix.grad = gradient
                matrices.append(matrix)
                state[matrix] = {"momentum_buffer": its_momentum}
        return [group | {"params": matrices}], state


def matrices_within_layers(model: nn.Module) -> dict[str, nn.Parameter]:
    """Find what Muon is for: the matrices between hidden states, experts' included.

    Not embeddings, the head, depth parameters, norms, biases or convolutions.
    """
    outer = model.get_input_embeddings(), model.get_output_embeddings()
    ends = {id(getattr(part, "weight", None)) for part in outer}  # a pipeline's rank may lack them
    return {
        name: parameter
        for name, parameter in model.named_parameters()
        if (parameter.ndim == 2 or (parameter.ndim == 3 and ".experts." in name))
        and id(parameter) not in ends
        and not is_depth_parameter(name)
    }


def make_muon(model: nn.Module, decay_parameters: list[str], lr: float, weight_decay: float, **adamw) -> MuonWithAdamW:
    """Make the optimiser of a model.

    Args:
        model: whose parameters are trained.
        decay_parameters: the names of those that weight decay applies to.
        lr: one learning rate for both: Muon's steps are scaled to be as large as AdamW's.
        weight_decay: for both.
        adamw: its other settings.
    """
    matrices = matrices_within_layers(model)
    rest = {name: parameter for name, parameter in model.named_parameters() if name not in matrices}
    groups = [
        {"params": list(matrices.values()), "muon": True},
        {"params": [rest[name] for name in rest if name in decay_parameters], "muon": False},
        {"params": [rest[name] for name in rest if name not in decay_parameters], "muon": False, "weight_decay": 0.0},
    ]
    some = next(iter(matrices.values()))
    return MuonWithAdamW(
        [group for group in groups if group["params"]],
        Muon([some], lr=lr, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"),
        AdamW([some], lr=lr, weight_decay=weight_decay, **adamw),
    )
