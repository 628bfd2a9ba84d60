"""Write model cards."""

from pathlib import Path
from typing import Annotated

import typer

from common.errors import command_line

from .card import write_card


app = command_line(__doc__)


@app.callback()
def commands() -> None:
    """Write model cards."""


@app.command(epilog="Example: python -m model_cards write ported --results results/table.json")
def write(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a configuration's.")],
    results: Annotated[Path | None, typer.Option(help="The table.json of `python -m eval run`.")] = None,
    training: Annotated[Path | None, typer.Option(help="What `python -m training` wrote to.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write. Default: PATH/README.md.")] = None,
) -> None:
    """Write the card of PATH from the files that lie there, and from results. It claims no figure that no file has."""
    print(write_card(path, results, training, output))


if __name__ == "__main__":
    app()
