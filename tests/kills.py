"""Kill commands at random moments: what they write is complete or absent, what they read is untouched, and the same
command works afterwards. `python -m tests.kills --count 200`; the models are tiny and made here."""

import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from safetensors import safe_open
from tqdm import tqdm

from common.text import SAMPLE
from tests.conversion.checkpoints import add_tokenizer, contents
from tests.families import BY_NAME


ROOT = Path(__file__).parent.parent


@dataclass(frozen=True)
class Command:
    """A command line, run in a folder with what the table before it made.

    Args:
        line: module and arguments.
        output: what it writes, removed before it is run again once `final` is there.
        final: what is complete or absent; by default `output`.
        exact: every run writes the same bytes.
    """

    line: str
    output: str
    final: str = ""
    exact: bool = True


COMMANDS = {  # in this order the first run of each makes what the next ones need
    "port": Command("conversion port base ported --num-blocks 2", "ported"),
    "port --link --verify": Command("conversion port base linked --link --verify", "linked"),
    "export": Command("conversion export ported exported", "exported"),
    "upcycle": Command("conversion upcycle base upcycled --experts 2 --top-k 1", "upcycled"),
    "finetune": Command(
        "training finetune --model ported --data text.txt --output tuned --length 32 --max_steps 2 --save_strategy no",
        *("tuned", "tuned/adapter", False),
    ),
    "pretrain": Command(
        "training pretrain --config ported --data texts.jsonl --output trained --length 32 --held-out .5 --max_steps 2",
        *("trained", "trained/model", False),
    ),
    "merge": Command("training merge tuned/adapter merged", "merged"),
    "eval": Command(
        "eval run --model ported --tasks attnres_perplexity --limit 1 --output results",
        *("results", "results/table.json", False),
    ),
}


def start(command: Command, folder: Path) -> subprocess.Popen:
    """Start a command in a process group of its own."""
    return subprocess.Popen(
        [sys.executable, "-m", *command.line.split()],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def run(command: Command, folder: Path) -> None:
    """Run a command to its end."""
    process = start(command, folder)
    _, errors = process.communicate()
    if process.returncode:
        raise AssertionError(f"{command.line}: status {process.returncode}: {errors[-2000:]}")


def kill(command: Command, folder: Path, after: float) -> None:
    """Start a command and kill it, and what it started, after some seconds; it may have ended."""
    process = start(command, folder)
    try:
        process.communicate(timeout=after)
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()


def written(path: Path) -> dict[str, bytes]:
    """What lies at a path, a file or a folder, each file readable as what it is."""
    files = {str(name): content for name, content in contents(path).items()} if path.is_dir() else {"": b""}
    for name in files:
        file = path / name if name else path
        if file.suffix == ".json":
            json.loads(file.read_text(encoding="utf-8"))
        if file.suffix == ".safetensors":
            with safe_open(file, framework="pt"):
                pass
    return files


def remove(path: Path) -> None:
    shutil.rmtree(path) if path.is_dir() else path.unlink(missing_ok=True)


def make_inputs(folder: Path) -> None:
    """A tiny Llama with a tokenizer, a text, and a file of two."""
    BY_NAME["Llama"].base_causal_lm().save_pretrained(folder / "base", max_shard_size="100KB")
    add_tokenizer(folder / "base", tokenizer_class="TokenizersBackend", eos_token="<unk>")
    (folder / "text.txt").write_text(SAMPLE * 10, encoding="utf-8")
    (folder / "texts.jsonl").write_text(json.dumps({"text": SAMPLE}) + "\n" + json.dumps({"text": SAMPLE}) + "\n")


def check(command: Command, folder: Path, after: float, expected: dict[str, bytes]) -> None:
    """Kill a command once and look at what is there.

    Raises:
        AssertionError: something is partial, something given was changed, or the command does not work any more.
    """
    output, final = folder / command.output, folder / (command.final or command.output)
    remove(output)
    others = {path for path in folder.iterdir() if not path.name.startswith(".")}
    before = {path: contents(path) if path.is_dir() else path.read_bytes() for path in others}

    def compare(when: str) -> None:
        found = written(final)
        names = found.keys() | expected.keys()
        same = {name for name in found.keys() & expected.keys() if not command.exact or found[name] == expected[name]}
        assert names == same, f"{final}: {', '.join(sorted(names - same))} not as when undisturbed, {when}"
        for path, content in before.items():
            assert (contents(path) if path.is_dir() else path.read_bytes()) == content, f"{path} was changed {when}"

    kill(command, folder, after)
    if final.exists():
        compare(f"after a kill at {after:.2f} s")
        remove(output)
    run(command, folder)
    compare(f"when run again after a kill at {after:.2f} s")
    assert not list(folder.rglob("*.incomplete")), "something incomplete is left"


def main(
    count: Annotated[int, typer.Option(min=1, help="Kills in all, of each command in turn.")] = 200,
    seed: Annotated[int, typer.Option(help="Of the moments.")] = 0,
    only: Annotated[list[str] | None, typer.Option(help="Kill these alone; several times for more.")] = None,
) -> None:
    """Kill commands at random moments. Exit status 1: one of them left something partial, or changed its input."""
    names, generator, failures = only or list(COMMANDS), random.Random(seed), []
    with tempfile.TemporaryDirectory(prefix="kills-") as work:
        folder, expected, seconds = Path(work), {}, {}
        make_inputs(folder)
        for name, command in tqdm(COMMANDS.items(), desc="whole runs"):
            begin = time.monotonic()
            run(command, folder)
            seconds[name] = time.monotonic() - begin
            expected[name] = written(folder / (command.final or command.output))
        for number in tqdm(range(count), desc="kills"):
            name = names[number % len(names)]
            try:
                check(COMMANDS[name], folder, generator.uniform(0, seconds[name]), expected[name])
            except (AssertionError, ValueError) as error:
                failures.append(f"{name}: {error}")
                tqdm.write(failures[-1])
                remove(folder / COMMANDS[name].output)
                run(COMMANDS[name], folder)  # the others need it
    print(f"{count} kills with seed {seed}, {len(failures)} of them with faults")
    raise typer.Exit(bool(failures))


if __name__ == "__main__":
    typer.run(main)
