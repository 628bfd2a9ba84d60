"""The port of the real SmolLM2-135M-Instruct, on real text."""

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, pipeline

from conversion.port import Blocks, port_checkpoint
from demo.weights import smollm2, smollm2_gguf
from tests.conftest import ROOT
from tests.oracle import relative_error


pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("smollm2")]  # one process, one dequantisation

PROMPT = "Alice was beginning to get very tired of sitting by her sister on the bank, and of having nothing to do:"


@pytest.fixture(scope="module")
def source():
    return smollm2()


@pytest.fixture(scope="module")
def original(source):
    """The original's logits on a page of text, and its greedy continuation."""
    return run(AutoModelForCausalLM.from_pretrained(source), AutoTokenizer.from_pretrained(source))


def run(model, tokenizer):
    text = tokenizer((ROOT / "LICENSE").read_text(), return_tensors="pt", truncation=True, max_length=640)
    assert text["input_ids"].shape[1] == 640
    prompt = tokenizer(PROMPT, return_tensors="pt")
    with torch.no_grad():
        logits = model.eval()(**text).logits
    return logits, model.generate(**prompt, do_sample=False, max_new_tokens=100)


@pytest.mark.parametrize(
    "blocks",
    [pytest.param(Blocks("full"), marks=pytest.mark.exhaustive), Blocks(number=8), Blocks(number=7)],
    ids=str,
)
def test_lossless(source, original, tmp_path, blocks):
    port_checkpoint(str(source), tmp_path / "target", blocks)
    model, info = AutoModelForCausalLM.from_pretrained(tmp_path / "target", output_loading_info=True)
    assert not any(info.values())
    logits, text = run(model, AutoTokenizer.from_pretrained(tmp_path / "target"))
    assert relative_error(logits, original[0]) <= 3e-6
    assert torch.equal(text, original[1])


def test_gguf_to_pipeline(original, tmp_path):
    """From the GGUF file itself to `pipeline`, chat template, tokenizer and generation config included."""
    port_checkpoint(str(smollm2_gguf()), tmp_path / "target", Blocks(number=8))
    generator = pipeline("text-generation", str(tmp_path / "target"))
    assert type(generator.model).__name__ == "AttnResLlamaForCausalLM"
    chat = [{"role": "user", "content": "What is the capital of France?"}]
    answer = generator(chat, max_new_tokens=30, do_sample=False)[0]["generated_text"][-1]
    assert answer["role"] == "assistant"
    assert "Paris" in answer["content"]
    continued = generator(PROMPT, max_new_tokens=100, do_sample=False)[0]["generated_text"]
    assert continued == generator.tokenizer.decode(original[1][0], skip_special_tokens=True)
