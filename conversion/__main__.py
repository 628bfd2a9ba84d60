"""`python -m conversion …`: port checkpoints to Attention Residuals."""

from pathlib import Path
from typing import Annotated, Literal

import typer

from .checkpoint import CheckpointError
from .port import port as port_checkpoint


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__)


@app.callback()
def main() -> None:
    pass


@app.command(epilog="Example: python -m conversion port HuggingFaceTB/SmolLM2-135M-Instruct ported --num-blocks 8")
def port(
    source: Annotated[str, typer.Argument(help="A local folder, a hub id or a GGUF file.")],
    target: Annotated[Path, typer.Argument(help="The folder to write; it must not exist, or be empty.")],
    mode: Annotated[Literal["block", "full"], typer.Option(help="Read blocks of layers, or every sublayer.")] = "block",
    block_size: Annotated[
        int | None, typer.Option(help="Decoder layers a block. [default: layers / 8, rounded up]")
    ] = None,
    num_blocks: Annotated[int | None, typer.Option(help="Number of blocks, in place of their size.")] = None,
    link: Annotated[bool, typer.Option("--link", help="Hard-link the shards: instant, but they stay shared.")] = False,
) -> None:
    """Port a checkpoint of a base family to Attention Residuals without changing what it computes."""
    print(port_checkpoint(source, target, mode, block_size, num_blocks, link))


def run() -> None:
    try:
        app()
    except CheckpointError as error:
        raise SystemExit(f"error: {error}") from None


if __name__ == "__main__":
    run()
