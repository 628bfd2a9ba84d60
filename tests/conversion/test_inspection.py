"""`conversion inspect`: what a checkpoint is."""

import math
import re

import pytest

import modeling_attnres
from common.errors import UserError
from conversion.inspection import inspect_checkpoint
from conversion.port import Blocks, port_checkpoint
from tests.conversion.checkpoints import command, edit_config, edit_tensors, set_query
from tests.families import BY_NAME


def test_a_base_checkpoint(family, base_checkpoint):
    text = str(inspect_checkpoint(str(base_checkpoint)))
    assert "standard residuals" in text
    assert "portable   yes" in text


def test_what_is_known_of_other_families(tmp_path, monkeypatch):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path)
    monkeypatch.setattr(modeling_attnres, "LOSSLESS_FAMILIES", frozenset())
    assert "portable   if its port passes verification" in str(inspect_checkpoint(str(tmp_path)))
    edit_config(tmp_path, model_type="olmo2")
    assert re.search("portable   no: .*'olmo2' cannot be ported: .*norm", str(inspect_checkpoint(str(tmp_path))))


def test_a_port(family, base_checkpoint, tmp_path):
    port_checkpoint(str(base_checkpoint), tmp_path / "port", Blocks(size=4))
    found = inspect_checkpoint(str(tmp_path / "port"), with_entropy=True)
    assert found.family == family.ours("Config").model_type
    assert found.depth_parameters == 13 * 2 * 32
    assert set(found.distances.values()) == {0.0}
    assert len(found.distances) == 12
    assert found.entropies == pytest.approx([1.0] * 13, abs=1e-6)
    text = str(found)
    assert "[E] [0 1 2 3] [4 5] → output" in text
    assert "query of 0 of 12 sites is away from its start" in text


def test_norms_and_entropies_belong_to_their_sites(tmp_path):
    """One strong query: its site, and no other, has a norm and a low entropy."""
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "base")
    port_checkpoint(str(tmp_path / "base"), tmp_path / "port")
    set_query(tmp_path / "port", site=5, value=100.0)  # layer 2 MLP
    found = inspect_checkpoint(str(tmp_path / "port"), with_entropy=True)
    assert {site for site, norm in found.distances.items() if norm > 0} == {5}
    assert found.distances[5] == pytest.approx(100 * math.sqrt(32))
    assert list(found.distances) == list(range(1, 13))
    low = [site for site, entropy in enumerate(found.entropies) if entropy < 0.9]
    assert low == [5]
    line = next(line for line in str(found).splitlines() if line.startswith("layer 2 MLP"))
    assert "565.7" in line


def test_no_entropy_without_depth_attention(tmp_path):
    BY_NAME["Llama"].causal_lm(attn_res_mode="none").save_pretrained(tmp_path)
    assert "standard residuals" in str(inspect_checkpoint(str(tmp_path)))
    with pytest.raises(UserError, match="no depth weights"):
        inspect_checkpoint(str(tmp_path), with_entropy=True)


@pytest.mark.parametrize(
    "damage",
    [
        lambda folder: edit_config(folder, hidden_size=64),
        lambda folder: edit_config(folder, attn_res_block_boundaries=[1]),
        lambda folder: edit_config(folder, num_hidden_layers=10**9),
        lambda folder: edit_config(folder, quantization_config={"quant_method": "gptq"}),
        lambda folder: edit_tensors(folder, **{"model.norm.weight": None}),
    ],
)
def test_portable_is_what_a_port_goes_on_with(tmp_path, damage):
    BY_NAME["Llama"].base_causal_lm().save_pretrained(tmp_path / "base")
    assert "portable   yes" in command("inspect", tmp_path / "base")[1]
    damage(tmp_path / "base")
    status, line = command("port", tmp_path / "base", tmp_path / "port")
    assert status == 2
    assert f"portable   no: {line.removeprefix('error: ')}" in command("inspect", tmp_path / "base")[1]
