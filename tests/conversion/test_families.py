"""Every family of the table is ported losslessly from files, in whichever layout transformers saves them."""

import pytest
import torch
from transformers import AutoModelForCausalLM

from conversion.checkpoint import Checkpoint
from conversion.port import Blocks, port_checkpoint
from tests.families import TABLE, tokens
from tests.oracle import relative_error


@pytest.mark.parametrize("model_type", TABLE)
def test_ports_of_both_layouts_are_lossless(model_type, tmp_path):
    """As published (experts apart, where the family has any) and as held in memory."""
    base, ids = TABLE[model_type].base_causal_lm(), tokens()
    with torch.no_grad():
        expected = base(ids).logits
    names = []
    for published in (True, False):
        source, target = tmp_path / f"source-{published}", tmp_path / f"port-{published}"
        base.save_pretrained(source, save_original_format=published)
        names.append(set(Checkpoint(source).weight_map))
        if names[0] == names[-1] and not published:
            continue  # the family has one layout
        port_checkpoint(str(source), target, Blocks(size=2))
        model = AutoModelForCausalLM.from_pretrained(target).eval()
        assert type(model).__name__ == f"AttnRes{type(base).__name__}"
        with torch.no_grad():
            assert relative_error(model(ids).logits, expected) <= 3e-6
