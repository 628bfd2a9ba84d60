"""Measure what depth attention costs a served model: SmolLM2-135M in vLLM, its ports beside the source."""

import importlib
import os
import time
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from torch.profiler import ProfilerActivity, profile

from common.errors import UserError
from conversion.port import Blocks, port_checkpoint
from demo.weights import smollm2

from .inference import some_ids
from .measure import Results, Runs, compare, report


PORTS = {"Block 8": Blocks(number=8), "Full": Blocks(mode="full")}


def measure_serving(
    requests: list[int],
    prompt: list[int],
    new_tokens: int,
    repeats: int,
    compiled: bool,
    cpu_time: bool,
    profiled: bool,
    output: Path | None,
) -> None:
    """Answer some numbers of requests at once, with prompts of some lengths; all models take turns."""
    os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")  # GiB for each engine, where it runs on CPUs
    os.environ["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # else engines that wait take time from the one that runs
    clock, measured = time.perf_counter, "Time"
    if cpu_time:  # of one thread, for threads that wait for each other spin
        torch.set_num_threads(1)
        os.environ |= {"OMP_NUM_THREADS": "1", "VLLM_CPU_OMP_THREADS_BIND": "nobind"}
        clock, measured = time.process_time, "CPU time"
    try:
        vllm = importlib.import_module("vllm")
    except ImportError:
        raise UserError("vLLM is not installed here; `make serve-test` sets up an environment with it.") from None
    params = vllm.SamplingParams(temperature=0, max_tokens=new_tokens, ignore_eos=True, detokenize=False)
    with TemporaryDirectory() as folder:
        engines = start_engines(vllm.LLM, Path(folder), max(prompt) + new_tokens, compiled)
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
                results[label] = compare(runs, repeats, label, clock=clock)
                if profiled:
                    report_operations(runs, label)
    mode = "compiled" if compiled else "eager"
    report(f"{measured} of requests to SmolLM2-135M in vLLM, fp32, {mode}", results, output)


def start_engines(engine_class: type, folder: Path, max_length: int, compiled: bool) -> dict[str, Any]:
    """Port the source into `folder` and start an engine for it, first, and for each port."""
    checkpoints = {"source": smollm2()} | {name: folder / name.replace(" ", "-") for name in PORTS}
    for name, blocks in PORTS.items():
        port_checkpoint(str(smollm2()), checkpoints[name], blocks, link=True)
    return {
        name: engine_class(
            str(checkpoint),
            trust_remote_code=True,
            model_impl="transformers",
            dtype="float32",
            enforce_eager=not compiled,
            max_model_len=max_length,
            skip_tokenizer_init=True,
            enable_prefix_caching=False,  # else only the first turn would read its prompts
        )
        for name, checkpoint in checkpoints.items()
    }


def report_operations(runs: Runs, label: str) -> None:
    """Print the operations whose own time the candidates differ in most, in milliseconds, and how often each ran."""
    profiles = {}
    for name, run in runs.items():
        with profile(activities=[ProfilerActivity.CPU]) as profiler:
            run()
        profiles[name] = {
            event.key: (event.self_cpu_time_total / 1e3, event.count) for event in profiler.key_averages()
        }
    found = {key: [events.get(key, (0, 0)) for events in profiles.values()] for key in set().union(*profiles.values())}
    table = Table(f"{label}: ms (calls)", *profiles)
    by_difference = sorted(found.items(), key=lambda item: max(item[1])[0] - min(item[1])[0], reverse=True)
    for key, cells in by_difference[:15]:
        table.add_row(key, *(f"{milliseconds:.1f} ({count})" for milliseconds, count in cells))
    Console(width=150).print(table)
