"""One table for several models: scores, the paper's figures, and how sure the difference of the first two is."""

import json
import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from pytablewriter import MarkdownTableWriter
from scipy import stats

from common.files import whole_file

from .benchmarks import Benchmark
from .run import Outcome


RESAMPLES = 9_999


@dataclass(frozen=True)
class Score:
    """A benchmark's score: percent for shares of items, else in the metric's own unit. `stderr` of it, if known."""

    value: float
    stderr: float | None
    items: int


@dataclass(frozen=True)
class Difference:
    """Second model minus first over the same items: the 95 % interval (bootstrap over items), and how likely a
    difference at least as large is between equal models (`p`: exact McNemar, or a permutation test)."""

    value: float
    low: float
    high: float
    p: float
    test: str


@dataclass(frozen=True)
class Row:
    """One benchmark. A model that failed on it has the reason in place of a score.

    Attributes:
        alike: how many answers of the first two models are the same text, where they write any.
    """

    benchmark: str
    title: str
    metric: str
    shots: int
    scores: list[Score | str]
    paper: tuple[float, float] | None
    difference: Difference | None
    alike: int | None
    is_share: bool
    dataset: str


def compare(benchmarks: Sequence[Benchmark], outcomes: Sequence[Outcome]) -> list[Row]:
    """A row for each benchmark."""
    rows = []
    for benchmark in benchmarks:
        found = [outcome.results.get(benchmark.name) for outcome in outcomes]
        items = [_items(benchmark, results) if results else {} for results in found]
        values = [value for answered in items for value in answered.values()]
        is_share = bool(values) and all(isinstance(value, int | float) and 0 <= value <= 1 for value in values)
        scale = 100 if is_share else 1
        scores = [
            _score(benchmark, results, len(answered), scale)
            if results
            else f"failed: {outcome.failures.get(benchmark.name, 'not run')}"
            for outcome, results, answered in zip(outcomes, found, items)
        ]
        both = found[:2] if len(found) > 1 and all(found[:2]) else None
        rows.append(
            Row(
                benchmark.name,
                benchmark.title,
                benchmark.metric,
                benchmark.shots,
                scores,
                benchmark.paper,
                _difference(*items[:2], scale) if both else None,
                alike=_alike(benchmark, *both) if both else None,
                is_share=is_share,
                dataset=benchmark.dataset,
            )
        )
    return rows


def paired_difference(first: np.ndarray, second: np.ndarray, weights: np.ndarray | None = None) -> Difference:
    """Compare two models' values of the same items, [items] each, by their (weighted) means.

    Items that are all 0 or 1 are tested by McNemar's exact test, others by a permutation test of the signs.
    """
    differences, weights = second - first, np.ones(len(first)) if weights is None else weights
    value = float(np.average(differences, weights=weights))
    if not differences.any():
        return Difference(0.0, 0.0, 0.0, 1.0, "the same item for item")
    random = np.random.default_rng(0)
    drawn = stats.bootstrap(
        (differences, weights),
        lambda d, w, axis=-1: (d * w).sum(axis) / w.sum(axis),
        paired=True,
        vectorized=True,
        batch=100,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=random,
    )
    if set(np.unique([first, second])) <= {0.0, 1.0}:
        better, worse = int((differences > 0).sum()), int((differences < 0).sum())
        p, test = stats.binomtest(better, better + worse).pvalue, "McNemar"
    else:
        contributions = differences * weights
        p = stats.permutation_test(
            (contributions, np.zeros_like(contributions)),
            lambda a, b, axis=-1: (a - b).mean(axis),
            permutation_type="samples",
            vectorized=True,
            batch=100,
            n_resamples=RESAMPLES,
            rng=random,
        ).pvalue
        test = "permutation"
    return Difference(value, *map(float, drawn.confidence_interval), float(p), test)


def _items(benchmark: Benchmark, results: dict[str, Any]) -> dict[tuple[str, int], float | list[float]]:
    return {
        (task, sample["doc_id"]): sample[benchmark.metric]
        for task in benchmark.tasks
        for sample in results["samples"][task]
        if sample["filter"] == benchmark.filter
    }


def _alike(benchmark: Benchmark, first: dict[str, Any], second: dict[str, Any]) -> int | None:
    said = [
        {(task, sample["doc_id"]): sample["resps"] for task in benchmark.tasks for sample in results["samples"][task]}
        for results in (first, second)
    ]
    if not all(isinstance(text, str) for answers in said for responses in answers.values() for [text, *_] in responses):
        return None  # likelihoods
    return sum(said[1].get(item) == responses for item, responses in said[0].items())


def _score(benchmark: Benchmark, results: dict[str, Any], items: int, scale: float) -> Score:
    found = results["results"][benchmark.name]
    stderr = found.get(f"{benchmark.metric}_stderr,{benchmark.filter}")
    return Score(
        found[f"{benchmark.metric},{benchmark.filter}"] * scale,
        stderr * scale if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
        items,
    )


def _difference(first: dict, second: dict, scale: float) -> Difference | None:
    if first.keys() != second.keys():
        return None  # of other limits: not the same items
    values = [np.array([items[key] for key in first], dtype=float) for items in (first, second)]
    if values[0].ndim == 1:
        found = paired_difference(*values)
        return replace(found, value=found.value * scale, low=found.low * scale, high=found.high * scale)
    sizes = values[0][:, 1]  # a text's log-likelihood and bytes: bits per byte
    return paired_difference(*(-side[:, 0] / sizes / math.log(2) for side in values), weights=sizes)


def markdown(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """The table as Markdown."""
    names = [outcome.subject.name for outcome in outcomes]
    has_paper = any(row.paper for row in rows)
    header = ["task", "shots", "metric", *names]
    header += ["paper: baseline", "paper: AttnRes"] if has_paper else []
    header += [f"{names[1]} − {names[0]}", "p"] if len(names) > 1 else []
    lines = []
    for row in rows:
        line = [row.title, str(row.shots), row.metric, *map(_cell, row.scores)]
        line += [f"{figure:.1f}" for figure in row.paper] if row.paper else ["", ""] * has_paper
        if len(names) > 1:
            line += _difference_cells(row)
        lines.append(line)
    return MarkdownTableWriter(headers=header, value_matrix=lines, margin=1).dumps()


def _cell(score: Score | str) -> str:
    if isinstance(score, str):
        return score.replace("\n", " ")[:200]
    digits = 2 if score.value >= 10 else 4
    return f"{score.value:.{digits}f}" + (f" ± {score.stderr:.2f}" if score.stderr is not None else "")


def _difference_cells(row: Row) -> list[str]:
    if (difference := row.difference) is None:
        return ["", ""]
    alike = "" if row.alike is None else f"; {row.alike} of {row.scores[0].items} answers alike"
    if difference.test.startswith("the same"):
        return [difference.test + alike, "1"]
    form = "+.2f" if max(abs(difference.low), abs(difference.high)) >= 0.1 else "+.1g"
    value, low, high = (format(number, form) for number in (difference.value, difference.low, difference.high))
    return [f"{value} [{low} … {high}]{alike}", f"{difference.p:.3g} ({difference.test})"]


def write(rows: Sequence[Row], outcomes: Sequence[Outcome], output: Path) -> str:
    """Write `table.md`, `table.json` and `table.png` to `output`; returns the table."""
    table = markdown(rows, outcomes)
    with whole_file(output / "table.md") as file:
        file.write_text(table, encoding="utf-8")
    content = {"models": [asdict(outcome.subject) for outcome in outcomes], "rows": [asdict(row) for row in rows]}
    with whole_file(output / "table.json") as file:
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _draw(rows, [outcome.subject.name for outcome in outcomes], output / "table.png")
    return table


def _draw(rows: Sequence[Row], names: list[str], file: Path) -> None:
    """Shares in percent, with 95 % intervals, and the paper's two figures."""
    shares = [row for row in rows if row.is_share]
    if not shares:
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.5 * len(shares)), layout="constrained")
    for index, name in enumerate(names):
        places, values, errors = [], [], []
        for place, row in enumerate(shares):
            if isinstance(score := row.scores[index], Score):
                places.append(place + 0.5 * (index + 1) / (len(names) + 1) - 0.25)
                values.append(score.value)
                errors.append(1.96 * (score.stderr or 0))
        axes.errorbar(values, places, xerr=errors, fmt="o", markersize=4, capsize=2, label=name)
    for column, (label, marker) in enumerate((("paper: baseline", "|"), ("paper: AttnRes", "d"))):
        known = [(row.paper[column], place) for place, row in enumerate(shares) if row.paper]
        if known:
            axes.scatter(*zip(*known), marker=marker, color="0.5", label=label)
    axes.set(yticks=range(len(shares)), yticklabels=[row.title for row in shares])
    axes.set(xlabel="score, %, 95 % interval", xlim=(0, 100))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")
    pyplot.close(figure)
