"""Ports served by vLLM's Transformers backend. `make serve-test` runs these: vLLM has an environment of its own.

Each engine lives in a process of its own; transformers' answers are made in this one.
"""

import contextlib
import importlib.util
import json
import socket
import subprocess
import sys
import time
import urllib.request
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from conversion.port import Blocks, port_checkpoint
from demo.weights import smollm2
from modeling_attnres import is_depth_parameter
from tests.conftest import ROOT
from tests.families import BY_NAME, Family


pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(importlib.util.find_spec("vllm") is None, reason="vLLM is not installed here"),
]

NEW = 64
QUESTION = [{"role": "user", "content": "What is the capital of France? Tell me about it."}]
SHAPE = {"vocab_size": 128, "hidden_size": 128, "intermediate_size": 64, "num_hidden_layers": 4, "head_dim": 32}
# Dividing it by the square of the number of sources shows in every logit.
LARGE_EPS = {"rms_norm_eps": 0.1, "attn_res_scale_norm_eps": True}
EXPERTS = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64}
LATENT = {
    "head_dim": 16,
    "num_key_value_heads": 4,
    "q_lora_rank": 32,
    "kv_lora_rank": 32,
    "qk_nope_head_dim": 16,
    "qk_rope_head_dim": 16,
    "v_head_dim": 32,
    "n_routed_experts": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
}
LLAMA = replace(BY_NAME["Llama"], tiny=BY_NAME["Llama"].tiny | SHAPE)
FAMILIES = {
    "Llama": LLAMA,
    **{name: Family(name, LLAMA.tiny) for name in ("Qwen3", "Mistral")},
    **{name: Family(name, LLAMA.tiny | EXPERTS) for name in ("Mixtral", "Qwen3Moe", "Olmoe")},
    "DeepseekV3": Family("DeepseekV3", LLAMA.tiny | EXPERTS | LATENT),
}
MODES = {"block": {"attn_res_block_size": 2}, "full": {"attn_res_mode": "full"}}
# Prompts of several lengths; the last two share the first 64 tokens, two blocks of the KV cache.
LONG = torch.randint(3, 128, (80,), generator=torch.Generator().manual_seed(0)).tolist()
PROMPTS = [[5, 6, 7, 8, 9], [99], LONG, [*LONG[:64], 3, 4, 5]]
# Prompts longer than a step are read in chunks.
CHUNKS = {"enable_chunked_prefill": True, "max_num_batched_tokens": 48, "enable_prefix_caching": True, "block_size": 32}


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    """What vLLM finds out about its own classes, in seconds, and keeps."""
    return tmp_path_factory.mktemp("vllm")


@pytest.fixture(autouse=True)
def _environment(tmp_path, monkeypatch, cache):
    """What engines find in theirs: caches that are not the user's, and little memory for keys and values."""
    monkeypatch.setenv("HF_MODULES_CACHE", str(tmp_path / "modules"))
    monkeypatch.setenv("VLLM_CACHE_ROOT", str(cache))
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "1")
    # One thread, on any core: threads that wait for each other spin, which costs minutes where cores are shared.
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "nobind")
    monkeypatch.setenv("VLLM_ENABLE_V1_MULTIPROCESSING", "0")
    monkeypatch.setenv("VLLM_LOGGING_LEVEL", "WARNING")
    monkeypatch.setenv("VLLM_MLA_DISABLE", "1")  # it sizes the heads of latent attention by model types that it lists


def saved(folder: Path, family: Family, **fields) -> Path:
    """A tiny port with the depth parameters of a trained model."""
    family.causal_lm(**LARGE_EPS, **fields).save_pretrained(folder)
    return folder


def depth_dtypes(model: torch.nn.Module) -> set[torch.dtype]:
    return {parameter.dtype for name, parameter in model.named_parameters() if is_depth_parameter(name)}


def run_engine(folder: Path, prompts: list[list[int]], options: dict) -> dict:
    """Generate twice, the second time from cached prefixes, and score the prompts."""
    vllm = importlib.import_module("vllm")
    defaults = {"dtype": "float32", "max_model_len": 256, "skip_tokenizer_init": True, "enforce_eager": True}
    engine = vllm.LLM(str(folder), trust_remote_code=True, **defaults | CHUNKS | options)

    def generate(**fields):
        params = vllm.SamplingParams(temperature=0, ignore_eos=True, detokenize=False, **fields)
        return engine.generate([{"prompt_token_ids": ids} for ids in prompts], params, use_tqdm=False)

    texts = [generate(max_tokens=NEW) for _ in range(2)]
    scored = generate(max_tokens=1, prompt_logprobs=0)
    return {
        "texts": [[list(one.outputs[0].token_ids) for one in outputs] for outputs in texts],
        "cached": [one.num_cached_tokens for one in texts[1]],
        "logprobs": [
            [step[token].logprob for token, step in zip(one.prompt_token_ids[1:], one.prompt_logprobs[1:])]
            for one in scored
        ],
        "dtypes": engine.apply_model(depth_dtypes),
    }


def in_engine(folder: Path, prompts: list[list[int]] = PROMPTS, **options) -> dict:
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(run_engine, folder, prompts, options).result()


@torch.no_grad()
def in_transformers(folder: Path, prompts: list[list[int]] = PROMPTS) -> tuple[list, list]:
    """The greedy texts, and the log-probabilities of the prompts."""
    model = AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True, dtype=torch.float32).eval()
    texts, logprobs = [], []
    for prompt in prompts:
        ids = torch.tensor([prompt])
        length = {"max_new_tokens": NEW, "eos_token_id": None, "pad_token_id": 0}
        new = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, **length)
        texts.append(new[0, len(prompt) :].tolist())
        scores = model(ids).logits[0, :-1].log_softmax(-1)
        logprobs.append(scores.gather(1, ids[0, 1:, None])[:, 0].tolist())
    return texts, logprobs


def assert_same(folder: Path, **options) -> dict:
    """The engine gives transformers' texts, also from cached prefixes, and its log-probabilities."""
    texts, logprobs = in_transformers(folder)
    served = in_engine(folder, **options)
    assert served["texts"] == [texts, texts]
    assert served["cached"][2:] == [64, 64]
    for found, expected in zip(served["logprobs"], logprobs):
        assert found == pytest.approx(expected, abs=1e-3)
    assert served["dtypes"] == [{torch.float32}] * len(served["dtypes"])
    return served


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize("name", FAMILIES)
def test_families(name, mode, tmp_path):
    assert_same(saved(tmp_path / "port", FAMILIES[name], **MODES[mode]))


@pytest.mark.parametrize(("name", "mode"), [("Llama", "block"), ("Qwen3Moe", "full")])
def test_compiled(name, mode, tmp_path):
    assert_same(saved(tmp_path / "port", FAMILIES[name], **MODES[mode]), enforce_eager=False)


@pytest.mark.parametrize("name", ["Llama", "Qwen3Moe"])
def test_tensor_parallel(name, tmp_path, monkeypatch):
    monkeypatch.setenv("VLLM_CPU_OMP_THREADS_BIND", "0|1")  # else each worker wants a NUMA node
    served = assert_same(saved(tmp_path / "port", FAMILIES[name], **MODES["block"]), tensor_parallel_size=2)
    assert len(served["dtypes"]) == 2


def test_depth_parameters_stay_in_fp32(tmp_path):
    folder = saved(tmp_path / "port", LLAMA, **MODES["block"])
    assert in_engine(folder, dtype="bfloat16")["dtypes"] == [{torch.float32}]


@pytest.fixture(scope="module")
def real_port(tmp_path_factory):
    folder = tmp_path_factory.mktemp("real") / "port"
    port_checkpoint(str(smollm2()), folder, Blocks(number=8))
    return folder


def test_the_real_model(real_port):
    tokenizer = AutoTokenizer.from_pretrained(real_port)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    texts = [in_transformers(folder, [ids])[0] for folder in (smollm2(), real_port)]
    texts += [in_engine(folder, [ids])["texts"][0] for folder in (smollm2(), real_port)]
    assert len(texts[0][0]) == NEW
    assert texts == [texts[0]] * 4


def test_the_two_phase_reader_serves(tmp_path):
    """Asked for by name it is not refused, so it is what "auto", which prefers it, has taken in the other tests."""
    reader = {"attn_res_implementation": "two_phase"}
    assert_same(saved(tmp_path / "port", LLAMA, **MODES["block"]), hf_overrides=reader)


def test_evaluation(real_port, tmp_path):
    """`python -m eval` is given the same answers by both back ends, and nearly the same likelihoods."""
    (tmp_path / "data").mkdir()
    common = f"--model {real_port} --tasks attnres_humaneval,attnres_perplexity --limit 2 --gen-kwargs max_gen_toks=24"
    common += f" --data {tmp_path / 'data'} --trust-remote-code --confirm-run-unsafe-code"
    options = {
        "hf": "--device cpu --model-args dtype=float32",
        "vllm": "--backend vllm --model-args dtype=float32,max_model_len=1024,enforce_eager=True",
    }
    said = {}
    for name, option in options.items():
        command = [sys.executable, "-m", "eval", "run", *f"{common} {option} --output {tmp_path / name}".split()]
        subprocess.run(command, cwd=ROOT, check=True)
        said[name] = [
            [sample["resps"] for sample in next(iter(json.loads(file.read_text())["lm_eval"]["samples"].values()))]
            for file in sorted((tmp_path / name / "port").glob("*.json"))
        ]
    answers, likelihoods = zip(said["hf"], said["vllm"])
    assert answers[0] == answers[1]
    assert [float(one[0][0]) for one in likelihoods[0]] == pytest.approx(
        [float(one[0][0]) for one in likelihoods[1]], rel=1e-4
    )


@pytest.fixture
def server(real_port, tmp_path):
    """The address of what `vllm serve PORT` starts."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    command = [Path(sys.executable).with_name("vllm"), "serve", real_port, "--trust-remote-code"]
    options = f"--dtype float32 --enforce-eager --max-model-len 512 --served-model-name ported --port {port}".split()
    with (tmp_path / "log").open("w") as log:
        process = subprocess.Popen([*command, *options], stdout=log, stderr=subprocess.STDOUT)
    address = f"http://127.0.0.1:{port}"
    try:
        for _ in range(600):
            assert process.poll() is None, (tmp_path / "log").read_text()
            with contextlib.suppress(OSError):
                urllib.request.urlopen(f"{address}/health")
                break
            time.sleep(1)
        yield address
    finally:
        process.terminate()
        process.wait()


def test_the_server(server, real_port):
    openai = importlib.import_module("openai")
    tokenizer = AutoTokenizer.from_pretrained(real_port)
    ids = tokenizer.apply_chat_template(QUESTION, add_generation_prompt=True, return_dict=False)
    expected = tokenizer.decode(in_transformers(real_port, [ids])[0][0], skip_special_tokens=True)
    create = openai.OpenAI(base_url=f"{server}/v1", api_key="none").chat.completions.create
    asked = {"model": "ported", "messages": QUESTION, "max_tokens": NEW, "temperature": 0}
    assert create(**asked).choices[0].message.content == expected
    pieces = [chunk.choices[0].delta.content or "" for chunk in create(**asked, stream=True) if chunk.choices]
    assert len(pieces) > 10
    assert "".join(pieces) == expected
