"""Every command ends in one line and an exit status for what a user can cause."""

import errno
import os

import pytest
import typer
from typer.testing import CliRunner

from common.errors import AnswerIsNo, UserError, command_line, describe, one_line, reading, run_command


def command_that_raises(error: BaseException) -> typer.Typer:
    app = command_line("A command.")

    @app.command()
    def fail() -> None:
        raise error

    @app.command()
    def other() -> None: ...

    return app


@pytest.mark.parametrize(
    ("error", "status", "line"),
    [
        (UserError("a.json: no model_type"), 2, "error: a.json: no model_type\n"),
        (AnswerIsNo("the port differs"), 1, "error: the port differs\n"),
        (UserError("a\udcffb"), 2, "error: a\\udcffb\n"),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "out"), 2, "error: out: No space left on device\n"),
        (RecursionError("maximum recursion depth exceeded"), 2, "error: it is nested too deeply\n"),
        (MemoryError(), 2, "error: not enough memory\n"),
        (typer.Exit(1), 1, ""),
    ],
)
def test_one_line_and_a_status(error, status, line):
    result = CliRunner().invoke(command_that_raises(error), ["fail"])
    assert (result.exit_code, result.output) == (status, line)


@pytest.mark.parametrize(
    ("argument", "status", "errors", "shown"),
    [
        ("0", 0, "", []),
        ("1", 1, "error: no: 1\n", []),
        ("--help", 0, "", ["Usage: ", "  Say no.\n", "  Example: python -m no 1\n"]),
    ],
)
def test_a_module_with_one_command(argument, status, errors, shown, monkeypatch, capsys):
    def say_no(number: int) -> None:
        """Say no."""
        if number:
            raise AnswerIsNo(f"no: {number}")

    monkeypatch.setattr("sys.argv", ["no", argument])
    with pytest.raises(SystemExit) as end:
        run_command(say_no, "python -m no 1")
    found = capsys.readouterr()
    assert (end.value.code, found.err) == (status, errors)
    assert all(part in found.out for part in shown)
    assert bool(found.out) == bool(shown)


def test_a_fault_of_ours_says_so_and_keeps_its_traceback():
    result = CliRunner().invoke(command_that_raises(KeyError("x")), ["fail"])
    assert isinstance(result.exception, KeyError)
    assert result.output.count("\n") == 1
    assert "a fault of this project" in result.output


def test_wrong_usage():
    result = CliRunner().invoke(command_that_raises(KeyError("x")), ["fail", "--unknown"])
    assert result.exit_code == 2
    assert "No such option" in result.output


@pytest.mark.parametrize(
    "error", [Exception("data did not match any variant"), KeyError("a"), RecursionError(), OSError()]
)
def test_what_a_library_raises_names_the_file(error):
    with pytest.raises(UserError, match=r"^tokenizer\.json cannot be read: .") as caught, reading("tokenizer.json"):
        raise error
    assert caught.value.__cause__ is error
    assert "\n" not in str(caught.value)


def test_what_is_one_line_already_stays():
    with pytest.raises(UserError, match=r"^a\.json: no model_type$"), reading("a"):
        raise UserError("a.json: no model_type")


def test_describe():
    assert describe(KeyError("rope")) == "KeyError: 'rope'"
    assert describe(ValueError("two\n lines\x1b[31m")) == "two lines [31m"
    assert describe(FileNotFoundError(errno.ENOENT, "No such file or directory", "x")) == "x: No such file or directory"
    assert len(one_line("a" * 10**6)) == 600
