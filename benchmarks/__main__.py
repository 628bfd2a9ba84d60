"""Measure speed and memory on this machine. Results are printed, ratios first, and written as JSON."""

from pathlib import Path
from typing import Annotated

import typer

from .porting import measure_porting


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)


@app.callback()
def main() -> None:
    pass


@app.command(epilog="Example: python -m benchmarks port --gigabytes 2")
def port(
    gigabytes: Annotated[float, typer.Option(help="The size of the checkpoint to port.")] = 2.0,
    output: Annotated[Path | None, typer.Option(help="A JSON file for the results.")] = None,
) -> None:
    """Port a synthetic sharded checkpoint, linked and copied: seconds and peak memory of a fresh process."""
    measure_porting(gigabytes, output)


if __name__ == "__main__":
    app()
