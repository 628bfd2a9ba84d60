"""Numbers of depth attention, against hand-computed values and the model's own sources."""

import math

import pytest
import torch

from tests.families import BY_NAME, tokens
from training.depth import mean_depth_weights, mixing_matrix, semiseparable_rank, site_statistics


def config(layers=2, **fields):
    return BY_NAME["Llama"].config(num_hidden_layers=layers, **fields)


def test_sources_partition_what_came_before(layout):
    some = config(6, **layout).attn_res_layout
    for site in range(13):
        sources = some.sources_of(site)
        assert [u for source in sources for u in source] == list(range(site + 1))
        assert len(sources) == some.num_sources(site)


def test_entropy_and_reach_by_hand():
    two_blocks = config(attn_res_block_size=1)  # site 3 reads the embedding, layer 0's two outputs, layer 1's attention
    weights = [
        torch.ones(1),
        torch.full((2,), 0.5),
        torch.full((2,), 0.5),
        torch.tensor([0.5, 0.25, 0.25]),
        torch.ones(3) / 3,
    ]
    found = site_statistics(two_blocks, [one.double() for one in weights])[3]
    assert found.reach == pytest.approx(0.5 * 4 + 0.25 * 2 + 0.25 * 1)
    assert found.entropy_of_mean == pytest.approx((0.5 * math.log(2) + 0.5 * math.log(4)) / math.log(3))
    assert found.largest == 0.5


def test_the_mixing_matrix_rebuilds_every_input(layout):
    """Mean weights of one token are its weights: the matrix times the outputs is what the sublayers read."""
    from tests.oracle import Recorder, relative_error

    model = BY_NAME["Llama"].causal_lm(**layout)
    ids = tokens(batch=1, length=1)
    with torch.no_grad(), Recorder(model.model) as record:
        model(ids)
    matrix = mixing_matrix(model.config, mean_depth_weights(model, ids))
    outputs = torch.stack([record.embedding, *(record.outputs[site] for site in range(12))]).flatten(1)
    for site in range(13):
        assert relative_error((matrix[site] @ outputs).flatten(), record.inputs[site].flatten()) <= 5e-6
    assert torch.equal(matrix.triu(1), torch.zeros_like(matrix))


def test_padding_is_left_out_of_mean_weights():
    model = BY_NAME["Llama"].causal_lm()
    ids = tokens(batch=1, length=9)
    padded, mask = torch.nn.functional.pad(ids, (0, 4)), torch.nn.functional.pad(torch.ones_like(ids), (0, 4))
    for one, other in zip(mean_depth_weights(model, padded, mask), mean_depth_weights(model, ids), strict=True):
        torch.testing.assert_close(one, other, rtol=1e-5, atol=1e-6)


def test_semiseparable_rank_of_known_matrices():
    ones = torch.ones(9, 9, dtype=torch.float64).tril()
    assert semiseparable_rank(ones) == (1, 1.0)  # standard residuals
    low = torch.randn(9, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0))
    two = (low @ low.flip(0).T).tril()
    assert semiseparable_rank(two)[0] == 2
    identity = torch.eye(9, dtype=torch.float64)
    assert semiseparable_rank(identity)[0] == 1


def test_zero_queries_mix_with_rank_one_a_row():
    """Every read is a mean: rows are constant, so the matrix has the rank of standard residuals."""
    model = BY_NAME["Llama"].ours("ForCausalLM")(config(4)).eval()
    rank, effective = semiseparable_rank(mixing_matrix(model.config, mean_depth_weights(model, tokens())))
    assert (rank, effective) == (1, 1.0)
