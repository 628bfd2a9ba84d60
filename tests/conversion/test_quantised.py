"""Quantised sources: the depth parameters stay fp32 and the quantisation works on, or the port refuses by name."""

import json

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig

from common.errors import UserError
from conversion.port import port_checkpoint
from conversion.verify import verify_port
from tests.conversion.checkpoints import edit_config
from tests.families import BY_NAME, tokens
from tests.oracle import relative_error


BLOCK = 8


def quantise_fp8(folder):
    """Store the linear layers as DeepSeek-V3 does: fp8 with one fp32 scale a block of 8 × 8."""
    tensors = load_file(folder / "model.safetensors")
    for name, weight in list(tensors.items()):
        if weight.ndim != 2 or "_proj" not in name:
            continue
        rows, columns = weight.shape
        blocks = weight.reshape(rows // BLOCK, BLOCK, columns // BLOCK, BLOCK)
        scale = blocks.abs().amax((1, 3)) / 448
        quantised = (blocks / scale[:, None, :, None]).reshape(rows, columns).to(torch.float8_e4m3fn)
        tensors |= {name: quantised, f"{name}_scale_inv": scale}
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    edit_config(
        folder,
        quantization_config={
            "quant_method": "fp8",
            "weight_block_size": [BLOCK, BLOCK],
            "activation_scheme": "dynamic",
        },
    )


@pytest.mark.parametrize("name", ["Llama", "DeepseekV3"])
def test_fp8(name, tmp_path):
    BY_NAME[name].base_causal_lm().to(torch.bfloat16).save_pretrained(tmp_path / "source")
    quantise_fp8(tmp_path / "source")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    config = json.loads((tmp_path / "target" / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    source, target = (AutoModelForCausalLM.from_pretrained(tmp_path / f).eval() for f in ("source", "target"))
    assert {parameter.dtype for parameter in target.model.attn_res.parameters()} == {torch.float32}
    assert relative_error(target(tokens()).logits, source(tokens()).logits) <= 3e-2  # computed in bf16
    assert verify_port(str(tmp_path / "source"), str(tmp_path / "target")).differing == ()


@pytest.mark.parametrize("bits", [{"load_in_4bit": True}, {"load_in_8bit": True}], ids=["4 bits", "8 bits"])
@pytest.mark.parametrize("name", ["Llama", "Mixtral"])
def test_bitsandbytes(name, tmp_path, bits):
    base = BY_NAME[name].base_causal_lm(hidden_size=64, intermediate_size=64).to(torch.bfloat16)
    base.save_pretrained(tmp_path / "base")
    quantised = AutoModelForCausalLM.from_pretrained(tmp_path / "base", quantization_config=BitsAndBytesConfig(**bits))
    quantised.save_pretrained(tmp_path / "source")
    port_checkpoint(str(tmp_path / "source"), tmp_path / "target")
    target = AutoModelForCausalLM.from_pretrained(tmp_path / "target")
    layer = target.model.layers[0].self_attn.q_proj
    assert type(layer) is type(quantised.model.layers[0].self_attn.q_proj)
    assert type(layer).__name__ in ("Linear4bit", "Linear8bitLt")
    assert {parameter.dtype for parameter in target.model.attn_res.parameters()} == {torch.float32}
    verification = verify_port(str(tmp_path / "source"), str(tmp_path / "target"))
    assert verification.passed
    assert verification.top1_agreement > 0.9


@pytest.mark.parametrize("method", ["gptq", "awq", "compressed-tensors"])
def test_unknown_methods_are_refused_by_name(base_checkpoint, tmp_path, method):
    edit_config(base_checkpoint, quantization_config={"quant_method": method, "bits": 4})
    with pytest.raises(UserError, match=f"quantised with '{method}'.*Port the checkpoint it was made from"):
        port_checkpoint(str(base_checkpoint), tmp_path / "target")
    assert not (tmp_path / "target").exists()
