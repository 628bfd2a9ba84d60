"""One read without a model: random sources, the read as the paper writes it, and the same by a reader."""

import torch
from hypothesis import strategies as st

from modeling_attnres import BlockLayout, DepthReader, depth_read
from modeling_attnres.depth_attention import DepthParameters, EagerReader
from modeling_attnres.residual_stream import ReplacePass


EPS = 1e-6
TOLERANCE = {torch.float64: 1e-14, torch.float32: 2e-6, torch.bfloat16: 4e-3}

cases = {
    "seed": st.integers(0, 2**31),
    "num_blocks": st.integers(1, 9),
    "tokens": st.integers(1, 5),
    "width": st.integers(1, 40),
    "query_norm": st.sampled_from([0.0, 1e-3, 1.0, 30.0, 1e3]),
    "size": st.sampled_from([1e-6, 1e-2, 1.0, 1e4]),
}


def draw_case(seed, num_blocks, tokens=3, width=16, query_norm=1.0, size=1.0, dtype=torch.float32, batch=2):
    """Closed blocks, a running sum and a query."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [(torch.randn(batch, tokens, width, generator=generator) * size).to(dtype) for _ in range(num_blocks)]
    running = (torch.randn(batch, tokens, width, generator=generator) * size).to(dtype)
    query = torch.randn(width, generator=generator)
    return blocks, running, query / query.norm() * query_norm


def roundings(query_norm, dtype):
    """A logit of size q is known to q roundings, and a weight to as many."""
    return max(1.0, query_norm) * (1e-14 if dtype == torch.float64 else 2e-6)


def reader_with(blocks, query, reader_class: type[DepthReader] = EagerReader) -> tuple[DepthReader, int]:
    """A reader that was given these blocks, and the first site that reads all of them; all sites have this query."""
    layout = BlockLayout(len(blocks), tuple(range(len(blocks))))
    queries = (query * query.shape[-1] ** 0.5).expand(layout.num_sites, -1)
    reader = reader_class(DepthParameters(queries), EPS, layout)
    ReplacePass(reader).enter_layer(0, blocks[0])
    for block in blocks[1:]:
        reader.append(block)
    return reader, 2 * len(blocks) - 2


def fast_read(blocks, running, query, reader_class: type[DepthReader] = EagerReader):
    """The read as a model does it: close the blocks, then read at one site."""
    reader, site = reader_with(blocks, query, reader_class)
    read, weights = reader.read(running, reader.inputs_for(site))
    return read.to(blocks[0].dtype), weights


def plain_read(blocks, running, query):
    """As the paper writes it."""
    sources = blocks if running is None else [*blocks, running]
    return depth_read(sources, query, torch.ones_like(query), EPS)


def gradients(read, leaves, function=torch.sin):
    """The gradients of a scalar function of a read: zeros of those that nothing depends on or nobody asked for."""
    leaves = [leaf.detach().requires_grad_(leaf.requires_grad) for leaf in leaves]
    function(read(*leaves)).sum().backward()
    return [torch.zeros_like(leaf) if leaf.grad is None else leaf.grad for leaf in leaves]
