"""Measure speed and memory on this machine. Results are printed, ratios first, and written as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from .inference import measure_inference
from .porting import measure_porting


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)


@app.command(epilog="Example: python -m benchmarks port --gigabytes 2")
def port(
    gigabytes: Annotated[float, typer.Option(help="The size of the checkpoint to port.")] = 2.0,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the results.")] = None,
) -> None:
    """Port a synthetic sharded checkpoint, linked and copied: seconds and peak memory of a fresh process."""
    measure_porting(gigabytes, output)


@app.command(epilog="Example: python -m benchmarks inference --prefill 1024 --context 128")
def inference(
    prefill: Annotated[list[int], typer.Option(help="Prompt lengths; may be given several times.")] = [256, 1024],  # noqa: B006
    context: Annotated[list[int], typer.Option(help="Context lengths to decode at; likewise.")] = [128, 1024],  # noqa: B006
    prefill_repeats: Annotated[int, typer.Option(help="Turns of each prefill.")] = 5,
    decode_repeats: Annotated[int, typer.Option(help="Turns of each decoded token.")] = 40,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the results.")] = None,
) -> None:
    """Prefill and decode SmolLM2-135M: standard residuals, Block 8 (two-phase and eager reads) and Full, in turn."""
    measure_inference(prefill, context, prefill_repeats, decode_repeats, output)


if __name__ == "__main__":
    app()
