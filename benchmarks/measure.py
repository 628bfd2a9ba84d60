"""Timing in turn, and reports: a table, JSON and a picture."""

import json
import multiprocessing
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import torch
from rich.console import Console
from rich.table import Table
from tqdm import tqdm


Runs = dict[str, Callable[[], object]]
Found = dict[str, dict[str, dict[str, float]]]  # case -> candidate -> {"ratio", and what else was measured}


def seconds(run: Callable[[], object]) -> float:
    begin = time.perf_counter()
    run()
    return time.perf_counter() - begin


def peak_mib() -> float:
    """The peak memory of this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(function: Callable, *args):
    """Call a function in a fresh process, whose peak memory is then its own."""
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        return pool.apply(function, args)


def compare(runs: Runs, repeats: int, label: str) -> dict[str, dict[str, float]]:
    """Run all in turn, several times; medians, and the median of the ratios to the first within a turn."""
    times = {name: [] for name in runs}
    for turn in tqdm(range(repeats + 1), desc=label):
        for name, run in runs.items():
            taken = seconds(run)
            if turn:  # the first turn warms up
                times[name].append(taken)
    return {
        name: {
            "ratio": median(one / base for one, base in zip(taken, next(iter(times.values())), strict=True)),
            "seconds": median(taken),
        }
        for name, taken in times.items()
    }


def report(title: str, found: Found, output: Path | None) -> None:
    """Print ratios and what they are of; with `output`, a path without suffix, write it as JSON and as a picture."""
    candidates = list(next(iter(found.values())))
    table = Table(title, *candidates)
    for case, row in found.items():
        table.add_row(case, *(f"{cell['ratio']:.3f} ({amount(cell)})" for cell in row.values()))
    note = f"ratios to {candidates[0]!r}, medians of turns; {torch.get_num_threads()} threads"
    Console(width=150).print(table, note)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.with_suffix(".json").write_text(
            json.dumps({"title": title, "note": note, "cases": found}, indent=1) + "\n"
        )
        draw(title, note, found, output.with_suffix(".png"))


def amount(cell: dict[str, float]) -> str:
    """What was measured, in a unit fit to read."""
    if "MiB" in cell:
        return f"{cell['MiB']:.0f} MiB"
    return f"{cell['seconds']:.2f} s" if cell["seconds"] >= 1 else f"{cell['seconds'] * 1e3:.1f} ms"


def draw(title: str, note: str, found: Found, path: Path) -> None:
    """Ratios as bars, a group for each case."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    candidates = list(next(iter(found.values())))
    figure, axis = plt.subplots(figsize=(10, 1.5 + 0.22 * len(found) * (len(candidates) + 1)), layout="constrained")
    height = 0.85 / len(candidates)
    for index, name in enumerate(candidates):
        ratios = [row[name]["ratio"] for row in found.values()]
        bars = axis.barh([case + index * height for case in range(len(found))], ratios, height, label=name)
        axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=8)
    axis.set_yticks([case + 0.4 for case in range(len(found))], list(found))
    axis.invert_yaxis()
    if max(cell["ratio"] for row in found.values() for cell in row.values()) > 4:
        axis.set_xscale("log")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(f"{note} (lower is better)")
    axis.set_title(title)
    axis.legend(fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
