"""The guide for a reader: its code is run as it stands (that for a family: `modeling_attnres/test_families.py`)."""

import re

import pytest
import torch

from modeling_attnres import depth_attention
from tests.conftest import ROOT
from tests.families import BY_NAME, tokens
from tests.oracle import relative_error


@pytest.fixture
def readers():
    """The registered readers; what is added to them is forgotten afterwards."""
    before = dict(depth_attention._DEPTH_READERS)
    yield depth_attention._DEPTH_READERS
    depth_attention._DEPTH_READERS.clear()
    depth_attention._DEPTH_READERS.update(before)


def test_a_reader(readers):
    section = (ROOT / "CONTRIBUTING.md").read_text().partition("\n## Add a reader\n")[2].partition("\n## ")[0]
    (code,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    assert len(code.splitlines()) < 40
    model = BY_NAME["Llama"].causal_lm()
    with torch.no_grad():
        expected = model(tokens()).logits
        names = {"model": model}
        exec(code, names)
        assert "counting" in readers
        assert relative_error(model(tokens()).logits, expected) <= 3e-6
    assert names["CountingReader"].reads == 2 * model.config.num_hidden_layers + 1
