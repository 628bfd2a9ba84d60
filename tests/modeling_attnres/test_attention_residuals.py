"""The depth read alone: against its plain twin, its gradients, and the properties the mechanism promises."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_attnres.attention_residuals import (
    DepthAttention,
    DepthRead,
    EagerSources,
    TwoPhaseSources,
    depth_read,
    source_logits,
)
from tests.oracle import relative_error


EPS = 1e-6
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-3}


def draw_case(seed, num_blocks, tokens=3, width=16, query_norm=1.0, size=1.0, dtype=torch.float32, batch=2):
    """Closed blocks, a running sum and a query."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [(torch.randn(batch, tokens, width, generator=generator) * size).to(dtype) for _ in range(num_blocks)]
    running = (torch.randn(batch, tokens, width, generator=generator) * size).to(dtype)
    query = torch.randn(width, generator=generator)
    return blocks, running, query / query.norm() * query_norm


def fast_read(blocks, running, query):
    """The read as a model does it: close the blocks, then read at one site."""
    query = query.to(torch.promote_types(blocks[0].dtype, torch.float32)) * query.shape[-1] ** 0.5
    sources = EagerSources(query[None], EPS)
    for block in blocks:
        sources.close(block)
    read, weights = DepthRead()(running, *sources.at(0), with_weights=True)
    return read.to(blocks[0].dtype), weights


def plain_read(blocks, running, query):
    sources = blocks if running is None else [*blocks, running]
    return depth_read(sources, query, torch.ones_like(query), EPS)


cases = {
    "seed": st.integers(0, 2**31),
    "num_blocks": st.integers(1, 9),
    "tokens": st.integers(1, 5),
    "width": st.integers(1, 40),
    "query_norm": st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e3]),
    "size": st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
}


@given(**cases, dtype=st.sampled_from(list(TOLERANCE)), with_running=st.booleans())
@settings(max_examples=150)
def test_fast_read_equals_its_plain_twin(dtype, with_running, **case):
    blocks, running, query = draw_case(**case, dtype=dtype)
    running = running if with_running else None
    query = query.to(torch.promote_types(dtype, torch.float32))
    found, weights = fast_read(blocks, running, query)
    in_float64 = [block.double() for block in blocks], None if running is None else running.double(), query.double()
    expected, expected_weights = plain_read(*in_float64)
    assert found.dtype == dtype
    assert found.isfinite().all()
    # A logit of size q is known to q roundings, and a weight to as many.
    roundings = max(1.0, case["query_norm"]) * (1e-14 if dtype == torch.float64 else 2e-6)
    assert relative_error(found, expected) <= TOLERANCE[dtype] + roundings
    torch.testing.assert_close(weights.double(), expected_weights, rtol=0, atol=2 * roundings)


@given(**cases, with_running=st.booleans())
@settings(max_examples=50)
def test_gradients_equal_those_of_the_plain_twin(with_running, **case):
    def gradients(read):
        blocks, running, query = draw_case(**case, dtype=torch.float64)
        query = query.double()
        leaves = [*blocks, query] + ([running] if with_running else [])
        for leaf in leaves:
            leaf.requires_grad_()
        output, _ = read(blocks, running if with_running else None, query)
        output.sin().sum().backward()
        return [leaf.grad for leaf in leaves]

    # a gradient is a difference of terms as large as the query and, for the query's, the sources
    largest_term = (1 + case["query_norm"]) * max(1.0, case["size"])
    for found, expected in zip(gradients(fast_read), gradients(plain_read), strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-12 * largest_term)


@pytest.mark.parametrize("with_running", [False, True])
def test_gradcheck(with_running):
    blocks, running, query = draw_case(0, num_blocks=3, tokens=2, width=5, dtype=torch.float64, batch=1)
    running = running.requires_grad_() if with_running else None
    leaves = [*(block.requires_grad_() for block in blocks), query.double().requires_grad_()]

    def read(*inputs):
        return fast_read(list(inputs[:-1]), running, inputs[-1])[0]

    assert torch.autograd.gradcheck(read, leaves)
    if with_running:
        assert torch.autograd.gradcheck(lambda r: fast_read(blocks, r, leaves[-1])[0], [running])


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
    scaled, floor = query[None] * query.shape[-1] ** 0.5, torch.tensor(query.shape[-1] * EPS, dtype=torch.float64)
    logits = torch.cat([source_logits(block, scaled, floor) for block in blocks], dim=-1)
    parts = [(blocks[:split], logits[..., :split]), (blocks[split:], logits[..., split:])]
    shares = torch.stack([part_logits.logsumexp(-1) for _, part_logits in parts], -1).softmax(-1)
    merged = sum(fast_read(part, None, query)[0] * shares[..., i, None] for i, (part, _) in enumerate(parts))
    assert relative_error(merged, whole) <= 1e-12


@given(
    **cases,
    dtype=st.sampled_from(list(TOLERANCE)),
    group=st.integers(1, 4),
    sublayers_kept_apart=st.booleans(),
    at_once=st.booleans(),
)
@settings(max_examples=100)
def test_two_phases_equal_reads_one_by_one(dtype, group, sublayers_kept_apart, at_once, **case):
    """Blocks closed at the start of a group, or (Full) sources within it; phase 1 in one piece or in several."""
    values, running, _ = draw_case(**case, dtype=dtype)
    layers = len(values)
    generator = torch.Generator().manual_seed(case["seed"])
    queries = torch.randn(2 * layers + 1, case["width"], generator=generator)
    queries = queries * case["query_norm"] / queries.norm(dim=-1, keepdim=True)
    queries = queries.to(torch.promote_types(dtype, torch.float32)) * case["width"] ** 0.5
    groups = tuple(range(0, layers, group))
    closing = set(range(layers)) if sublayers_kept_apart else set(groups)
    eager, two_phase = EagerSources(queries, EPS), TwoPhaseSources(queries, EPS, groups, len(closing))
    if not at_once:
        two_phase.phase_1_bytes = 0
    read = DepthRead()
    for layer in range(layers):
        if layer in closing:
            eager.close(values[layer])
            two_phase.close(values[layer])
        for site in (2 * layer, 2 * layer + 1):
            sum_here = None if site == 2 * layer and layer in closing else running
            found = read(sum_here, *two_phase.at(site))[0].to(dtype)
            expected = read(sum_here, *eager.at(site), with_weights=True)[0].to(dtype)
            assert found.isfinite().all()
            roundings = max(1.0, case["query_norm"]) * (1e-14 if dtype == torch.float64 else 2e-6)
            assert relative_error(found, expected) <= 2 * TOLERANCE[dtype] + roundings, f"site {site}"


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


def test_effective_queries_are_query_times_norm_in_site_order():
    module = DepthAttention(num_layers=2, hidden_size=3)
    with torch.no_grad():
        for index, parameter in enumerate(module.parameters()):
            parameter.copy_(torch.arange(parameter.numel()).reshape(parameter.shape) + 10.0 * index)
    queries = module(torch.zeros(1, 1, 3))
    expected = [
        module.attention_query[0, 0] * module.attention_norm[0],
        module.mlp_query[0, 0] * module.mlp_norm[0],
        module.attention_query[1, 0] * module.attention_norm[1],
        module.mlp_query[1, 0] * module.mlp_norm[1],
        module.output_query[0] * module.output_norm,
    ]
    torch.testing.assert_close(queries, torch.stack(expected) * 3**0.5)
    assert module(torch.zeros(1, 1, 3, dtype=torch.bfloat16)).dtype == torch.float32
    assert module(torch.zeros(1, 1, 3, dtype=torch.float64)).dtype == torch.float64


def test_statistics_stay_in_fp32_under_autocast():
    blocks, running, query = draw_case(0, num_blocks=3, query_norm=5.0)
    expected, _ = fast_read(blocks, running, query)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        found, _ = fast_read(blocks, running, query)
    assert relative_error(found, expected) <= 2e-6


@pytest.mark.parametrize("kind", ["eager", "two_phase"])
def test_sources_follow_the_newest_block_to_its_device(kind):
    """As in a model spread over devices; the meta device stands for another one."""
    queries = torch.randn(5, 8)
    sources = EagerSources(queries, EPS) if kind == "eager" else TwoPhaseSources(queries, EPS, (0, 1), 2)
    sources.close(torch.randn(1, 3, 8))
    sources.at(0)
    sources.close(torch.randn(1, 3, 8, device="meta"))
    assert {tensor.device.type for tensor in sources.at(2)} == {"meta"}
    sources.move_to(torch.device("meta"))
    assert {tensor.device.type for tensor in sources.at(4)} == {"meta"}
