"""Measure speed and memory on this machine. Candidates take turns; ratios are printed first, and written as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from common.errors import command_line

from .forms import measure_forms
from .inference import measure_inference, measure_memory
from .mechanism import measure_growth, measure_mechanism
from .pipeline import Part, measure_pipeline
from .porting import measure_porting
from .prompts import measure_prompts
from .replica import measure_replica
from .serving import measure_serving
from .training import measure_training


app = command_line(__doc__)

# ruff: noqa: B006 (typer reads the defaults and changes none)
Output = Annotated[
    Path | None, typer.Option(help="Write results to OUTPUT.json and OUTPUT.png; a path without suffix.")
]
Turns = Annotated[int, typer.Option(help="Turns of each candidate.")]


@app.command(epilog="Example: python -m benchmarks port --gigabytes 2")
def port(
    gigabytes: Annotated[float, typer.Option(help="The size of the checkpoint to port.")] = 2.0,
    output: Annotated[Path | None, typer.Option(help="Write results to this JSON file.")] = None,
) -> None:
    """Measure a port of a synthetic sharded checkpoint by links and by copies: seconds and peak memory."""
    measure_porting(gigabytes, output)


@app.command(epilog="Example: python -m benchmarks mechanism --tokens 1 --tokens 4096 --output results/mechanism")
def mechanism(
    tokens: Annotated[list[int], typer.Option(help="Tokens in a pass; may be given several times.")] = [1, 512, 4096],
    repeats: Turns = 3,
    output: Output = None,
) -> None:
    """Measure depth attention alone at the shapes of Kimi-Linear-48B: ours, other formulas, standard residuals."""
    measure_mechanism(tokens, repeats, output)


@app.command(epilog="Example: python -m benchmarks growth --output results/growth")
def growth(repeats: Turns = 5, output: Output = None) -> None:
    """Measure how the cost of depth attention grows with tokens, layers, blocks and width."""
    measure_growth(repeats, output)


@app.command(epilog="Example: python -m benchmarks forms --rows 32 --output results/forms")
def forms(
    rows: Annotated[int, typer.Option(help="Rows of a batch.")] = 32,
    tokens: Annotated[int, typer.Option(help="Length of a row, in tokens.")] = 128,
    repeats: Turns = 5,
    output: Output = None,
) -> None:
    """Measure a training step of the replication's small model with each form of depth attention of it."""
    measure_forms(rows, tokens, repeats, output)


@app.command(epilog="Example: python -m benchmarks inference --prefill 1024 --context 128 --compiled")
def inference(
    prefill: Annotated[list[int], typer.Option(help="Prompt lengths; may be given several times.")] = [256, 1024, 4096],
    context: Annotated[list[int], typer.Option(help="Context lengths to decode at; may be given several times.")] = [
        128,
        4096,
    ],
    batch: Annotated[list[int], typer.Option(help="Sequences per batch; may be given several times.")] = [1, 8],
    prefill_repeats: Annotated[int, typer.Option(help="Turns of each candidate at a prefill.")] = 5,
    decode_repeats: Annotated[int, typer.Option(help="Turns of each candidate at decoding.")] = 40,
    compiled: Annotated[bool, typer.Option("--compiled", help="Decode with torch.compile, too.")] = False,
    output: Output = None,
) -> None:
    """Measure prefill and decoding of SmolLM2-135M: standard residuals, Block 8 (two-phase, eager) and Full."""
    measure_inference(prefill, context, batch, prefill_repeats, decode_repeats, compiled, output)


@app.command(epilog="Example: python -m benchmarks memory --tokens 8192 --chunk 1024")
def memory(
    tokens: Annotated[int, typer.Option(help="Length of the prompt, in tokens.")] = 8192,
    chunk: Annotated[int, typer.Option(help="Tokens per chunk of the prompt.")] = 1024,
    output: Output = None,
) -> None:
    """Measure the peak memory of a long prompt on SmolLM2-135M, at once and in chunks, each in its own process."""
    measure_memory(tokens, chunk, output)


@app.command(epilog="Example: python -m benchmarks pipeline --part time --repeats 9 --output results/pipeline")
def pipeline(
    part: Annotated[
        list[Part], typer.Option(help="What to measure; may be given several times. Default: all of it.")
    ] = list(Part),
    layers: Annotated[int, typer.Option(min=8, help="Decoder layers of the model whose step is measured.")] = 16,
    width: Annotated[int, typer.Option(help="Its width.")] = 128,
    tokens: Annotated[int, typer.Option(help="Tokens of each of the 8 microbatches.")] = 128,
    repeats: Turns = 5,
    output: Annotated[
        Path | None, typer.Option(help="Write results to OUTPUT-PART.json and .png; a path without suffix.")
    ] = None,
) -> None:
    """Measure pipelines on 2 and 4 processes: what travels, time against one process, and what a process holds."""
    measure_pipeline(part, layers, width, tokens, repeats, output)


@app.command(epilog="Example: python -m benchmarks prompts --tokens 4096 --tokens 8192 --ranks 2")
def prompts(
    tokens: Annotated[list[int], typer.Option(help="Prompt lengths; may be given several times.")] = [
        8192,
        32768,
        65536,
    ],
    chunk: Annotated[int, typer.Option(help="Tokens per chunk of a prompt.")] = 2048,
    ranks: Annotated[
        list[int], typer.Option(help="Tensor-parallel processes for the shortest prompt; may be given several times.")
    ] = [2, 4],
    output: Annotated[Path | None, typer.Option(help="Write results to OUTPUT.json; a path without suffix.")] = None,
) -> None:
    """Measure what long prompts hold: block sums, phase 1 and KV cache, at once, in chunks, and by several ranks."""
    measure_prompts(tokens, chunk, ranks, output)


@app.command(epilog="Example: python -m benchmarks replica --dtype float32")
def replica(
    prefill: Annotated[int, typer.Option(help="Length of the prompt, in tokens.")] = 128,
    context: Annotated[int, typer.Option(help="Context length to decode at.")] = 128,
    repeats: Turns = 20,
    dtype: Annotated[
        str, typer.Option(help="bfloat16 (7 GB) or float32 (14 GB); CPUs without bf16 are slow at it.")
    ] = "bfloat16",
    output: Output = None,
) -> None:
    """Measure a replica of Kimi-Linear-48B of true width and depth, with only as many experts as are active."""
    measure_replica(prefill, context, repeats, dtype, output)


@app.command(epilog="Example: python -m benchmarks serving --requests 8 --prompt 512 --output results/serving")
def serving(
    requests: Annotated[list[int], typer.Option(help="Requests at once; may be given several times.")] = [1, 8, 32],
    prompt: Annotated[list[int], typer.Option(help="Prompt lengths; likewise.")] = [32, 512],
    new_tokens: Annotated[int, typer.Option(help="Tokens that each request is answered with.")] = 32,
    repeats: Turns = 3,
    compiled: Annotated[bool, typer.Option("--compiled", help="Let vLLM compile the models.")] = False,
    cpu_time: Annotated[
        bool, typer.Option("--cpu-time", help="Count CPU time, of one thread: for a machine that does other work, too.")
    ] = False,
    profiled: Annotated[bool, typer.Option("--profile", help="Then list where the models' operations differ.")] = False,
    output: Output = None,
) -> None:
    """Answer requests with SmolLM2-135M in vLLM, which `make serve-test` installs in an environment of its own."""
    measure_serving(requests, prompt, new_tokens, repeats, compiled, cpu_time, profiled, output)


@app.command(epilog="Example: python -m benchmarks training --tokens 512 --output results/training")
def training(
    tokens: Annotated[int, typer.Option(help="Length of the sequence, in tokens.")] = 512,
    repeats: Turns = 5,
    output: Output = None,
) -> None:
    """Measure a training step of SmolLM2-135M: time and peak memory, with and without gradient checkpointing."""
    measure_training(tokens, repeats, output)


if __name__ == "__main__":
    app()
