"""What users' hooks see and do: what they see and do in the base family."""

import pytest
import torch
from torch import nn

from tests.families import BY_NAME, tokens
from tests.oracle import relative_error


LAYOUTS = {"block": {"attn_res_block_size": 2}, "full": {"attn_res_mode": "full"}}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
NUM_LAYERS = 6


@pytest.fixture(params=["Llama", "Qwen3Moe", "KimiLinear"])
def family(request):
    return BY_NAME[request.param]


@pytest.fixture(params=LAYOUTS.values(), ids=LAYOUTS.keys())
def layout(request):
    """Blocks of two layers, so that every other layer opens one; or Full, where every layer does."""
    return request.param


@pytest.fixture(params=DTYPES.values(), ids=DTYPES.keys())
def dtype(request):
    return request.param


@pytest.fixture
def base(family):
    return family.base_causal_lm()


def ported(family, base, **layout):
    """The base with zero queries: it computes what the base computes."""
    model = family.ours("ForCausalLM")(family.config(attn_res_scale_norm_eps=True, **layout)).eval()
    model.load_state_dict(base.state_dict(), strict=False)
    return model


def direction(seed=5):
    """What a steering hook adds: large beside a hidden state of these models."""
    return torch.randn(32, generator=torch.Generator().manual_seed(seed))


def add_to_output(layer):
    return layer.register_forward_hook(lambda _, args, output: output + direction().to(output.dtype))


def add_to_output_in_place(layer):
    def hook(_, args, output):
        output += direction().to(output.dtype)

    return layer.register_forward_hook(hook)


def add_to_input(layer):
    return layer.register_forward_pre_hook(lambda _, args: (args[0] + direction().to(args[0].dtype), *args[1:]))


def add_to_input_in_place(layer):
    def hook(_, args):
        args[0].add_(direction().to(args[0].dtype))

    return layer.register_forward_pre_hook(hook)


STEERING = [add_to_output, add_to_output_in_place, add_to_input, add_to_input_in_place]


def logits_of(model, steer=None, index=0):
    handle = steer(model.model.layers[index]) if steer else None
    with torch.no_grad():
        logits = model(tokens()).logits
    if handle:
        handle.remove()
    return logits


def test_a_layer_returns_one_tensor_in_the_dtype_of_the_model(family, layout, dtype):
    model, outputs = family.causal_lm(dtype=dtype, **layout), []
    for layer in model.model.layers:
        layer.register_forward_hook(lambda _, args, output: outputs.append(output))
    for gradients in (False, True):
        outputs.clear()
        with torch.set_grad_enabled(gradients):
            hidden_states = model(tokens(), output_hidden_states=True).hidden_states
        assert len(outputs) == NUM_LAYERS
        for output in outputs:
            assert isinstance(output, torch.Tensor)
            assert (output.shape, output.dtype) == ((*tokens().shape, 32), dtype)
        assert {one.dtype for one in hidden_states} == {dtype}
        for one, other in zip(hidden_states[1:], outputs[:-1]):  # the last hidden state is the final norm's
            assert torch.equal(one, other)


@pytest.mark.parametrize("steer", STEERING)
def test_steering_does_what_it_does_in_the_base(family, layout, base, steer):
    model = ported(family, base, **layout)
    plain = logits_of(base)
    for index in range(NUM_LAYERS):
        expected = logits_of(base, steer, index)
        assert relative_error(expected, plain) > 0.1
        assert relative_error(logits_of(model, steer, index), expected) <= 1e-5, f"layer {index}"
    assert relative_error(logits_of(model), plain) <= 3e-6  # and leaves nothing behind


@pytest.mark.parametrize("skipped", [*((index,) for index in range(NUM_LAYERS)), (0, 1), (2, 3), (1, 4), (4, 5)])
def test_a_hook_that_returns_a_layers_input_skips_it(family, layout, base, skipped):
    model = ported(family, base, **layout)

    def logits_without(model):
        handles = [model.model.layers[one].register_forward_hook(lambda _, args, __: args[0]) for one in skipped]
        logits = logits_of(model)
        for handle in handles:
            handle.remove()
        return logits

    expected = logits_without(base)
    assert relative_error(expected, logits_of(base)) > 0.01
    assert relative_error(logits_without(model), expected) <= 3e-6


@pytest.mark.parametrize("gradients", [False, True])
@pytest.mark.parametrize("steer", STEERING)
def test_steering_in_bf16(layout, steer, gradients):
    """As near to fp32 as the base in bf16 is."""
    if gradients and steer is add_to_input_in_place:
        pytest.skip("no in-place change of what is needed for gradients, in the base neither")
    family = BY_NAME["Llama"]
    base = family.base_causal_lm()
    model, base_bf16 = ported(family, base, **layout).bfloat16(), family.base_causal_lm().bfloat16()

    def logits(model, index):
        handle = steer(model.model.layers[index])
        with torch.set_grad_enabled(gradients):
            found = model(tokens()).logits.detach()
        handle.remove()
        return found

    for index in range(NUM_LAYERS):
        exact = logits_of(base, steer, index)
        allowed = 2 * relative_error(logits(base_bf16, index), exact)
        assert relative_error(logits(model, index), exact) <= allowed, f"layer {index}"


@pytest.mark.parametrize("steer", STEERING)
def test_steering_takes_effect_with_trained_queries(family, layout, dtype, steer):
    model = family.causal_lm(dtype=dtype, **layout)
    plain = logits_of(model)
    for index in range(NUM_LAYERS):
        assert relative_error(logits_of(model, steer, index), plain) > 0.05, f"layer {index}"
    assert torch.equal(logits_of(model), plain)


def captured(model, **kwargs):
    """By name: every tensor that hooks on layers and their norms, attention and MLP were given, and a copy of it."""
    kept, handles = {}, []

    def keep(name):
        def hook(module, args, output):
            given = {"in": args[0] if args else None, "out": output[0] if isinstance(output, tuple) else output}
            kept.update({f"{name} {end}": (x, x.clone()) for end, x in given.items() if isinstance(x, torch.Tensor)})

        return hook

    for index, layer in enumerate(model.model.layers):
        parts = {"layer": layer} | {
            part: getattr(layer, part) for part in ("input_layernorm", "post_attention_layernorm", "self_attn", "mlp")
        }
        handles += [part.register_forward_hook(keep(f"{name} {index}")) for name, part in parts.items()]
    with torch.no_grad():
        model(tokens(), **kwargs)
    for handle in handles:
        handle.remove()
    return kept


def test_a_tensor_kept_by_a_hook_is_never_overwritten(family, layout, dtype):
    """And is what the plain reader's pass gives at the same place. In bf16 a rounding may choose another expert."""
    model = family.causal_lm(dtype=dtype, **layout)
    model.config.attn_res_implementation = "two_phase"
    found = captured(model, use_cache=True)
    model.config.attn_res_implementation = "eager"
    expected = captured(model, use_cache=True)
    assert found.keys() == expected.keys()
    assert len(found) >= NUM_LAYERS * 8
    for name, (tensor, at_the_time) in found.items():
        assert torch.equal(tensor, at_the_time), name
        if dtype == torch.float32:
            assert relative_error(tensor, expected[name][0]) <= 1e-4, name
        elif family.name == "Llama":
            assert relative_error(tensor, expected[name][0]) <= 1 / 64, name


@pytest.mark.parametrize("implementation", ["two_phase", "eager"])
def test_what_hooks_see_equals_what_they_see_in_the_base(family, layout, base, implementation):
    """Norms' outputs, and what attention and MLP are given and give. Norms' inputs are means, the base's are sums."""
    model = ported(family, base, **layout)
    model.config.attn_res_implementation = implementation
    found, expected = captured(model), captured(base)
    names = [name for name in expected if not name.startswith("layer") and not name.endswith("norm 0 in")]
    names = [name for name in names if "layernorm" not in name or name.endswith("out")]
    assert len(names) >= NUM_LAYERS * 5
    for name in names:
        assert relative_error(found[name][0], expected[name][0]) <= 1e-5, name


def test_logit_lens(family, layout, dtype):
    """`lm_head(norm(h))` of hidden states and of what a hook on a layer kept."""
    model = family.causal_lm(dtype=dtype, **layout)
    kept = [tensor for name, (tensor, _) in captured(model).items() if name.startswith("layer") and "out" in name]
    with torch.no_grad():
        hidden_states = model(tokens(), output_hidden_states=True).hidden_states
        for hidden_state in [*kept, *hidden_states]:
            logits = model.lm_head(model.model.norm(hidden_state))
            assert logits.dtype == dtype
            assert logits.isfinite().all()


def gradients_at_layers(model, how):
    """The loss's gradient with respect to the output of each layer."""
    found, handles = {}, []

    def retain(index):
        def hook(module, args, output):
            output.retain_grad()
            found[index] = output

        return hook

    def backward(index):
        def hook(module, grad_input, grad_output):
            found[index] = grad_output[0]

        return hook

    for index, layer in enumerate(model.model.layers):
        register = layer.register_forward_hook if how is retain_grad else layer.register_full_backward_hook
        handles.append(register((retain if how is retain_grad else backward)(index)))
    outputs = model(tokens(), labels=tokens())
    outputs.loss.backward()
    for handle in handles:
        handle.remove()
    assert sorted(found) == list(range(NUM_LAYERS))
    return [found[i].grad if how is retain_grad else found[i] for i in range(NUM_LAYERS)], outputs.logits.detach()


retain_grad, full_backward_hook = "retain_grad", "full backward hook"


@pytest.mark.parametrize("how", [retain_grad, full_backward_hook])
def test_gradients_at_layers_are_those_of_the_base(family, layout, base, how):
    found, _ = gradients_at_layers(ported(family, base, **layout), how)
    expected, _ = gradients_at_layers(base, how)
    for index, (one, other) in enumerate(zip(found, expected, strict=True)):
        assert relative_error(one, other) <= 1e-4, f"layer {index}"


@pytest.mark.parametrize("how", [retain_grad, full_backward_hook])
def test_gradients_at_layers_in_bf16(layout, how):
    """In the dtype of the model, and as near to fp32 as the base's in bf16 are."""
    family = BY_NAME["Llama"]
    exact, _ = gradients_at_layers(family.base_causal_lm(), how)
    of_base, _ = gradients_at_layers(family.base_causal_lm().bfloat16(), how)
    found, _ = gradients_at_layers(ported(family, family.base_causal_lm(), **layout).bfloat16(), how)
    for index in range(NUM_LAYERS):
        assert found[index].dtype == torch.bfloat16
        allowed = 2 * relative_error(of_base[index], exact[index])
        assert relative_error(found[index], exact[index]) <= allowed, f"layer {index}"


@pytest.mark.parametrize("how", [retain_grad, full_backward_hook])
def test_looking_changes_no_number(family, layout, dtype, how):
    model = family.causal_lm(dtype=dtype, **layout)
    expected = model(tokens()).logits
    _, found = gradients_at_layers(model, how)
    assert torch.equal(found, expected)


def test_full_backward_hooks_may_change_gradients(layout):
    """As in the base: a hook that stops the gradient at one layer leaves what runs before it without one."""
    family = BY_NAME["Llama"]
    base = family.base_causal_lm()
    for model in (base, ported(family, base, **layout)):
        model.model.layers[3].register_full_backward_hook(lambda _, given, __: (torch.zeros_like(given[0]),))
        model(tokens(), labels=tokens()).loss.backward()
        later, earlier = model.model.layers[4].mlp.up_proj, model.model.layers[3 - 1].mlp.up_proj
        assert later.weight.grad.any()
        assert earlier.weight.grad.isfinite().all()
        if model is base:
            assert not earlier.weight.grad.any()


def test_a_hook_may_replace_a_layers_output_by_another_module(layout):
    """A module called by a hook, as adapters do it."""
    family = BY_NAME["Llama"]
    base = family.base_causal_lm()
    model = ported(family, base, **layout)
    adapter = nn.Linear(32, 32, bias=False)

    def steer(layer):
        return layer.register_forward_hook(lambda _, args, output: output + adapter(direction()))

    for index in (1, 2, 5):
        assert relative_error(logits_of(model, steer, index), logits_of(base, steer, index)) <= 1e-5
