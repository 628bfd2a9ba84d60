"""Measure what depth attention costs a served model: SmolLM2-135M in vLLM, its ports beside the source."""

import importlib
import os
from pathlib import Path
from tempfile import TemporaryDirectory

from common.errors import UserError
from conversion.port import Blocks, port_checkpoint
from demo.weights import smollm2

from .inference import some_ids
from .measure import Results, Runs, compare, report


PORTS = {"Block 8": Blocks(number=8), "Full": Blocks(mode="full")}


def measure_serving(
    requests: list[int], prompt: list[int], new_tokens: int, repeats: int, compiled: bool, output: Path | None
) -> None:
    """Answer some numbers of requests at once, with prompts of some lengths; all models take turns."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB for each engine, where it runs on CPUs
    try:
        vllm = importlib.import_module("vllm")
    except ImportError:
        raise UserError("vLLM is not installed here; `make serve-test` sets up an environment with it.") from None
    params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    with TemporaryDirectory() as folder:
        checkpoints = {"source": smollm2()} | {name: Path(folder) / name.replace(" ", "-") for name in PORTS}
        for name, blocks in PORTS.items():
            port_checkpoint(str(smollm2()), checkpoints[name], blocks, link=True)
        engines = {
            name: vllm.LLM(
                str(checkpoint),
                trust_remote_code=True,
                model_impl="transformers",
                dtype="float32",
                enforce_eager=not compiled,
                max_model_len=max(prompt) + new_tokens,
                skip_tokenizer_init=True,
                enable_prefix_caching=False,  # else only the first turn would read its prompts
            )
            for name, checkpoint in checkpoints.items()
        }
        results: Results = {}
        for length in prompt:
            for count in requests:
                ids = some_ids(count * length).view(count, length).tolist()
                prompts = [{"prompt_token_ids": one} for one in ids]
                runs: Runs = {
                    name: lambda e=engine, p=prompts: e.generate(p, params, use_tqdm=False)
                    for name, engine in engines.items()
                }
                label = f"{count} of {length} + {new_tokens} tokens"
                results[label] = compare(runs, repeats, label)
    report(f"Requests to SmolLM2-135M in vLLM, fp32, {'compiled' if compiled else 'eager'}", results, output)
