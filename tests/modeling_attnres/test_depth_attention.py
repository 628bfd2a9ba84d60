"""The plain reader's read: against the formula, its gradients, and the properties the mechanism promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_attnres import BlockLayout, DepthAttention, is_depth_parameter
from modeling_attnres.depth_attention import DepthParameters, EagerReader, source_logits
from modeling_attnres.depth_readers import TrainingReader, TwoPhaseReader
from modeling_attnres.residual_stream import ReplacePass
from tests.modeling_attnres.reads import (
    EPS,
    TOLERANCE,
    cases,
    draw_case,
    fast_read,
    gradients,
    plain_read,
    reader_with,
    roundings,
)
from tests.oracle import relative_error


@given(**cases, dtype=st.sampled_from(list(TOLERANCE)), with_running=st.booleans())
@settings(max_examples=150)
def test_a_read_equals_the_formula(dtype, with_running, **case):
    blocks, running, query = draw_case(**case, dtype=dtype)
    running = running if with_running else None
    query = query.to(torch.promote_types(dtype, torch.float32))
    found, weights = fast_read(blocks, running, query)
    in_float64 = [block.double() for block in blocks], None if running is None else running.double(), query.double()
    expected, expected_weights = plain_read(*in_float64)
    assert found.dtype == dtype
    assert found.isfinite().all()
    slack = roundings(case["query_norm"], dtype)
    assert relative_error(found, expected) <= TOLERANCE[dtype] + slack
    torch.testing.assert_close(weights.double(), expected_weights, rtol=0, atol=2 * slack)


@given(**cases, with_running=st.booleans(), asked=st.lists(st.booleans(), min_size=11, max_size=11))
@settings(max_examples=100)
def test_gradients_equal_those_of_the_formula(with_running, asked, **case):
    """Written by hand and by autograd, whichever of the sources, running sum and query want one."""
    blocks, running, query = draw_case(**case, dtype=torch.float64)
    leaves = [query.double(), *([running] if with_running else []), *blocks]
    for leaf, wanted in zip(leaves, [*asked[:-1], True][-len(leaves) :]):
        leaf.requires_grad_(wanted)

    def reading(read, **how):
        return lambda query, *sources: read(
            list(sources[with_running:]), sources[0] if with_running else None, query, **how
        )[0]

    # a gradient is a difference of terms as large as the query and, for the query's, the sources
    largest_term = (1 + case["query_norm"]) * max(1.0, case["size"])
    expected = gradients(reading(plain_read), leaves)
    for reader_class in (TrainingReader, EagerReader):
        found = gradients(reading(fast_read, reader_class=reader_class), leaves)
        for one, other in zip(found, expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12 * largest_term)


@given(**cases)
@settings(max_examples=50)
def test_weights_are_a_distribution_and_the_input_is_convex(**case):
    blocks, running, query = draw_case(**case)
    output, weights = fast_read(blocks, running, query)
    assert (weights >= 0).all()
    torch.testing.assert_close(weights.sum(-1), torch.ones(weights.shape[:-1]), rtol=0, atol=1e-6)
    stacked = torch.stack([*blocks, running])
    slack = 1e-5 * stacked.abs().max()
    assert (output <= stacked.max(0).values + slack).all()
    assert (output >= stacked.min(0).values - slack).all()


@given(**cases, data=st.data())
@settings(max_examples=50)
def test_permuting_blocks_permutes_weights_only(data, **case):
    blocks, running, query = draw_case(**case)
    order = data.draw(st.permutations(range(len(blocks))))
    output, weights = fast_read(blocks, running, query)
    permuted_output, permuted_weights = fast_read([blocks[i] for i in order], running, query)
    torch.testing.assert_close(permuted_weights, weights[..., [*order, len(blocks)]], rtol=1e-5, atol=1e-6)
    assert relative_error(permuted_output, output) <= 2e-6


@given(**cases | {"size": st.just(1.0), "query_norm": st.just(2.0)}, factor=st.sampled_from([0.1, 7.0, 1e4]))
@settings(max_examples=50)
def test_weights_do_not_depend_on_the_size_of_a_source(factor, **case):
    blocks, running, query = draw_case(**case | {"width": max(8, case["width"])})
    _, weights = fast_read(blocks, running, query)
    _, scaled = fast_read([blocks[0] * factor, *blocks[1:]], running, query)
    torch.testing.assert_close(scaled, weights, rtol=0, atol=2e-4)  # up to the key norm's eps


@given(**cases, data=st.data())
@settings(max_examples=50)
def test_reads_of_parts_merge_to_the_read_of_the_whole(data, **case):
    """Online softmax is associative: weights of a part, times the part's share, are the weights of the whole."""
    blocks, running, query = draw_case(**case, dtype=torch.float64)
    blocks = [*blocks, running]
    query = query.double()
    split = data.draw(st.integers(1, len(blocks) - 1))
    whole, _ = fast_read(blocks, None, query)
    scaled, scaled_eps = query[None] * query.shape[-1] ** 0.5, torch.tensor(query.shape[-1] * EPS, dtype=torch.float64)
    logits = torch.cat([source_logits(block, scaled, scaled_eps) for block in blocks], dim=-1)
    parts = [(blocks[:split], logits[..., :split]), (blocks[split:], logits[..., split:])]
    shares = torch.stack([part_logits.logsumexp(-1) for _, part_logits in parts], -1).softmax(-1)
    merged = sum(fast_read(part, None, query)[0] * shares[..., i, None] for i, (part, _) in enumerate(parts))
    assert relative_error(merged, whole) <= 1e-12


def test_zero_queries_read_the_mean():
    blocks, running, _ = draw_case(0, num_blocks=4)
    output, weights = fast_read(blocks, running, torch.zeros(16))
    assert torch.equal(weights, torch.full_like(weights, 0.2))
    assert relative_error(output, torch.stack([*blocks, running]).mean(0)) <= 1e-6


def test_a_zero_source_has_logit_zero_and_finite_gradients():
    block = torch.zeros(1, 2, 8, requires_grad=True)
    query = torch.randn(8, requires_grad=True)
    logits = source_logits(block, query[None], torch.tensor(8 * EPS))
    assert torch.equal(logits, torch.zeros_like(logits))
    logits.sum().backward()
    assert block.grad.isfinite().all()
    assert query.grad.isfinite().all()


def test_statistics_stay_in_fp32_under_autocast():
    blocks, running, query = draw_case(0, num_blocks=3, query_norm=5.0)
    expected, _ = fast_read(blocks, running, query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = fast_read(blocks, running, query)
    assert relative_error(found, expected) <= 2e-6


def test_effective_queries_are_query_times_norm_in_site_order():
    module = DepthAttention(num_sites=5, hidden_size=3)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 10.0 * index)
    expected = [module.query[site] * module.norm[site] for site in range(5)]
    torch.testing.assert_close(module().queries_SD, torch.stack(expected) * 3**0.5)
    assert {name: list(value.shape) for name, value in module.state_dict().items()} == {
        "query": [5, 3],
        "norm": [5, 3],
    }


@pytest.mark.parametrize("reader_class", [EagerReader, TrainingReader, TwoPhaseReader])
@pytest.mark.parametrize(
    ("dtype", "statistics"), [("bfloat16", "float32"), ("float32", "float32"), ("float64", "float64")]
)
def test_queries_take_the_statistics_dtype_of_the_embedding(reader_class, dtype, statistics):
    blocks, _, query = draw_case(0, num_blocks=2, dtype=getattr(torch, dtype))
    reader, site = reader_with(blocks, query, reader_class)
    assert reader.inputs_for(site).query_D.dtype == getattr(torch, statistics)


def test_depth_parameters_are_known_by_name_whatever_the_model_is_wrapped_in():
    for name in ("attn_res.query", "module.model.attn_res.norm", "base_model.model.attn_res.modules_to_save.query"):
        assert is_depth_parameter(name)
    for name in ("model.layers.0.self_attn.q_proj.weight", "model.attn_resized.query"):
        assert not is_depth_parameter(name)


@pytest.mark.parametrize("reader_class", [EagerReader, TrainingReader, TwoPhaseReader])
def test_a_reader_follows_the_newest_hidden_state_to_its_device(reader_class):
    """As in a model spread over devices; the meta device stands for another one."""
    reader = reader_class(DepthParameters(torch.randn(5, 8)), EPS, BlockLayout(2, (0, 1)))
    depth_pass = ReplacePass(reader)

    def devices(site):
        flat = [one for part in reader.inputs_for(site) for one in (part if isinstance(part, tuple) else (part,))]
        return {tensor.device.type for tensor in flat}

    depth_pass.enter_layer(0, torch.randn(1, 3, 8))
    assert devices(0) == devices(1) == {"cpu"}
    depth_pass.leave_layer(torch.randn(1, 3, 8))
    depth_pass.enter_layer(1, torch.randn(1, 3, 8, device="meta"))
    assert devices(2) == {"meta"}
    reader.move_to(torch.device("meta"))
    assert devices(4) == {"meta"}
    assert depth_pass.read_output(torch.randn(1, 3, 8, device="meta")).device.type == "meta"


@pytest.mark.parametrize("full", [False, True])
@pytest.mark.parametrize("reader_class", [EagerReader, TrainingReader, TwoPhaseReader])
def test_blocks_are_the_closed_ones_in_order(reader_class, full):
    """What a pipeline stage would hand on: the embedding first, each rounded to the dtype of the model."""
    layout = BlockLayout(2, (0, 1), full=full)
    reader = reader_class(DepthParameters(torch.randn(layout.num_sites, 8)), EPS, layout)
    depth_pass = ReplacePass(reader)
    parts = [torch.randn(1, 3, 8) for _ in range(5)]
    depth_pass.enter_layer(0, parts[0].bfloat16())
    handed_over = depth_pass.leave_layer(parts[2], kept_apart=[parts[1]] if full else [])
    assert handed_over.dtype == torch.bfloat16
    depth_pass.enter_layer(1, handed_over)
    expected = [parts[0], *([parts[1]] if full else []), parts[2]]
    assert reader.num_blocks == len(reader.blocks) == len(expected)
    assert all(torch.equal(found, part.bfloat16()) for found, part in zip(reader.blocks, expected, strict=True))
    reader.drop_blocks(1)
    assert reader.num_blocks == len(reader.blocks) == 1
