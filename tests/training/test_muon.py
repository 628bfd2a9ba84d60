"""Muon with AdamW beside the two optimisers of torch, each on what it is for."""

import pytest
import torch
from torch.optim import AdamW, Muon

from tests.families import BY_NAME, tokens
from training.muon import make_muon, matrices_within_layers


RATE, DECAY = 1e-2, 0.1


def step(model, *optimizers):
    model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
    for optimizer in optimizers:
        optimizer.step()
    model.zero_grad()


def apart(experts_OI: torch.nn.Parameter) -> list[torch.nn.Parameter]:
    return [torch.nn.Parameter(matrix.clone()) for matrix in experts_OI.detach()]


def test_muon_has_the_matrices_within_layers():
    assert {name.split(".", 3)[-1] for name in matrices_within_layers(BY_NAME["Llama"].causal_lm())} == {
        *(f"self_attn.{part}_proj.weight" for part in "qkvo"),
        *(f"mlp.{part}_proj.weight" for part in ("gate", "up", "down")),
    }
    of_kimi = matrices_within_layers(BY_NAME["KimiLinear"].causal_lm())
    assert any(".experts." in name for name in of_kimi)
    assert not any("conv" in name or "attn_res" in name or "norm" in name for name in of_kimi)


@pytest.mark.parametrize("resumed", [False, True])
def test_each_parameter_goes_as_with_its_own_optimiser_of_torch(resumed):
    model, twin = (BY_NAME["Llama"].causal_lm() for _ in range(2))
    matrices = matrices_within_layers(twin)
    rest = {name: parameter for name, parameter in twin.named_parameters() if name not in matrices}
    decayed = ["lm_head.weight"]
    optimizer = make_muon(model, decayed, RATE, DECAY)
    theirs = [
        Muon(matrices.values(), lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw"),
        AdamW([rest[name] for name in decayed], lr=RATE, weight_decay=DECAY),
        AdamW([rest[name] for name in rest if name not in decayed], lr=RATE, weight_decay=0),
    ]
    for number in range(3):
        if resumed and number == 2:
            state = optimizer.state_dict()
            optimizer = make_muon(model, decayed, RATE, DECAY)
            optimizer.load_state_dict(state)
        for group in (group for each in (optimizer, *theirs) for group in each.param_groups):
            group["lr"] = RATE / (number + 1)  # as a scheduler would
        step(model, optimizer)
        step(twin, *theirs)
    for name, value in twin.state_dict().items():
        torch.testing.assert_close(model.state_dict()[name], value)


def test_of_experts_each_is_a_matrix_of_its_own():
    model = BY_NAME["Qwen3Moe"].causal_lm()
    experts = next(parameter for parameter in model.parameters() if parameter.ndim == 3)
    matrices = apart(experts)
    optimizer = make_muon(model, [], RATE, DECAY)
    theirs = Muon(matrices, lr=RATE, weight_decay=DECAY, adjust_lr_fn="match_rms_adamw")
    for _ in range(2):
        model(input_ids=tokens(), labels=tokens(), use_cache=False).loss.backward()
        for matrix, gradient in zip(matrices, experts.grad):
            matrix.grad = gradient.clone()
        optimizer.step()
        theirs.step()
        model.zero_grad()
    for found, expected in zip(experts, matrices):
        torch.testing.assert_close(found, expected)
