"""Blocks as a line."""

import pytest

from model_cards.blocks import draw_blocks
from tests.families import BY_NAME


@pytest.mark.parametrize(
    ("fields", "drawing"),
    [
        ({"attn_res_block_boundaries": [0, 1, 4]}, "[E] [0] [1 2 3] [4 5] → output"),
        ({"attn_res_mode": "none"}, "E 0 1 2 3 4 5 → output"),
        ({"attn_res_mode": "full", "num_hidden_layers": 2}, "[E] [0a] [0m] [1a] [1m] → output"),
    ],
)
def test_drawings(fields, drawing):
    assert draw_blocks(BY_NAME["Llama"].config(**fields)).startswith(drawing)
