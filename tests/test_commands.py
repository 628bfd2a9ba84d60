"""Every module that can be run says how."""

import re
import runpy

import pytest

from tests.conftest import ROOT


TOOLS = ("benchmarks", "conversion", "demo", "eval", "model_cards", "training")
MODULES = sorted(
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for tool in TOOLS
    for path in (ROOT / tool).rglob("*.py")
    if "__name__ == " in path.read_text()
)


def help_of(module, arguments, monkeypatch, capsys):
    monkeypatch.setattr("sys.argv", [module, *arguments, "--help"])
    with pytest.raises(SystemExit) as end:
        runpy.run_module(module, run_name="__main__", alter_sys=True)
    assert not end.value.code
    return capsys.readouterr().out


@pytest.mark.filterwarnings("ignore:.*found in sys.modules:RuntimeWarning")
@pytest.mark.parametrize("module", MODULES)
def test_help_of_every_command_has_an_example(module, monkeypatch, capsys):
    """Of a module's one command, or of each that its help lists."""
    text = help_of(module, [], monkeypatch, capsys)
    commands = re.findall(r"^  ([a-z-]+)  ", text.partition("Commands:")[2], re.MULTILINE)
    assert bool(commands) == ("Commands:" in text)
    for arguments in [[command] for command in commands] or [[]]:
        text = " ".join(help_of(module, arguments, monkeypatch, capsys).split())
        run = " ".join(["python -m", module.removesuffix(".__main__"), *arguments])
        script = f"python {module.replace('.', '/')}.py"
        assert any(f"Example: {how}" in text for how in (run, script))
