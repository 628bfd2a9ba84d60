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


def fast_read(blocks, running, query, way="plain"):
    """The read as a model does it: close the blocks, then read at one site."""
    query = query.to(torch.promote_types(blocks[0].dtype, torch.float32)) * query.shape[-1] ** 0.5
    sources = EagerSources(query[None], EPS)
    for block in blocks:
        sources.close(block)
    read, weights = DepthRead()(running, *sources.at(0), way=way)
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


def gradients(read, leaves, function=torch.sin):
    """The gradients of a scalar function of a read: zeros of those that nothing depends on or nobody asked for."""
    leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
    function(read(*leaves)).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]


@given(**cases, with_running=st.booleans(), asked=st.lists(st.booleans(), min_size=11, max_size=11))
@settings(max_examples=100)
def test_gradients_equal_those_of_the_plain_twin(with_running, asked, **case):
    """Of the lean read and of the plain operations, whichever of the sources, running sum and query want one."""
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
    for way in ("lean", "plain"):
        for one, other in zip(gradients(reading(fast_read, way=way), leaves), expected, strict=True):
            torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-12 * largest_term)


@given(**cases | {"size": st.sampled_from([1e-2, 1.0, 1e4])}, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=50)
def test_lean_gradients_in_lower_precision(dtype, **case):
    """Against float64, as one vector: a gradient of a sharp softmax is a small difference of large terms."""
    blocks, running, query = draw_case(**case, dtype=dtype)
    leaves = [leaf.requires_grad_() for leaf in (query.float(), running, *blocks)]

    def found(query, running, *blocks):
        return fast_read(list(blocks), running, query, way="lean")[0]

    def expected(query, running, *blocks):
        return plain_read(list(blocks), running, query)[0]

    def weighted(read):
        return read.double() * torch.linspace(-1, 1, read.numel(), dtype=torch.float64).view(read.shape)

    exact = gradients(expected, [leaf.detach().double().requires_grad_() for leaf in leaves], weighted)
    for one, other in zip(gradients(found, leaves, weighted), exact, strict=True):
        assert one.isfinite().all()
        slack = TOLERANCE[dtype] * max(1.0, case["query_norm"]) * (1 + case["query_norm"]) * 4
        assert (one.double() - other).norm() <= slack * max(1.0, case["size"]) * max(1.0, other.norm().item())


@pytest.mark.parametrize("way", ["lean", "plain"])
@pytest.mark.parametrize("with_running", [False, True])
def test_gradcheck(with_running, way):
    blocks, running, query = draw_case(0, num_blocks=3, tokens=2, width=5, dtype=torch.float64, batch=1)
    leaves = [leaf.requires_grad_() for leaf in (query.double(), running, *blocks)]

    def read(query, running, *blocks):
        return fast_read(list(blocks), running if with_running else None, query, way)[0]

    assert torch.autograd.gradcheck(read, leaves)
    if way == "plain":
        assert torch.autograd.gradgradcheck(read, leaves)
    else:
        with pytest.raises(RuntimeError, match="first-order gradients only"):
            torch.autograd.grad(read(*leaves).sum(), leaves[0], create_graph=True)


def test_the_lean_read_saves_its_sources_and_scalars_per_token():
    """No tensor of the size of a source is kept that was not there before."""
    blocks, running, query = draw_case(0, num_blocks=4, tokens=7, width=64, dtype=torch.bfloat16)
    leaves = [leaf.requires_grad_() for leaf in (query.float(), running.float(), *blocks)]
    query_D, running_sum, *blocks = leaves
    sources = EagerSources(query_D[None], EPS)
    for block in blocks:
        sources.close(block)
    site_inputs, kept = sources.at(0), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        DepthRead()(running_sum, *site_inputs, way="lean")
    there_before = {tensor.data_ptr() for tensor in (running_sum, *site_inputs)}
    new = [tensor for tensor in kept if tensor.data_ptr() not in there_before]
    batch, tokens, _ = running_sum.shape
    assert len(kept) > len(blocks)
    assert sum(tensor.numel() for tensor in new) <= batch * tokens * (len(blocks) + 1 + 2)


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
    layers_a_block=st.integers(1, 4),
    sublayers_kept_apart=st.booleans(),
    bytes_at_once=st.sampled_from([0, 2**9, 2**10, 2**11, 2**28]),
)
@settings(max_examples=100)
def test_two_phases_equal_reads_one_by_one(dtype, layers_a_block, sublayers_kept_apart, bytes_at_once, **case):
    """Blocks, or (Full) all sublayers apart; phase 1 in one piece, or in several tiles and for a few sites at a time.

    Buffers are reused from block to block: a read is compared when it is made, and what it was made of must stay.
    """
    values, running, _ = draw_case(**case, dtype=dtype)
    layers = len(values)
    generator = torch.Generator().manual_seed(case["seed"])
    queries = torch.randn(2 * layers + 1, case["width"], generator=generator)
    queries = queries * case["query_norm"] / queries.norm(dim=-1, keepdim=True)
    queries = queries.to(torch.promote_types(dtype, torch.float32)) * case["width"] ** 0.5
    starts = tuple(range(layers)) if sublayers_kept_apart else tuple(range(0, layers, layers_a_block))
    eager = EagerSources(queries, EPS)
    two_phase = TwoPhaseSources(queries, EPS, starts, len(starts) * (1 + sublayers_kept_apart))
    two_phase.phase_1_bytes = two_phase.tile_bytes = bytes_at_once
    read = DepthRead()

    def close(value):
        for sources in (eager, two_phase):
            sources.close(value)

    for layer in range(layers):
        if layer in starts:
            close(values[layer])
        sites = (2 * layer, 2 * layer + 1)
        for site, site_inputs in zip(sites, [two_phase.at(site) for site in sites]):  # a layer is given both at once
            sum_here = None if site == 2 * layer and layer in starts else running
            found = read(sum_here, *site_inputs, way="two_phase")[0].to(dtype)
            expected = read(sum_here, *eager.at(site))[0].to(dtype)
            assert found.isfinite().all()
            roundings = max(1.0, case["query_norm"]) * (1e-14 if dtype == torch.float64 else 2e-6)
            assert relative_error(found, expected) <= 2 * TOLERANCE[dtype] + roundings, f"site {site}"
        if sublayers_kept_apart:
            close(values[layer] * 0.5)


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
