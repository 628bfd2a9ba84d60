"""Errors that a user can cause and mend: one line, and an exit status. `command_line` makes every command.

Exit status: 0 done, 1 the answer is no (a port that differs, a benchmark that failed), 2 it could not be run. A
traceback is left for faults of this project.
"""

import contextlib
import os
import sys
from collections.abc import Callable, Iterator

import typer
from typer.core import TyperGroup
from typer.exceptions import TyperException


class UserError(ValueError):
    """What a user can mend; the message names the file or setting, what was found and what was expected."""

    status = 2


class AnswerIsNo(UserError):
    """What was asked was found out, and the answer is no: a port that does not compute what its source computes."""

    status = 1


@contextlib.contextmanager
def reading(what: object) -> Iterator[None]:
    """Turn whatever a library raises while it reads a user's file into one line that names `what` was read.

    Put it around the library's call alone: parsers raise what they like, from bare `Exception` (tokenizers) over
    `KeyError` to `RecursionError`, and a fault of ours must not pass for one of the file.

    Raises:
        UserError: in place of any other exception.
    """
    try:
        yield
    except (UserError, KeyboardInterrupt, SystemExit, GeneratorExit):
        raise
    except BaseException as error:  # PyO3's panics are no `Exception`
        raise UserError(f"{what} cannot be read: {describe(error)}") from error


def describe(error: BaseException) -> str:
    """Describe an exception in one line, with its kind where its words alone do not say what happened."""
    if isinstance(error, OSError) and error.strerror:
        return f"{error.filename}: {error.strerror}" if error.filename is not None else error.strerror
    if isinstance(error, MemoryError):
        return "not enough memory"
    if isinstance(error, RecursionError):
        return "it is nested too deeply"
    words = one_line(str(error))
    if isinstance(error, UserError) or " " in words:
        return words
    kind = type(error).__name__
    return f"{kind}: {words}" if words else kind


def one_line(text: str, length: int = 600) -> str:
    """Return a text without line breaks or control characters, cut to `length`."""
    words = " ".join("".join(char if char.isprintable() else " " for char in text).split())
    return words if len(words) <= length else f"{words[: length - 1]}…"


def printable(text: str) -> str:
    """Return a text in which the name of a file may hold bytes that are no text, with those bytes written out."""
    return text.encode(errors="backslashreplace").decode()


@contextlib.contextmanager
def one_line_errors() -> Iterator[None]:
    """End the process with one line and an exit status for what a user can cause."""
    try:
        yield
    except UserError as error:
        _stop(str(error), error.status)
    except (TyperException, typer.Exit, typer.Abort):
        raise  # typer's own: usage errors, and commands that are done
    except BrokenPipeError:  # the reader of our output has gone, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        raise SystemExit(1) from None
    except (OSError, MemoryError, RecursionError) as error:
        _stop(describe(error), 2)
    except Exception:
        typer.echo(
            "This is a fault of this project, not of what you gave it. Please report it with these lines:", err=True
        )
        raise


def _stop(message: str, status: int) -> None:
    """Print an error, and end the process."""
    typer.echo(f"error: {printable(message)}", err=True)
    raise SystemExit(status) from None


class _Commands(TyperGroup):
    """Commands whose errors are printed by `one_line_errors`."""

    def invoke(self, ctx: typer.Context):
        with one_line_errors():
            return super().invoke(ctx)


def command_line(purpose: str) -> typer.Typer:
    """Make a typer app whose commands end in one line and an exit status for what a user can cause.

    With one command alone typer leaves this out; that is what `run_command` is for.
    """
    return typer.Typer(
        cls=_Commands,
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        help=purpose,
        rich_markup_mode=None,
    )


def run_command(main: Callable[..., None], example: str) -> None:
    """Run a module's function as its one command: `--help` says what it does and what it takes, with an example."""
    app = command_line(main.__doc__)
    app.command(epilog=f"Example: {example}")(main)
    with one_line_errors():
        app()
