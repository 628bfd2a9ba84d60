"""Time candidates in turns, measure peak memory, and report: a table, JSON and a picture."""

import json
import multiprocessing
import random
import resource
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from statistics import median

import torch
import torch.distributed as dist
import torch.multiprocessing
from rich.console import Console
from rich.table import Table
from tqdm import tqdm

from common.files import whole_file


Runs = dict[str, Callable[[], object]]
Results = dict[str, dict[str, dict[str, float]]]  # case -> candidate -> {"ratio", and what else was measured}


def seconds(run: Callable[[], object], clock: Callable[[], float] = time.perf_counter) -> float:
    """Time one call."""
    begin = clock()
    run()
    return clock() - begin


def peak_mib() -> float:
    """Return the peak memory of this process so far. A process that is started begins with its parent's."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def in_own_process(function: Callable, *args):
    """Call a function in a fresh process, whose peak memory is then its own."""
    with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as pool:
        return pool.submit(function, *args).result()


def in_processes(number: int, function: Callable, *args):
    """Call a function in new processes of one group; returns what the first one's call does, as JSON has it."""
    with tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.spawn(run_in_group, (number, Path(folder), function, args), nprocs=number)
        return json.loads((Path(folder) / "result.json").read_text())


def run_in_group(rank: int, number: int, folder: Path, function: Callable, args: tuple) -> None:
    """Call a function as one process of several, and leave the first one's result in a folder."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=number)
    result = function(*args)
    if rank == 0:
        (folder / "result.json").write_text(json.dumps(result))
    dist.barrier()
    dist.destroy_process_group()


def compare(
    runs: Runs,
    repeats: int,
    label: str,
    between: Callable[[], object] = lambda: None,
    clock: Callable[[], float] = time.perf_counter,
    silent: bool = False,
) -> dict[str, dict[str, float]]:
    """Time all candidates in several turns, each turn in an order drawn anew (seeded).

    Who runs pays for the caches that the one before has filled. In a fixed order that is always the same candidate,
    which shifts ratios by a percent.

    Args:
        between: is run untimed before each candidate, so that all come after the same.
        clock: gives the seconds.
        silent: shows no progress.

    Returns:
        For each candidate the median of its "seconds", and of its "ratio" to the first candidate within a turn.
    """
    order = random.Random(0)
    times = {name: [] for name in runs}
    for turn in tqdm(range(repeats + 1), desc=label, disable=silent):
        for name in order.sample(list(runs), len(runs)):
            between()
            taken = seconds(runs[name], clock)
            if turn > 0:  # the first turn warms up
                times[name].append(taken)
    base_times = next(iter(times.values()))
    return {
        name: {
            "ratio": median(taken / base for taken, base in zip(candidate_times, base_times, strict=True)),
            "seconds": median(candidate_times),
        }
        for name, candidate_times in times.items()
    }


def report(title: str, results: Results, output: Path | None) -> None:
    """Print ratios and what they are of; with `output`, a path without suffix, write them as JSON and as a picture."""
    candidates = list(next(iter(results.values())))
    table = Table(title, *candidates)
    for case, row in results.items():
        table.add_row(case, *(f"{cell['ratio']:.3f} ({amount(cell)})" for cell in row.values()))
    note = f"ratios to {candidates[0]!r}, medians of turns; {torch.get_num_threads()} threads"
    Console(width=150).print(table, note)
    if output is not None:
        with whole_file(output.with_suffix(".json")) as file:
            file.write_text(json.dumps({"title": title, "note": note, "cases": results}, indent=1) + "\n")
        draw(title, note, results, output.with_suffix(".png"))


def amount(cell: dict[str, float]) -> str:
    """Write what was measured in a unit that suits its size."""
    if "MiB" in cell:
        return f"{cell['MiB']:.0f} MiB"
    return f"{cell['seconds']:.2f} s" if cell["seconds"] >= 1 else f"{cell['seconds'] * 1e3:.1f} ms"


def draw(title: str, note: str, results: Results, path: Path) -> None:
    """Draw ratios as bars, a group for each case."""
    import matplotlib

    matplotlib.use("Agg")  # no display needed
    import matplotlib.pyplot as plt

    # Each case is one unit high: its candidates' bars, and a gap.
    candidates = list(next(iter(results.values())))
    figure, axis = plt.subplots(figsize=(10, 1.5 + 0.22 * len(results) * (len(candidates) + 1)), layout="constrained")
    height = 0.85 / len(candidates)
    for index, name in enumerate(candidates):
        ratios = [row[name]["ratio"] for row in results.values()]
        bars = axis.barh([case + index * height for case in range(len(results))], ratios, height, label=name)
        axis.bar_label(bars, [f"{ratio:.2f}" for ratio in ratios], padding=2, fontsize=8)
    axis.set_yticks([case + 0.4 for case in range(len(results))], list(results))
    axis.invert_yaxis()
    # A few large ratios would leave the others no room.
    if max(cell["ratio"] for row in results.values() for cell in row.values()) > 4:
        axis.set_xscale("log")
    axis.axvline(1, color="black", linewidth=0.8)
    axis.set_xlabel(f"{note} (lower is better)")
    axis.set_title(title)
    axis.legend(fontsize=8)
    with whole_file(path) as partial:
        figure.savefig(partial, dpi=110, format="png")
    plt.close(figure)
