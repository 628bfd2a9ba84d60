"""Layers cut off, taken out or replaced by hand: computed as the base computes them, or refused."""

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import CheckpointImpl, checkpoint_wrapper

from modeling_attnres import AttnResStableLmConfig, AttnResStableLmForCausalLM
from tests.families import BY_NAME, tokens
from tests.modeling_attnres.test_hooks import ported
from tests.oracle import relative_error


LAYOUTS = {
    "block": {"attn_res_block_size": 2},
    "uneven": {"attn_res_block_boundaries": [0, 1, 4]},
    "one block": {"attn_res_block_boundaries": [0]},
    "full": {"attn_res_mode": "full"},
}


@pytest.fixture(params=["Llama", "Qwen3Moe", "KimiLinear"])
def family(request):
    return BY_NAME[request.param]


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request):
    return request.param


class Identity(nn.Module):
    """Returns what it is given."""

    def forward(self, hidden_states, *args, **kwargs):
        return hidden_states


def with_layers(model, chosen):
    """Keep some layers, or put others: an index, or a module."""
    layers = [model.model.layers[one] if isinstance(one, int) else one for one in chosen]
    model.model.layers = nn.ModuleList(layers)
    return model


def logits(model, gradients=False):
    with torch.set_grad_enabled(gradients):
        return model(tokens(), use_cache=False).logits.detach()


def check_like_the_base(family, layout, chosen):
    base = family.base_causal_lm()
    model, whole = ported(family, base, **layout), logits(base)
    expected = logits(with_layers(base, chosen))
    assert relative_error(expected, whole) > 0.01
    with_layers(model, chosen)
    for gradients in (False, True):
        assert relative_error(logits(model, gradients), expected) <= 3e-6


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_the_first_layers_alone(family, layout, count):
    check_like_the_base(family, layout, range(count))


@pytest.mark.parametrize("count", [1, 2, 5])
def test_the_first_layers_cut_off(family, layout, count):
    check_like_the_base(family, layout, range(count, 6))


@pytest.mark.parametrize("index", range(5))
def test_an_identity_in_place_of_a_layer(family, layout, index):
    check_like_the_base(family, layout, [Identity() if one == index else one for one in range(6)])


@pytest.mark.parametrize("chosen", [[0, 1, 4, 5], [0, 5], [1, 3, 4]])
def test_layers_taken_out(family, layout, chosen):
    check_like_the_base(family, layout, chosen)


def test_a_slice_of_the_list_of_layers():
    """As users write it."""
    family = BY_NAME["Llama"]
    base = family.base_causal_lm()
    model = ported(family, base)
    for one in (base, model):
        one.model.layers = one.model.layers[:4]
    assert relative_error(logits(model), logits(base)) <= 3e-6
    text = [one.generate(tokens()[:, :5], max_new_tokens=8, do_sample=False) for one in (base, model)]
    assert torch.equal(*text)


@pytest.mark.parametrize("order", [[1, 0, 2, 3, 4, 5], [0, 1, 4, 5, 2, 3], [5, 4, 3, 2, 1, 0], [0, 1, 2, 2, 3, 4, 5]])
@pytest.mark.parametrize("layout", [LAYOUTS["block"], LAYOUTS["full"]], ids=["block", "full"])
def test_layers_in_another_order_are_refused(family, layout, order):
    model = with_layers(family.causal_lm(**layout), order[:6])
    for gradients in (False, True):
        with pytest.raises(RuntimeError, match=r"^Decoder layer \d .*decoder layers must run in their order"):
            logits(model, gradients)


@pytest.mark.parametrize("order", [[0, 2, 1, 3, 4, 5], [0, 1, 1, 2, 4, 5]])
def test_another_order_within_a_block_is_refused_or_computed_as_the_base_does(order):
    family, layout = BY_NAME["Llama"], LAYOUTS["one block"]
    base = family.base_causal_lm()
    model = with_layers(ported(family, base, **layout), order)
    expected = logits(with_layers(base, order))
    try:
        found = logits(model)
    except RuntimeError as error:
        assert "decoder layers must run in their order" in str(error)  # noqa: PT017
    else:
        assert relative_error(found, expected) <= 3e-6


@pytest.mark.parametrize("last", [Identity(), "base"])
def test_a_foreign_module_as_the_last_layer_is_refused(family, layout, last):
    """It would leave the output site unread."""
    last = family.base_causal_lm().model.layers[5] if last == "base" else last
    model = with_layers(family.causal_lm(**layout), [*range(5), last])
    with pytest.raises(TypeError, match=f"[dD]ecoder layer.*{type(last).__name__}"):
        logits(model)


def test_a_base_layer_among_ours_is_refused(layout):
    """It does not know what to do with a reader, and its output is a sum over all layers."""
    family = BY_NAME["Llama"]
    foreign = family.base_causal_lm().model.layers[2]
    model = with_layers(ported(family, family.base_causal_lm(), **layout), [0, 1, foreign, 3, 4, 5])
    try:
        logits(model)
    except (TypeError, RuntimeError) as error:
        assert "decoder layer" in str(error).lower()  # noqa: PT017
    else:
        pytest.fail("computed something")


def test_a_layer_called_by_hand_says_what_it_lacks():
    model = BY_NAME["Llama"].causal_lm()
    with pytest.raises(TypeError, match="Decoder layer 1 was called without depth_pass"):
        model.model.layers[1](torch.zeros(1, 2, 32))


def test_no_layers_at_all_are_refused():
    model = with_layers(BY_NAME["Llama"].causal_lm(), [])
    with pytest.raises(TypeError, match="found none"):
        logits(model)


@pytest.mark.parametrize("wrapper", ["checkpoint", "compile"])
def test_wrapped_layers_compute_the_same(layout, wrapper):
    """As FSDP's activation checkpointing and regional compilation wrap them, the talk with the reader included."""
    torch.compiler.reset()
    model = BY_NAME["Llama"].causal_lm(**layout).train()

    def gradients():
        model.zero_grad()
        model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        return {
            name.replace("_checkpoint_wrapped_module.", "").replace("_orig_mod.", ""): parameter.grad.clone()
            for name, parameter in model.named_parameters()
        }

    expected = gradients()
    for index, layer in enumerate(model.model.layers):
        wrapped = checkpoint_wrapper(layer) if wrapper == "checkpoint" else torch.compile(layer, backend="eager")
        model.model.layers[index] = wrapped
    for name, gradient in gradients().items():
        assert relative_error(gradient, expected[name]) <= 1e-5 or not expected[name].any(), name


@pytest.mark.parametrize("autocast", [False, True])
def test_wrapped_layers_have_the_same_gradients_in_bf16(layout, autocast):
    """What rounding cuts off of a running sum is kept for the next layer, but not until the backward pass."""
    model = BY_NAME["Llama"].causal_lm(**layout).train()
    model = model if autocast else model.to(torch.bfloat16)

    def gradients():
        model.zero_grad()
        with torch.autocast("cpu", torch.bfloat16, enabled=autocast):
            model(tokens(), labels=tokens(), use_cache=False).loss.backward()
        return torch.cat([parameter.grad.flatten().double() for parameter in model.parameters()])

    expected = gradients()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer)
    assert relative_error(gradients(), expected) <= 2e-2


def test_reentrant_checkpointing_around_layers_is_refused_for_it_loses_gradients():
    model = BY_NAME["Llama"].causal_lm(attn_res_block_size=1).train()
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = checkpoint_wrapper(layer, CheckpointImpl.REENTRANT)
    inputs = model.get_input_embeddings()(tokens())
    with pytest.raises(RuntimeError, match=r"reentrant checkpointing around it.*use_reentrant=False"):
        model(inputs_embeds=inputs, labels=tokens(), use_cache=False).loss.backward()


def test_layers_after_the_output_site_are_refused():
    """Families whose model runs all of its layers, whatever the config says."""
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2}
    config = AttnResStableLmConfig(vocab_size=256, num_hidden_layers=4, attn_res_block_size=1, **sizes)
    model = AttnResStableLmForCausalLM(config).eval()
    model.config.num_hidden_layers -= 2
    with pytest.raises(RuntimeError, match=r"runs after the output site was read.*Cut model\.layers"):
        logits(model)


def test_a_layer_of_ones_own_keeps_its_forward():
    model = BY_NAME["Llama"].causal_lm()
    seen = []

    class Mine(type(model.model.layers[1])):
        def forward(self, hidden_states, *args, **kwargs):
            seen.append(self.layer_index)
            return super().forward(hidden_states, *args, **kwargs)

    expected = logits(model)
    model.model.layers[1].__class__ = Mine
    assert torch.equal(logits(model), expected)
    assert seen == [1]


def test_a_compiled_pass_may_break_within():
    """As it does for code that torch.compile does not understand: the rest of the pass finds its reader again."""
    torch.compiler.reset()
    model = BY_NAME["Llama"].causal_lm(num_hidden_layers=3)
    model.config.use_cache = False  # its growth alone would be compiled anew
    with torch.no_grad():
        expected = logits(model)
        for layer in model.model.layers:
            layer.register_forward_hook(lambda *_: torch._dynamo.graph_break())
        assert relative_error(torch.compile(model, backend="eager")(tokens()).logits, expected) <= 1e-5
