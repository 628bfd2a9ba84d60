"""Every command says how it is used."""

import pytest
from typer.testing import CliRunner

from benchmarks.__main__ import app


@pytest.mark.parametrize("name", [command.callback.__name__ for command in app.registered_commands])
def test_a_command_has_help_and_an_example(name):
    result = CliRunner().invoke(app, [name, "--help"])
    assert result.exit_code == 0
    assert f"Example: python -m benchmarks {name} " in result.output
