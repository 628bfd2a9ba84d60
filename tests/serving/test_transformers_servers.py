"""Ports dispatched by accelerate, in continuous batches, and behind `transformers serve` and `transformers chat`.

The servers run in processes of their own, which have nothing of this library but the code that the port carries.
"""

import contextlib
import importlib.util
import os
import socket
import subprocess
import sys
import time
import urllib.request

import pytest
import torch
from accelerate import infer_auto_device_map, init_empty_weights, load_checkpoint_and_dispatch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, ContinuousBatchingConfig, GenerationConfig

from conversion.port import Blocks, port_checkpoint
from demo.weights import smollm2
from tests.families import BY_NAME, randomise_depth, tokens


LENGTHS = (1, 40, 7, 100, 23)
NEW = 32
PAGES = ContinuousBatchingConfig(block_size=32, num_blocks=64, max_batch_tokens=64)  # the longest comes in chunks
QUESTION = "What is the capital of France? Tell me about it."
COMMAND = [sys.executable, "-m", "transformers.cli.transformers"]  # what the command `transformers` runs


@pytest.mark.parametrize("mode", [{"attn_res_block_size": 2}, {"attn_res_mode": "full"}], ids=["block", "full"])
@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_continuous_batching(name, mode):
    """Prompts of several lengths, packed into one batch, are continued as each is alone."""
    model = BY_NAME[name].causal_lm(**mode)
    generator = torch.Generator().manual_seed(0)
    prompts = [torch.randint(3, 99, (length,), generator=generator).tolist() for length in LENGTHS]
    settings = GenerationConfig(max_new_tokens=NEW, do_sample=False, eos_token_id=-1, pad_token_id=0)
    alone = [model.generate(torch.tensor([ids]), settings)[0, len(ids) :].tolist() for ids in prompts]
    batched = model.generate_batch(prompts, settings, PAGES)
    found = {tuple(one.prompt_ids): one.generated_tokens for one in batched.values()}
    assert found == {tuple(ids): new for ids, new in zip(prompts, alone)}
    assert len({tuple(new) for new in alone}) == len(LENGTHS)


def dispatched(checkpoint, folder):
    """What accelerate makes of a checkpoint: some modules in memory, the others on disk, no layer in parts."""
    with init_empty_weights():
        model = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(checkpoint)).eval()
    whole = {"no_split_module_classes": model._no_split_modules}
    device_map = infer_auto_device_map(model, max_memory={"cpu": 80_000, "disk": 10**9}, **whole)
    assert {device_map[f"model.layers.{index}"] for index in range(6)} == {"cpu", "disk"}
    return load_checkpoint_and_dispatch(model, checkpoint, device_map, offload_folder=folder / "offload")


@pytest.mark.parametrize("blocks", [Blocks(number=3), Blocks("full")], ids=["block", "full"])
@torch.no_grad()
def test_load_checkpoint_and_dispatch(blocks, tmp_path):
    base, ported, trained = (tmp_path / name for name in ("base", "ported", "trained"))
    BY_NAME["Llama"].base_causal_lm().save_pretrained(base)
    port_checkpoint(str(base), ported, blocks)
    model = AutoModelForCausalLM.from_pretrained(ported)
    randomise_depth(model)
    model.save_pretrained(trained)
    expected = dispatched(base, tmp_path)(tokens()).logits
    torch.testing.assert_close(dispatched(ported, tmp_path)(tokens()).logits, expected, rtol=1e-4, atol=1e-5)
    found = dispatched(trained, tmp_path)(tokens()).logits
    torch.testing.assert_close(found, model(tokens()).logits)
    assert not torch.allclose(found, expected, rtol=0.1)


# ------------------------------------------------------------------------------------------------------- the commands

BATCHING = ["--continuous-batching", "--cb-block-size", "32", "--cb-num-blocks", "64", "--cb-max-batch-tokens", "64"]
missing = [name for name in ("fastapi", "openai", "uvicorn") if importlib.util.find_spec(name) is None]
needs_server = [
    pytest.mark.slow,
    pytest.mark.xdist_group("smollm2"),
    pytest.mark.skipif(bool(missing), reason=f"{', '.join(missing)} missing: pip install '.[servers]'"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Where `ported` lies, a port of the real SmolLM2."""
    folder = tmp_path_factory.mktemp("servers")
    port_checkpoint(str(smollm2()), folder / "ported", Blocks(number=8))
    return folder


@pytest.fixture(scope="module")
def answer():
    """What the original answers."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(smollm2()), AutoTokenizer.from_pretrained(smollm2())
    messages = [{"role": "user", "content": QUESTION}]
    inputs = tokenizer.apply_chat_template(messages, add_generation_prompt=True, return_tensors="pt", return_dict=True)
    new = model.generate(**inputs, do_sample=False, max_new_tokens=NEW)[0, inputs["input_ids"].shape[1] :]
    return tokenizer.decode(new, skip_special_tokens=True)


@contextlib.contextmanager
def serving(folder, *options):
    """The address of what `transformers serve ported --trust-remote-code` starts in a folder."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [*COMMAND, "serve", "ported", "--trust-remote-code", "--device", "cpu", "--host", "127.0.0.1"]
    environment = os.environ | {"HF_MODULES_CACHE": str(folder / "modules"), "HF_HUB_DISABLE_UPDATE_CHECK": "1"}
    with (folder / "log").open("w") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), *options], cwd=folder, env=environment, stdout=log, stderr=log
        )
    try:
        for _ in range(300):
            assert process.poll() is None, (folder / "log").read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"http://127.0.0.1:{port}/health")
                break
            time.sleep(1)
        yield f"http://127.0.0.1:{port}/v1"
    finally:
        process.kill()
        process.wait()


class TestServe:
    pytestmark = needs_server

    @pytest.mark.parametrize("options", [[], BATCHING], ids=["plain", "continuous batching"])
    def test_serve(self, options, folder, answer):
        openai = importlib.import_module("openai")
        with serving(folder, *options) as address:
            create = openai.OpenAI(base_url=address, api_key="none").chat.completions.create
            asked = {"model": "ported", "messages": [{"role": "user", "content": QUESTION}]}
            asked |= {"max_tokens": NEW, "temperature": 0}
            assert create(**asked).choices[0].message.content == answer
            chunks = [chunk for chunk in create(**asked, stream=True) if chunk.choices]
            pieces = [chunk.choices[0].delta.content or "" for chunk in chunks]
            assert len(pieces) > 10
            assert "".join(pieces) == answer

    def test_chat(self, folder, answer):
        # `transformers chat` takes a server on this machine for the hub, which HF_HUB_OFFLINE forbids.
        online = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
        with serving(folder) as address:
            command = [*COMMAND, "chat", "ported", address, "do_sample=False", f"max_new_tokens={NEW}"]
            environment = online | {"HF_HUB_DISABLE_UPDATE_CHECK": "1", "COLUMNS": "1000"}
            chat = subprocess.run(
                # "n": it asks whether to go on where the limit was reached
                command,
                input=f"{QUESTION}\nn\n!exit\n",
                env=environment,
                capture_output=True,
                text=True,
            )
        assert chat.returncode == 0, chat.stderr
        assert " ".join(answer.split()) in " ".join(chat.stdout.split())
