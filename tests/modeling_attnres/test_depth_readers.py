"""The readers for training and for inference, held to the plain one: forward, gradient, and what they keep."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from modeling_attnres import BlockLayout
from modeling_attnres.depth_attention import DepthParameters, EagerReader
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


@given(**cases | {"size": st.sampled_from([1e-2, 1.0, 1e4])}, dtype=st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=50)
def test_training_gradients_in_lower_precision(dtype, **case):
    """Against float64, as one vector: a gradient of a sharp softmax is a small difference of large terms."""
    blocks, running, query = draw_case(**case, dtype=dtype)
    leaves = [leaf.requires_grad_() for leaf in (query.float(), running, *blocks)]

    def found(query, running, *blocks):
        return fast_read(list(blocks), running, query, TrainingReader)[0]

    def expected(query, running, *blocks):
        return plain_read(list(blocks), running, query)[0]

    def weighted(read):
        return read.double() * torch.linspace(-1, 1, read.numel(), dtype=torch.float64).view(read.shape)

    exact = gradients(expected, [leaf.detach().double().requires_grad_() for leaf in leaves], weighted)
    for one, other in zip(gradients(found, leaves, weighted), exact, strict=True):
        assert one.isfinite().all()
        slack = TOLERANCE[dtype] * max(1.0, case["query_norm"]) * (1 + case["query_norm"]) * 4
        assert (one.double() - other).norm() <= slack * max(1.0, case["size"]) * max(1.0, other.norm().item())


@pytest.mark.parametrize("reader_class", [TrainingReader, EagerReader])
@pytest.mark.parametrize("with_running", [False, True])
def test_gradcheck(with_running, reader_class):
    blocks, running, query = draw_case(0, num_blocks=3, tokens=2, width=5, dtype=torch.float64, batch=1)
    leaves = [leaf.requires_grad_() for leaf in (query.double(), running, *blocks)]

    def read(query, running, *blocks):
        return fast_read(list(blocks), running if with_running else None, query, reader_class)[0]

    assert torch.autograd.gradcheck(read, leaves)
    if reader_class is EagerReader:
        assert torch.autograd.gradgradcheck(read, leaves)
    else:
        with pytest.raises(RuntimeError, match="first-order gradients only"):
            torch.autograd.grad(read(*leaves).sum(), leaves[0], create_graph=True)


def test_a_training_read_saves_its_sources_and_scalars_per_token():
    """No tensor of the size of a source is kept that was not there before."""
    blocks, running, query = draw_case(0, num_blocks=4, tokens=7, width=64, dtype=torch.bfloat16)
    leaves = [leaf.requires_grad_() for leaf in (query.float(), running.float(), *blocks)]
    query_D, running_sum, *blocks = leaves
    reader, site = reader_with(blocks, query_D, TrainingReader)
    site_inputs, kept = reader.inputs_for(site), []

    def keep(tensor):
        kept.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        reader.read(running_sum, site_inputs)
    *others, sources = site_inputs
    there_before = {tensor.data_ptr() for tensor in (running_sum, *others, *sources)}
    new = [tensor for tensor in kept if tensor.data_ptr() not in there_before]
    batch, tokens, _ = running_sum.shape
    assert len(kept) > len(blocks)
    assert sum(tensor.numel() for tensor in new) <= batch * tokens * (len(blocks) + 1 + 2)


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

    What a site was given is never written again: after the pass it still is what it was.
    """
    values, running, _ = draw_case(**case, dtype=dtype)
    layers = len(values)
    generator = torch.Generator().manual_seed(case["seed"])
    queries = torch.randn(2 * layers + 1, case["width"], generator=generator)
    queries = queries * case["query_norm"] / queries.norm(dim=-1, keepdim=True)
    queries = queries.to(torch.promote_types(dtype, torch.float32)) * case["width"] ** 0.5
    starts = tuple(range(layers)) if sublayers_kept_apart else tuple(range(0, layers, layers_a_block))
    layout = BlockLayout(layers, starts, full=sublayers_kept_apart)
    eager, two_phase = (reader(DepthParameters(queries), EPS, layout) for reader in (EagerReader, TwoPhaseReader))
    two_phase.phase_1_bytes = two_phase.tile_bytes = bytes_at_once
    given = []

    for layer in range(layers):
        for reader in (eager, two_phase):
            if layer == 0:
                ReplacePass(reader).enter_layer(0, values[0])
            elif layer in starts:
                reader.append(values[layer])
        sites = (2 * layer, 2 * layer + 1)
        for site, site_inputs in zip(sites, [two_phase.inputs_for(site) for site in sites]):  # a layer asks for both
            given += [(tensor, tensor.clone()) for tensor in site_inputs]
            sum_here = None if site == 2 * layer and layer in starts else running
            found = two_phase.read(sum_here, site_inputs)[0].to(dtype)
            expected = eager.read(sum_here, eager.inputs_for(site))[0].to(dtype)
            assert found.isfinite().all()
            tolerance = 2 * TOLERANCE[dtype] + roundings(case["query_norm"], dtype)
            assert relative_error(found, expected) <= tolerance, f"site {site}"
        if sublayers_kept_apart:
            for reader in (eager, two_phase):
                reader.append(values[layer] * 0.5)
    assert all(torch.equal(tensor, before) for tensor, before in given)


@given(
    seed=st.integers(0, 2**31),
    num_blocks=st.integers(1, 6),
    heads=st.sampled_from([2, 3, 4]),
    query_norm=st.sampled_from([0.0, 1.0, 30.0, 1e3]),
    size=st.sampled_from([1e-6, 1.0, 1e4]),
    with_running=st.booleans(),
)
@settings(max_examples=60)
def test_heads_are_reads_of_parts_of_the_width(seed, num_blocks, heads, query_norm, size, with_running):
    """In float64, by its definition: the key norm is over the whole width, the softmax over each part's own logits."""
    blocks, running, query = draw_case(seed, num_blocks, width=12, query_norm=query_norm, size=size)
    sources = torch.stack([*blocks, running] if with_running else blocks).double()
    keys = sources / (sources**2).mean(-1, keepdim=True).add(EPS).sqrt()
    expected = []
    for part in torch.arange(12).chunk(heads):
        weights = (keys[..., part] @ query[part].double()).softmax(0)
        expected.append((weights[..., None] * sources[..., part]).sum(0))
    expected = torch.cat(expected, -1)
    for reader_class in (EagerReader, TrainingReader, TwoPhaseReader):
        layout = BlockLayout(num_blocks, tuple(range(num_blocks)))
        queries = (query * 12**0.5).view(heads, -1).expand(layout.num_sites, -1, -1)
        reader = reader_class(DepthParameters(queries), EPS, layout)
        ReplacePass(reader).enter_layer(0, blocks[0])
        for block in blocks[1:]:
            reader.append(block)
        found, _ = reader.read(running if with_running else None, reader.inputs_for(2 * num_blocks - 2))
        assert found.isfinite().all()
        assert relative_error(found, expected) <= 2 * TOLERANCE[torch.float32] + roundings(query_norm, torch.float32)
