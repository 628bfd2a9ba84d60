"""Measure speed and memory on this machine. Candidates run in turn; ratios are printed first, and written as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from common.errors import command_line

from .inference import measure_inference, measure_memory
from .mechanism import measure_growth, measure_mechanism
from .porting import measure_porting
from .replica import measure_replica
from .training import measure_training


app = command_line(__doc__)

# ruff: noqa: B006 (typer reads the defaults and changes none)
Output = Annotated[
    Path | None, typer.Option(help="Where to write results, without suffix: OUTPUT.json and OUTPUT.png.")
]
Turns = Annotated[int, typer.Option(help="Turns of each candidate.")]


@app.command(epilog="Example: python -m benchmarks port --gigabytes 2")
def port(
    gigabytes: Annotated[float, typer.Option(help="The size of the checkpoint to port.")] = 2.0,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the results.")] = None,
) -> None:
    """Port a synthetic sharded checkpoint, linked and copied: seconds and peak memory of a fresh process."""
    measure_porting(gigabytes, output)


@app.command(epilog="Example: python -m benchmarks mechanism --tokens 1 --tokens 4096 --output results/mechanism")
def mechanism(
    tokens: Annotated[list[int], typer.Option(help="Tokens at once; may be given several times.")] = [1, 512, 4096],
    repeats: Turns = 3,
    output: Output = None,
) -> None:
    """Depth attention alone at the shapes of Kimi-Linear-48B: ours, the peers' formulas, standard residuals."""
    measure_mechanism(tokens, repeats, output)


@app.command(epilog="Example: python -m benchmarks growth --output results/growth")
def growth(repeats: Turns = 5, output: Output = None) -> None:
    """How the cost of depth attention grows with tokens, layers, blocks and width."""
    measure_growth(repeats, output)


@app.command(epilog="Example: python -m benchmarks inference --prefill 1024 --context 128 --compiled")
def inference(
    prefill: Annotated[list[int], typer.Option(help="Prompt lengths; may be given several times.")] = [256, 1024, 4096],
    context: Annotated[list[int], typer.Option(help="Context lengths to decode at; likewise.")] = [128, 4096],
    batch: Annotated[list[int], typer.Option(help="Sequences decoded at once; likewise.")] = [1, 8],
    prefill_repeats: Annotated[int, typer.Option(help="Turns of each prefill.")] = 5,
    decode_repeats: Annotated[int, typer.Option(help="Turns of each decoded token.")] = 40,
    compiled: Annotated[bool, typer.Option("--compiled", help="Decode with torch.compile, too.")] = False,
    output: Output = None,
) -> None:
    """Prefill and decode SmolLM2-135M: standard residuals, Block 8 (two-phase and eager reads) and Full, in turn."""
    measure_inference(prefill, context, batch, prefill_repeats, decode_repeats, compiled, output)


@app.command(epilog="Example: python -m benchmarks memory --tokens 8192 --chunk 1024")
def memory(
    tokens: Annotated[int, typer.Option(help="Length of the prompt.")] = 8192,
    chunk: Annotated[int, typer.Option(help="prefill_chunk_size.")] = 1024,
    output: Output = None,
) -> None:
    """Peak memory of a long prompt on SmolLM2-135M, at once and in chunks, in a process each."""
    measure_memory(tokens, chunk, output)


@app.command(epilog="Example: python -m benchmarks replica --dtype float32")
def replica(
    prefill: Annotated[int, typer.Option(help="Length of the prompt.")] = 128,
    context: Annotated[int, typer.Option(help="Context length to decode at.")] = 128,
    repeats: Turns = 20,
    dtype: Annotated[
        str, typer.Option(help="bfloat16 (7 GB) or float32 (14 GB); CPUs without bf16 are slow at it.")
    ] = "bfloat16",
    output: Output = None,
) -> None:
    """Prefill and decode a replica of Kimi-Linear-48B of true width and depth, with as many experts as are active."""
    measure_replica(prefill, context, repeats, dtype, output)


@app.command(epilog="Example: python -m benchmarks training --tokens 512 --output results/training")
def training(
    tokens: Annotated[int, typer.Option(help="Length of the sequence.")] = 512,
    repeats: Turns = 5,
    output: Output = None,
) -> None:
    """A training step of SmolLM2-135M: time and peak memory, with and without gradient checkpointing."""
    measure_training(tokens, repeats, output)


if __name__ == "__main__":
    app()
