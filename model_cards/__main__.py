"""Write model cards."""

from pathlib import Path
from typing import Annotated

import typer

from .card import CardError, write_card


app = typer.Typer(no_args_is_help=True, pretty_exceptions_enable=False, help=__doc__, rich_markup_mode=None)


@app.callback()
def commands() -> None:
    """Write model cards."""


@app.command(epilog="Example: python -m model_cards write ported --results results/table.json")
def write(
    path: Annotated[Path, typer.Argument(help="A checkpoint's folder, or a configuration's.")],
    results: Annotated[Path | None, typer.Option(help="The table.json of `python -m eval run`.")] = None,
    training: Annotated[Path | None, typer.Option(help="The output folder of `python -m training finetune`.")] = None,
    output: Annotated[Path | None, typer.Option(help="The file to write. Default: PATH/README.md.")] = None,
) -> None:
    """Write the card of PATH from the files that lie there, and from results. It claims no figure that no file has."""
    try:
        print(write_card(path, results, training, output))
    except CardError as error:
        typer.echo(f"error: {error}", err=True)
        raise typer.Exit(2) from error


if __name__ == "__main__":
    app()
