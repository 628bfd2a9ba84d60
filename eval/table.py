"""One table for several models: scores, the paper's figures, and how sure the difference of the first two is."""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import matplotlib
import numpy as np
from scipy import stats

from common.files import whole_file
from common.markdown import table as markdown_table

from .benchmarks import Benchmark
from .run import Outcome


RESAMPLES = 9_999


@dataclass(frozen=True)
class Score:
    """A benchmark's score and its standard error, if known: percent for shares of items, else in the metric's unit."""

    value: float
    stderr: float | None
    items: int


@dataclass(frozen=True)
class Difference:
    """The second model's mean minus the first one's over the same items.

    Attributes:
        low, high: the 95 % interval (bootstrap over items).
        p: how likely a difference at least as large is between equal models.
        test: what `p` is by: McNemar's exact test, or a permutation test.
    """

    value: float
    low: float
    high: float
    p: float
    test: str


@dataclass(frozen=True)
class Row:
    """One benchmark.

    Attributes:
        scores: one per model; the reason where the model failed.
        alike: how many answers of the first two models are the same text, where they write any.
        is_share: scores are shares of the items, in percent.
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
    """Make a row for each benchmark: every model's score, and the difference of the first two models.

    Example:
        from pathlib import Path

        from eval.run import Settings, run_benchmarks, subjects_of
        from eval.table import compare, markdown

        subjects = subjects_of(["demo/checkpoints/SmolLM2-135M-Instruct"], adapter=None)
        benchmarks, outcomes = run_benchmarks(subjects, ["attnres_perplexity"], Settings(limit=1), Path("results"))
        print(markdown(compare(benchmarks, outcomes), outcomes))
    """
    rows = []
    for benchmark in benchmarks:
        results = [outcome.results.get(benchmark.name) for outcome in outcomes]
        items = [{} if result is None else _items(benchmark, result) for result in results]

        # Whether values are shares is decided over all models, so that all have one unit.
        values = [value for item_values in items for value in item_values.values()]
        is_share = bool(values) and all(isinstance(value, int | float) and 0 <= value <= 1 for value in values)
        scale = 100 if is_share else 1
        scores = [
            f"failed: {outcome.failures.get(benchmark.name, 'not run')}"
            if result is None
            else _score(benchmark, result, len(item_values), scale)
            for outcome, result, item_values in zip(outcomes, results, items)
        ]

        # Compare the first two models, where both have results.
        difference, alike = None, None
        if len(results) > 1 and None not in results[:2]:
            difference = _difference(benchmark.metric, *items[:2], scale)
            alike = _count_alike(benchmark, *results[:2])
        rows.append(
            Row(
                benchmark=benchmark.name,
                title=benchmark.title,
                metric=benchmark.metric,
                shots=benchmark.shots,
                scores=scores,
                paper=benchmark.paper,
                difference=difference,
                alike=alike,
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
    # The interval: draw items with replacement, each one's difference and weight together.
    random = np.random.default_rng(0)  # a table is the same each time
    bootstrap = stats.bootstrap(
        (differences, weights),
        lambda d, w, axis=-1: (d * w).sum(axis) / w.sum(axis),
        paired=True,
        vectorized=True,
        batch=100,
        n_resamples=RESAMPLES,
        method="percentile",
        rng=random,
    )
    # The test, of values that are right or wrong: each of two equal models would be right on half of the items on which
    # they differ. Of other values: each difference could as well have the opposite sign.
    if set(np.unique([first, second])) <= {0.0, 1.0}:
        better, worse = int((differences > 0).sum()), int((differences < 0).sum())
        p, test = stats.binomtest(better, better + worse).pvalue, "McNemar"
    else:
        contributions = differences * weights
        # To exchange a contribution with a zero, item by item, is to change its sign.
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
    return Difference(value, *map(float, bootstrap.confidence_interval), float(p), test)


def _items(benchmark: Benchmark, results: dict[str, Any]) -> dict[tuple[str, int], float | list[float]]:
    """Collect the reported metric's value for each item, by task and number."""
    return {
        (task, sample["doc_id"]): sample[benchmark.metric]
        for task in benchmark.tasks
        for sample in results["samples"][task]
        if sample["filter"] == benchmark.filter
    }


def _count_alike(benchmark: Benchmark, first: dict[str, Any], second: dict[str, Any]) -> int | None:
    """Count the items to which two models responded with the same text; None where responses are likelihoods."""
    first_responses, second_responses = (
        {(task, sample["doc_id"]): sample["resps"] for task in benchmark.tasks for sample in results["samples"][task]}
        for results in (first, second)
    )
    for responses in (*first_responses.values(), *second_responses.values()):
        if not all(isinstance(text, str) for [text, *_] in responses):
            return None
    return sum(second_responses.get(item) == responses for item, responses in first_responses.items())


def _score(benchmark: Benchmark, results: dict[str, Any], items: int, scale: float) -> Score:
    """Read a benchmark's score from the harness's results."""
    metrics = results["results"][benchmark.name]
    stderr = metrics.get(f"{benchmark.metric}_stderr,{benchmark.filter}")
    return Score(
        metrics[f"{benchmark.metric},{benchmark.filter}"] * scale,
        stderr * scale if isinstance(stderr, int | float) and math.isfinite(stderr) else None,
        items,
    )


def _difference(metric: str, first: dict, second: dict, scale: float) -> Difference | None:
    """Compare two models' values by item.

    None where their items are not the same, for their limits differ, or one; and where the metric is of all items
    together, as BLEU or a correlation: then the harness keeps of an item what that is computed of.
    """
    if first.keys() != second.keys() or len(first) < 2:  # one item says nothing of others: it has no interval
        return None
    kept = [[items[key] for key in first] for items in (first, second)]
    numbers = all(np.isscalar(value) and not isinstance(value, str) for values in kept for value in values)
    if not numbers and metric != "bits_per_byte":
        return None
    values = [np.array(of_model, dtype=float) for of_model in kept]
    if numbers:
        difference = paired_difference(*values)
        return replace(
            difference, value=difference.value * scale, low=difference.low * scale, high=difference.high * scale
        )
    # Pairs of a text's log-likelihood and its bytes: bits per byte, so that the mean weighs texts by their bytes.
    sizes = values[0][:, 1]
    return paired_difference(*(-pairs[:, 0] / sizes / math.log(2) for pairs in values), weights=sizes)


def markdown(rows: Sequence[Row], outcomes: Sequence[Outcome]) -> str:
    """Write the table as Markdown."""
    names = [outcome.subject.name for outcome in outcomes]
    has_paper = any(row.paper for row in rows)
    header = ["task", "shots", "metric", *names]
    header += ["paper: baseline", "paper: AttnRes"] if has_paper else []
    header += [f"{names[1]} − {names[0]}", "p"] if len(names) > 1 else []
    lines = []
    for row in rows:
        line = [row.title, str(row.shots), row.metric, *map(_cell, row.scores)]
        if has_paper:
            line += [f"{figure:.1f}" for figure in row.paper] if row.paper else ["", ""]
        if len(names) > 1:
            line += _difference_cells(row)
        lines.append(line)
    return _aligned_table(header, lines)


def _aligned_table(header: list[str], lines: list[list[str]]) -> str:
    """Lay out a Markdown table that also reads well as text, columns of numbers aligned to the right."""
    columns, rules = [], []
    for title, *cells in zip(header, *lines):
        title, *cells = (cell.replace("|", "\\|") for cell in (title, *cells))
        width = max(map(len, (title, "---", *cells)))
        if all(re.fullmatch(r"[\d.]*", cell) for cell in cells):
            rules.append(f" {'-' * (width - 1)}: ")
            cells = [cell.rjust(width) for cell in cells]
        else:
            rules.append(f" {'-' * width} ")
            cells = [cell.ljust(width) for cell in cells]
        columns.append([f"{title:^{width}}", *cells])
    header, *lines = zip(*columns)
    return markdown_table(header, lines, rules) + "\n"


def _cell(score: Score | str) -> str:
    """Write a score with its standard error, or the start of a failure's reason."""
    if isinstance(score, str):
        return score.replace("\n", " ")[:200]
    digits = 2 if score.value >= 10 else 4
    return f"{score.value:.{digits}f}" + (f" ± {score.stderr:.2f}" if score.stderr is not None else "")


def _difference_cells(row: Row) -> list[str]:
    """Write a difference with its interval, and p with its test."""
    if (difference := row.difference) is None:
        return ["", ""]
    alike = "" if row.alike is None else f"; {row.alike} of {row.scores[0].items} answers alike"
    if difference.test.startswith("the same"):
        return [difference.test + alike, "1"]
    form = "+.2f" if max(abs(difference.low), abs(difference.high)) >= 0.1 else "+.1g"
    value, low, high = (format(number, form) for number in (difference.value, difference.low, difference.high))
    return [f"{value} [{low} … {high}]{alike}", f"{difference.p:.3g} ({difference.test})"]


def write(rows: Sequence[Row], outcomes: Sequence[Outcome], output: Path) -> str:
    """Write `table.md`, `table.json` and `table.png` to `output`, and return the table."""
    table = markdown(rows, outcomes)
    with whole_file(output / "table.md") as file:
        file.write_text(table, encoding="utf-8")
    content = {"models": [asdict(outcome.subject) for outcome in outcomes], "rows": [asdict(row) for row in rows]}
    with whole_file(output / "table.json") as file:
        file.write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
    _draw(rows, [outcome.subject.name for outcome in outcomes], output / "table.png")
    return table


def _draw(rows: Sequence[Row], names: list[str], file: Path) -> None:
    """Draw shares in percent with 95 % intervals, and the paper's two figures; no file where there are no shares."""
    shares = [row for row in rows if row.is_share]
    if not shares:
        file.unlink(missing_ok=True)  # of another table
        return
    matplotlib.use("Agg")
    from matplotlib import pyplot

    # A line for each benchmark; models that have a score are spread around it.
    figure, axes = pyplot.subplots(figsize=(8, 1.2 + 0.5 * len(shares)), layout="constrained")
    for index, name in enumerate(names):
        heights, values, errors = [], [], []
        for line, row in enumerate(shares):
            if isinstance(score := row.scores[index], Score):
                heights.append(line + 0.5 * (index + 1) / (len(names) + 1) - 0.25)
                values.append(score.value)
                errors.append(1.96 * (score.stderr or 0))
        axes.errorbar(values, heights, xerr=errors, fmt="o", markersize=4, capsize=2, label=name)
    # The paper's figures lie on the line itself.
    for column, (label, marker) in enumerate((("paper: baseline", "|"), ("paper: AttnRes", "d"))):
        known = [(row.paper[column], line) for line, row in enumerate(shares) if row.paper]
        if known:
            axes.scatter(*zip(*known), marker=marker, color="0.5", label=label)
    # The first benchmark is at the top.
    axes.set(yticks=range(len(shares)), yticklabels=[row.title for row in shares])
    axes.set(xlabel="score, %, 95 % interval", xlim=(0, 100))
    axes.invert_yaxis()
    axes.grid(axis="x", alpha=0.3)
    axes.legend(fontsize=8)
    with whole_file(file) as partial:
        figure.savefig(partial, dpi=120, format="png")
    pyplot.close(figure)
