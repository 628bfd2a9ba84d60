"""Tools that take models apart, or to other formats, find in a model what they find in its base."""

import pytest
import torch
from torch import nn

from tests.families import BY_NAME, tokens
from tests.oracle import relative_error


FORMS = {
    "block": {},
    "full": {"attn_res_mode": "full"},
    "heads": {"attn_res_heads": 4},
    "add": {"attn_res_form": "add"},
}


@pytest.fixture(params=FORMS.values(), ids=FORMS)
def model(request):
    return BY_NAME["Llama"].causal_lm(**request.param)


@pytest.mark.exhaustive
@pytest.mark.slow
@torch.no_grad()
def test_onnx_computes_the_same_at_other_sizes(model, tmp_path):
    """Models with experts do not export, for their base does not."""
    pytest.importorskip("onnxscript")
    onnxruntime = pytest.importorskip("onnxruntime")

    class Logits(nn.Module):
        def __init__(self):
            super().__init__()
            self.model = model

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.model(input_ids=input_ids, use_cache=False).logits

    sizes = {0: torch.export.Dim("batch", min=1), 1: torch.export.Dim("length", min=2)}
    torch.onnx.export(
        Logits().eval(), (tokens(),), tmp_path / "m.onnx", dynamo=True, dynamic_shapes=[sizes], verbose=False
    )
    ids = torch.randint(3, 90, (3, 19), generator=torch.Generator().manual_seed(0))
    (found,) = onnxruntime.InferenceSession(tmp_path / "m.onnx").run(None, {"input_ids": ids.numpy()})
    assert relative_error(torch.from_numpy(found), model(ids).logits) <= 3e-6


@torch.no_grad()
def test_nnsight_sees_and_steers_as_hooks_do(model):
    nnsight = pytest.importorskip("nnsight")
    layers, seen, made = model.model.layers, [], []
    hooks = [
        hook
        for layer in layers
        for hook in (
            layer.input_layernorm.register_forward_pre_hook(lambda module, args: seen.append(args[0].clone())),
            layer.register_forward_hook(lambda module, args, output: made.append(output.clone())),
        )
    ]
    model(tokens())
    for hook in hooks:
        hook.remove()
    hook = layers[2].register_forward_hook(lambda module, args, output: output * 2)
    steered = model(tokens()).logits
    hook.remove()

    traced = nnsight.NNsight(model)
    with traced.trace(tokens()):
        inputs, outputs = list().save(), list().save()  # noqa: C408 (nnsight saves calls)
        for layer in traced.model.layers:
            inputs.append(layer.input_layernorm.input)
            outputs.append(layer.output)
    with traced.trace(tokens()):
        traced.model.layers[2].output = traced.model.layers[2].output * 2
        found = traced.lm_head.output.save()
    for found_tensors, expected in ((inputs, seen), (outputs, made)):
        assert all(torch.equal(*pair) for pair in zip(found_tensors, expected, strict=True))
    assert torch.equal(found, steered)
