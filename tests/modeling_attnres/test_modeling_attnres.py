"""Whole models: numbers against the oracle, outputs, gradients, and the ways transformers runs a model."""

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import nn
from torch.utils._pytree import tree_leaves
from transformers import DynamicCache

from modeling_attnres import register_depth_reader
from modeling_attnres.depth_attention import EagerReader
from modeling_attnres.depth_readers import TwoPhaseReader
from tests.families import BY_NAME, CACHE, FAMILIES, randomise_depth, tokens
from tests.oracle import Recorder, expected_inputs, relative_error


TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 4e-3}


def check_against_oracle(model, tolerance, **inputs):
    """Hold every sublayer's input to the oracle's, read in two phases and one by one, and the depth weights, too."""
    mask = inputs.get("attention_mask")
    real = slice(None) if mask is None else mask.bool()
    for with_weights in (False, True):  # the weights need eager reads
        cached = copy.deepcopy(inputs) if with_weights is False else inputs  # a cache is advanced once
        with torch.no_grad(), Recorder(model.model) as record:
            outputs = model(**cached, output_depth_attentions=with_weights)
        expected, weights = expected_inputs(record, model.model.attn_res, model.config)
        assert len(expected) == 2 * model.config.num_hidden_layers + 1
        for site, value in enumerate(expected):
            assert relative_error(record.inputs[site][real], value[real]) <= tolerance, f"site {site}"
    assert len(outputs.depth_attentions) == len(weights)
    for found, weight in zip(outputs.depth_attentions, weights, strict=True):
        assert found.shape == weight.shape
        torch.testing.assert_close(found[real].double(), weight[real], rtol=0, atol=5e-6)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_every_sublayer_reads_what_the_oracle_says(family, layout, dtype):
    check_against_oracle(family.causal_lm(dtype=dtype, **layout), TOLERANCE[dtype], input_ids=tokens(length=40))


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("side", ["left", "right"])
def test_oracle_with_padding(family, mode, dtype, side):
    mask = torch.ones(2, 24, dtype=torch.long)
    mask[0, :7] = 0
    mask = mask if side == "left" else mask.flip(1)
    model = family.causal_lm(dtype=dtype, **mode)
    check_against_oracle(model, TOLERANCE[dtype], input_ids=tokens(), attention_mask=mask)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
def test_oracle_with_cached_decoding(family, layout, dtype):
    model = family.causal_lm(dtype=dtype, **layout)
    cache = DynamicCache(config=model.config)
    ids = tokens(length=20)
    for piece in (ids[:, :15], ids[:, 15:16], ids[:, 16:17]):
        check_against_oracle(model, TOLERANCE[dtype], input_ids=piece, **{CACHE: cache}, use_cache=True)


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize(("batch", "length"), [(1, 1), (2, 20), (1, 250)], ids=["T=1", "batch", "long"])
def test_two_phase_and_eager_read_the_same(family, layout, dtype, batch, length):
    """The implementation is chosen like attention's: at load, or later, and is no part of the checkpoint."""
    model = family.causal_lm(dtype=dtype, **layout)
    inputs = []
    for implementation in ("two_phase", "eager"):
        model.config.attn_res_implementation = implementation
        with torch.no_grad(), Recorder(model.model) as record:
            model(tokens(batch, length))
        inputs.append(record.inputs)
    # later sites also differ by what their sublayers made of the difference
    assert relative_error(inputs[0][1], inputs[1][1]) <= TOLERANCE[dtype]
    if dtype == torch.float32:
        assert relative_error(inputs[0][12], inputs[1][12]) <= 1e-4


def test_what_a_step_returned_stays(family, layout):
    """Nothing that a step returned changes with the steps after it."""
    model = family.causal_lm(**layout)
    cache, ids = DynamicCache(config=model.config), tokens(length=9)
    kept = []
    with torch.no_grad():
        for piece in ids.split([6, 1, 1, 1], dim=1):
            outputs = model(piece, **{CACHE: cache}, use_cache=True, output_hidden_states=True)
            kept += [(tensor, tensor.clone()) for tensor in (outputs.logits, *outputs.hidden_states)]
    assert all(torch.equal(tensor, before) for tensor, before in kept)


def test_the_implementation_is_set_at_load_and_not_saved(tmp_path):
    FAMILIES[0].causal_lm().save_pretrained(tmp_path)
    load = FAMILIES[0].ours("ForCausalLM").from_pretrained
    model = load(tmp_path, attn_res_implementation="eager")
    assert model.config.attn_res_implementation == "eager"
    model.save_pretrained(tmp_path)
    assert "implementation" not in (tmp_path / "config.json").read_text()
    assert load(tmp_path).config.attn_res_implementation == "auto"
    with pytest.raises(ValueError, match=r"must be one of 'auto', 'eager', 'general', .*, got 'fast'"):
        load(tmp_path, attn_res_implementation="fast")


@pytest.mark.parametrize("dtype", TOLERANCE, ids=["fp32", "bf16"])
@pytest.mark.parametrize("size", [1e-6, 1e4])
def test_extremes_stay_finite(family, mode, dtype, size):
    model = family.causal_lm(dtype=dtype, **mode)
    with torch.no_grad():
        for name, parameter in model.model.attn_res.named_parameters():
            if name.endswith("query"):
                parameter.mul_(1e3 / parameter.norm(dim=-1, keepdim=True))
        embeddings = model.get_input_embeddings()(tokens()) * size
        for implementation in ("two_phase", "eager"):
            model.config.attn_res_implementation = implementation
            assert model(inputs_embeds=embeddings).logits.isfinite().all()


def test_zero_queries_compute_what_the_base_computes(family, layout, base_checkpoint):
    """The lossless port in memory: zero queries read means, and a norm does not see the difference to the sum."""
    base = family.base("ForCausalLM").from_pretrained(base_checkpoint).eval()
    ported = family.ours("ForCausalLM").from_pretrained(base_checkpoint, attn_res_scale_norm_eps=True, **layout).eval()
    ids = tokens(length=60)
    with torch.no_grad():
        expected = base(ids).logits
        assert relative_error(ported(ids).logits, expected) <= 3e-6
        assert all(
            (weights - weights[..., :1]).abs().max() < 1e-6
            for weights in ported(ids, output_depth_attentions=True).depth_attentions
        )
    kwargs = {"max_new_tokens": 30, "do_sample": False, "eos_token_id": None}
    assert torch.equal(ported.generate(ids[:, :10], **kwargs), base.generate(ids[:, :10], **kwargs))


def test_scaled_eps_is_what_makes_the_port_lossless(family, mode):
    """With small activations eps matters: off, the port differs; on, it does not."""
    base = family.base_causal_lm(rms_norm_eps=1e-2, initializer_range=0.02)
    errors = {}
    for scaled in (False, True):
        model = family.ours("ForCausalLM")(
            family.config(rms_norm_eps=1e-2, initializer_range=0.02, attn_res_scale_norm_eps=scaled, **mode)
        ).eval()
        model.load_state_dict(base.state_dict(), strict=False)
        with torch.no_grad():
            errors[scaled] = relative_error(model(tokens()).logits, base(tokens()).logits)
    assert errors[True] <= 3e-6
    assert errors[False] > 1e-2


def test_mode_none_is_the_base_model(family):
    base = family.base_causal_lm()
    control = family.ours("ForCausalLM")(family.config(attn_res_mode="none")).eval()
    assert control.state_dict().keys() == base.state_dict().keys()
    control.load_state_dict(base.state_dict())
    ids, flags = tokens(), {"output_hidden_states": True, "labels": tokens()}
    found, expected = control(ids, **flags), base(ids, **flags)
    assert torch.equal(found.loss, expected.loss)
    assert torch.equal(found.logits, expected.logits)
    for one, other in zip(found.hidden_states, expected.hidden_states, strict=True):
        assert torch.equal(one, other)
    assert control(ids, output_depth_attentions=True).depth_attentions == ()
    generated = [m.generate(ids, max_new_tokens=8, do_sample=False) for m in (control, base)]
    assert torch.equal(*generated)


def test_outputs(family, mode):
    model = family.causal_lm(attn_implementation="eager", **mode)
    ids, layers = tokens(), model.config.num_hidden_layers
    flags = {"output_hidden_states": True, "output_attentions": True, "output_depth_attentions": True}
    outputs = model(ids, **flags)

    assert len(outputs.hidden_states) == layers + 1
    assert torch.equal(outputs.hidden_states[0], model.model.embed_tokens(ids))
    assert relative_error(outputs.hidden_states[-1], model.model(ids).last_hidden_state) <= 1e-5
    attention_layers = (
        sum(kind == "full_attention" for kind in getattr(model.config, "layer_types", None) or []) or layers
    )
    assert len(outputs.attentions) == attention_layers
    assert len(outputs.depth_attentions) == 2 * layers + 1
    for site, weights in enumerate(outputs.depth_attentions):
        assert weights.shape == (*ids.shape, model.config.attn_res_layout.num_sources(site))
        torch.testing.assert_close(weights.sum(-1), torch.ones(ids.shape))

    assert "depth_attentions" not in model(ids)
    as_tuple = model(ids, return_dict=False, **flags)
    assert isinstance(as_tuple, tuple)
    assert len(as_tuple) == len(outputs.to_tuple())
    from_base_model = model.model(ids, output_depth_attentions=True)
    assert torch.equal(from_base_model.depth_attentions[-1], outputs.depth_attentions[-1])

    model.config.output_depth_attentions = True
    assert len(model(ids).depth_attentions) == 2 * layers + 1
    within = []
    model.model.register_forward_hook(lambda module, args, output: within.append(output))
    model(ids, output_depth_attentions=False)
    assert "depth_attentions" not in within[0]  # nor made, to be dropped


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "KimiLinear"])
def test_router_logits(name, mode):
    model = BY_NAME[name].causal_lm(**mode)
    outputs = model(tokens(), output_router_logits=True)
    sparse = sum(hasattr(layer.mlp, "experts") for layer in model.model.layers)
    assert sparse > 0
    assert [logits.shape[0] for logits in outputs.router_logits] == [tokens().numel()] * sparse


@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe"])
def test_auxiliary_loss_is_the_bases(name, mode):
    """Zero queries route as the base does, so the load-balancing loss is the base's."""
    base = BY_NAME[name].base_causal_lm(router_aux_loss_coef=0.5)
    model = BY_NAME[name].ours("ForCausalLM")(
        BY_NAME[name].config(router_aux_loss_coef=0.5, attn_res_scale_norm_eps=True, **mode)
    )
    model.load_state_dict(base.state_dict(), strict=False)
    flags = {"labels": tokens(), "output_router_logits": True}
    found, expected = model.eval()(tokens(), **flags), base(tokens(), **flags)
    assert expected.aux_loss > 0
    torch.testing.assert_close(found.aux_loss, expected.aux_loss)
    torch.testing.assert_close(found.loss, expected.loss)


@pytest.mark.parametrize("implementation", ["eager", "batched_mm", "grouped_mm"])
@pytest.mark.parametrize("name", ["Mixtral", "Qwen3Moe", "DeepseekV3", "KimiLinear"])
def test_expert_implementations_agree(name, mode, implementation):
    model = BY_NAME[name].causal_lm(**mode)
    expected = model(tokens()).logits
    model.set_experts_implementation(implementation)
    assert model.config._experts_implementation == implementation
    torch.testing.assert_close(model(tokens()).logits, expected, rtol=1e-4, atol=1e-4)


def test_plans_and_fp32_lists_of_the_base_carry_over(family, mode):
    base, model = family.base_causal_lm(), family.causal_lm(**mode)
    for plan in ("tp_plan", "ep_plan"):
        assert getattr(model, plan, None) == getattr(base, plan, None)  # the oldest release has no ep_plan
    assert not model.pp_plan  # stages would have to exchange blocks, too
    assert model._keep_in_fp32_modules_strict == base._keep_in_fp32_modules_strict | {"attn_res"}
    assert model._no_split_modules == {type(model.model.layers[0]).__name__, "DepthAttention"}
    control = family.causal_lm(attn_res_mode="none")
    assert control._no_split_modules == {type(layer).__name__ for layer in base.model.layers}


def test_pipelines_of_transformers_are_refused():
    """They hand on one tensor. Without depth attention they may."""
    wanted = SimpleNamespace(pp_size=2)
    model, control = (BY_NAME["Llama"].causal_lm(attn_res_mode=mode) for mode in ("block", "none"))
    with pytest.raises(ValueError, match="pp_size=2"):
        model.maybe_distribute_model(model, wanted, None)
    assert control.maybe_distribute_model(control, wanted, None) is control  # no mesh: as it was


def test_loss_embeddings_and_kept_logits(family, mode):
    model = family.causal_lm(**mode)
    ids = tokens()
    outputs = model(ids, labels=ids)
    expected = nn.functional.cross_entropy(outputs.logits[:, :-1].flatten(0, 1), ids[:, 1:].flatten())
    torch.testing.assert_close(outputs.loss, expected)
    embedded = model(inputs_embeds=model.get_input_embeddings()(ids)).logits
    torch.testing.assert_close(embedded, outputs.logits)
    torch.testing.assert_close(model(ids, logits_to_keep=3).logits, outputs.logits[:, -3:])
    for inputs in ({}, {"input_ids": ids, "inputs_embeds": embedded}):
        with pytest.raises(ValueError, match="exactly one"):
            model(**inputs)


def test_eager_and_sdpa_agree(family, mode):
    ids = tokens()
    logits = [family.causal_lm(attn_implementation=name, **mode)(ids).logits for name in ("eager", "sdpa")]
    torch.testing.assert_close(*logits, rtol=1e-4, atol=1e-4)


def test_tied_embeddings(mode, tmp_path):
    model = FAMILIES[0].causal_lm(tie_word_embeddings=True, **mode)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    model.save_pretrained(tmp_path)
    again = FAMILIES[0].ours("ForCausalLM").from_pretrained(tmp_path)
    assert again.lm_head.weight is again.model.embed_tokens.weight
    torch.testing.assert_close(again(tokens()).logits, model(tokens()).logits)


@pytest.mark.parametrize("with_gradients", [False, True])
def test_padding_changes_nothing_for_real_tokens(family, layout, with_gradients):
    model = family.causal_lm(**layout).requires_grad_(with_gradients)
    ids = tokens(batch=1, length=12)
    alone = model(ids).logits
    padding, other = torch.zeros(1, 5, dtype=torch.long), tokens(batch=1, length=17, seed=9)
    for side in ("left", "right"):
        pieces = (padding, ids) if side == "left" else (ids, padding)
        batch = torch.cat([torch.cat(pieces, dim=1), other])
        mask = torch.ones_like(batch)
        real = slice(5, None) if side == "left" else slice(None, 12)
        mask[0] = 0
        mask[0, real] = 1
        positions = (mask.cumsum(-1) - 1).clamp(min=0)
        with torch.set_grad_enabled(with_gradients):
            padded = model(batch, attention_mask=mask, position_ids=positions).logits[:1, real]
        torch.testing.assert_close(padded, alone, rtol=1e-4, atol=1e-4)


def gradients(model, ids):
    model.zero_grad()
    model(ids, labels=ids).loss.backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters()}


def test_every_depth_parameter_gets_a_gradient(family, layout):
    model = family.causal_lm(**layout).train()
    found = gradients(model, tokens())
    for name, gradient in found.items():
        if ".attn_res." not in name:
            continue
        assert gradient.isfinite().all()
        for site, values in enumerate(gradient):
            assert (site == 0) == (not values.any()), f"{name}[{site}]"  # the first sublayer has one source


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_gradient(family, layout, reentrant):
    model = family.causal_lm(**layout).train()
    expected = gradients(model, tokens())
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    calls = []
    handle = model.model.layers[2].mlp.register_forward_pre_hook(lambda *_: calls.append(1))
    found = gradients(model, tokens())
    handle.remove()
    assert len(calls) == 2  # the pass and its recomputation
    for name, gradient in expected.items():
        assert relative_error(found[name], gradient) <= 1e-5 or not gradient.any(), name


def test_training_reads_give_the_gradients_of_plain_ones(family, layout):
    model = family.causal_lm(**layout).train()
    assert model.config.attn_res_implementation == "auto"
    found = gradients(model, tokens())
    model.config.attn_res_implementation = "eager"
    for name, gradient in gradients(model, tokens()).items():
        assert relative_error(found[name], gradient) <= 1e-4 or not gradient.any(), name


def test_second_order_gradients():
    """Refused with the way out, which works."""
    model = FAMILIES[0].causal_lm(num_hidden_layers=2, attn_implementation="eager").train()

    def gradient_of_gradient():
        query = model.model.attn_res.query
        (gradient,) = torch.autograd.grad(model(tokens(), labels=tokens()).loss, query, create_graph=True)
        return torch.autograd.grad(gradient.square().sum(), query)[0]

    with pytest.raises(RuntimeError, match="attn_res_implementation = 'eager'"):
        gradient_of_gradient()
    model.config.attn_res_implementation = "eager"
    assert gradient_of_gradient().abs().max() > 0


def test_a_checkpointed_layer_keeps_its_running_sum_only(layout):
    """And block sums once: what is saved for layers is a running sum each, and the closed blocks among them."""
    model = FAMILIES[0].causal_lm(num_hidden_layers=8, **layout).train()
    model.gradient_checkpointing_enable({"use_reentrant": True})
    ids, saved = tokens(batch=1, length=64), {}
    embeddings = model.get_input_embeddings()(ids).detach().requires_grad_()
    parameters = {parameter.data_ptr() for parameter in model.parameters()}

    def keep(tensor):
        if tensor.numel() >= embeddings.numel() and tensor.shape[-1] == embeddings.shape[-1]:
            saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        last = model.model(inputs_embeds=embeddings, use_cache=False).last_hidden_state
    of_layers = [tensor for pointer, tensor in saved.items() if pointer not in parameters]
    last.sum().backward()
    layers = model.config.num_hidden_layers
    sources = 2 * layers + 1 if model.config.attn_res_mode == "full" else layers + 1
    of_the_output = 4  # its read and the final norm, outside of any layer
    assert layers <= len(of_layers) <= sources + of_the_output


def reads_twice(reader_class):
    """A reader that reads each site twice from the same tensors and holds the second time to the first."""

    class ReadsTwice(reader_class):
        @staticmethod
        def read(running_sum_BTD, inputs):
            given = [tensor for tensor in tree_leaves((running_sum_BTD, inputs)) if tensor is not None]
            before = [tensor.clone() for tensor in given]
            first, again = (reader_class.read(running_sum_BTD, inputs) for _ in range(2))
            assert torch.equal(first[0], again[0])
            assert all(map(torch.equal, given, before))
            return again

    return ReadsTwice


@pytest.mark.parametrize(("name", "reader_class"), [("eager", EagerReader), ("two_phase", TwoPhaseReader)])
def test_a_pass_changes_nothing_it_received(family, mode, name, reader_class):
    """State is functional: a read of the same tensors returns the same, and all are left as they were to the end."""
    model = family.causal_lm(**mode)
    model.config.attn_res_implementation = name
    with torch.no_grad():
        expected = model(tokens(), use_cache=False).logits
    register_depth_reader("reads twice", reads_twice(reader_class))
    model.config.attn_res_implementation = "reads twice"
    received = []
    for layer in model.model.layers:
        layer.register_forward_pre_hook(lambda _, args: received.append((args[0], args[0].clone())))
    with torch.no_grad():
        found = model(tokens(), use_cache=False).logits
    assert len(received) == model.config.num_hidden_layers
    assert all(torch.equal(tensor, before) for tensor, before in received)
    assert torch.equal(found, expected)


def test_oracle_under_autocast(family, layout):
    """Sublayers run in bf16; the stream keeps the embedding's fp32, and depth attention its statistics."""
    with torch.autocast("cpu", dtype=torch.bfloat16):
        check_against_oracle(family.causal_lm(**layout), TOLERANCE[torch.float32], input_ids=tokens())


def test_is_one_graph(mode):
    """Traced without a break, in training too; that a compiled model decodes right is tested with generation."""
    model = FAMILIES[0].causal_lm(num_hidden_layers=3, **mode)
    expected = model(tokens()).logits
    compiled = torch.compile(copy.deepcopy(model), fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(tokens()).logits, expected, rtol=1e-4, atol=1e-4)
    for name, gradient in gradients(compiled, tokens()).items():
        assert gradient.isfinite().all(), name


def test_depth_parameters_stay_fp32_in_a_bf16_model(family, tmp_path):
    family.causal_lm().save_pretrained(tmp_path)
    model = family.ours("ForCausalLM").from_pretrained(tmp_path, dtype="bfloat16")
    assert model.dtype == torch.bfloat16
    assert model.model.layers[0].self_attn.o_proj.weight.dtype == torch.bfloat16
    assert {parameter.dtype for parameter in model.model.attn_res.parameters()} == {torch.float32}
    assert model(tokens()).logits.dtype == torch.bfloat16


def test_resizing_embeddings_leaves_depth_parameters(family):
    model = family.causal_lm()
    before = copy.deepcopy(model.model.attn_res.state_dict())
    model.resize_token_embeddings(120)
    assert model(tokens()).logits.shape[-1] == 120
    for name, value in model.model.attn_res.state_dict().items():
        assert torch.equal(value, before[name])


def test_new_models_start_with_zero_queries_and_unit_norms(family):
    model = family.ours("ForCausalLM")(family.config())
    for name, parameter in model.model.attn_res.named_parameters():
        assert torch.equal(parameter, torch.zeros_like(parameter) if "query" in name else torch.ones_like(parameter))
    randomise_depth(model)
    assert all(parameter.any() for parameter in model.model.attn_res.parameters())
