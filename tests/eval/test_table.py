"""The table's arithmetic: scores, paired differences against other computations, failures, the picture."""

import json
import math

import hypothesis.strategies as st
import numpy as np
import pytest
from hypothesis import given, settings
from scipy import stats

from eval.benchmarks import Benchmark
from eval.run import Outcome, Subject
from eval.table import compare, markdown, paired_difference, write


class Task:
    class config:
        num_fewshot = 5
        dataset_path = "org/quiz"


def benchmark(name="quiz", metric="acc", paper=None, tasks=("one", "two")):
    return Benchmark(name, name.title(), dict.fromkeys(tasks, Task), metric, "none", paper)


def results_of(values, name="quiz", metric="acc", value=None, stderr=0.02):
    """The harness's results: values of a metric by task. A model says its value, or, of log-likelihoods, no text."""
    return {
        "results": {name: {f"{metric},none": value, f"{metric}_stderr,none": stderr}},
        "samples": {
            task: [
                {
                    "doc_id": i,
                    "filter": filter_name,
                    "resps": [[v if isinstance(v, tuple) else f"I say {v}"]],
                    metric: v if filter_name == "none" else 7,
                }
                for i, v in enumerate(found)
                for filter_name in ("none", "other")
            ]
            for task, found in values.items()
        },
    }


def outcome(name, results=None, failures=None):
    return Outcome(Subject(name, f"/models/{name}"), results or {}, failures or {})


answers = st.lists(st.tuples(st.booleans(), st.booleans()), min_size=2, max_size=60)


@settings(max_examples=30)
@given(pairs=answers)
def test_mcnemar_counts_items_on_which_models_differ(pairs):
    first, second = np.array(pairs, dtype=float).T
    found = paired_difference(first, second)
    better, worse = int(((first == 0) & (second == 1)).sum()), int(((first == 1) & (second == 0)).sum())
    assert found.value == pytest.approx((better - worse) / len(pairs))
    if better + worse == 0:
        assert (found.low, found.high, found.p) == (0, 0, 1)
        return
    n, k = better + worse, min(better, worse)
    by_hand = min(1, 2 * sum(math.comb(n, i) for i in range(k + 1)) / 2**n)
    assert found.p == pytest.approx(by_hand)
    assert found.low <= found.value <= found.high


def test_the_interval_is_the_normal_one_for_many_items():
    random = np.random.default_rng(1)
    first, second = random.integers(0, 2, (2, 2000)).astype(float)
    found = paired_difference(first, second)
    half = 1.96 * (second - first).std() / math.sqrt(2000)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.1 * half)


def test_values_that_are_no_shares_are_tested_by_permutation():
    random = np.random.default_rng(2)
    first = random.normal(size=200)
    second = first + 0.1 + 0.3 * random.normal(size=200)
    found = paired_difference(first, second)
    assert found.test == "permutation"
    assert found.value == pytest.approx((second - first).mean())
    half = 1.96 * (second - first).std() / math.sqrt(200)
    assert (found.low, found.high) == pytest.approx((found.value - half, found.value + half), abs=0.15 * half)
    assert found.p < 0.01


def test_p_is_that_of_a_t_test_for_many_items():
    random = np.random.default_rng(3)
    for shift in (0.0, 0.1, 0.15):
        first = random.normal(size=300)
        second = first + shift + random.normal(size=300)
        found = paired_difference(first, second)
        assert found.p == pytest.approx(stats.ttest_rel(second, first).pvalue, abs=0.02)


def test_weights_make_the_mean_that_of_all_bytes():
    bits = np.array([[1.0, 2.0, 4.0], [2.0, 2.0, 3.0]])
    found = paired_difference(*bits, weights=np.array([100.0, 100.0, 200.0]))
    assert found.value == pytest.approx((100 * 1 + 100 * 0 + 200 * -1) / 400)


def test_a_row_has_scores_in_percent_and_the_difference_of_the_first_two():
    quiz = benchmark(paper=(36.9, 44.4))
    outcomes = [
        outcome("base", {"quiz": results_of({"one": [1, 0, 0], "two": [0, 1]}, value=0.4)}),
        outcome("ours", {"quiz": results_of({"one": [1, 1, 0], "two": [1, 1]}, value=0.8, stderr=0.1)}),
        outcome("more", {"quiz": results_of({"one": [0, 0, 0], "two": [0, 0]}, value=0.0, stderr="N/A")}),
    ]
    (row,) = compare([quiz], outcomes)
    assert [(score.value, score.stderr, score.items) for score in row.scores] == [(40, 2, 5), (80, 10, 5), (0, None, 5)]
    assert row.difference.value == pytest.approx(40)
    assert row.difference.p == pytest.approx(2 * 1 / 2**2)
    table = markdown([row], outcomes)
    assert "| Quiz |     5 | acc    | 40.00 ± 2.00 | 80.00 ± 10.00 |" in table
    for cell in (
        "36.9",
        "44.4",
        "ours − base",
        "+40.00 [+0.00 … +80.00]; 3 of 5 answers alike",
        "0.5 (McNemar)",
        "paper: AttnRes",
    ):
        assert cell in table


def test_bits_per_byte_are_compared_by_text():
    text = benchmark("text", "bits_per_byte", tasks=("text",))
    logs = [[(-100.0, 100), (-300.0, 200)], [(-90.0, 100), (-300.0, 200)]]
    outcomes = [
        outcome(
            name,
            {
                "text": results_of(
                    {"text": values}, "text", "bits_per_byte", -sum(v for v, _ in values) / 300 / math.log(2), "N/A"
                )
            },
        )
        for name, values in zip(("base", "ours"), logs)
    ]
    (row,) = compare([text], outcomes)
    assert row.scores[0].value == pytest.approx(400 / 300 / math.log(2))
    assert row.difference.value == pytest.approx(-10 / 300 / math.log(2))
    assert row.alike is None


@pytest.mark.parametrize("values", [[[1, 0], [0, 1]], [["said", "meant"], ["a", "b"]]])
def test_metrics_of_all_items_together_are_not_compared_by_item(values):
    """Matthews' correlation and BLEU: the harness keeps pairs of each item."""
    results = {"quiz": results_of({"one": [(*value,) for value in values]}, metric="mcc", value=0.5)}
    (row,) = compare([benchmark(metric="mcc", tasks=("one",))], [outcome("a", results), outcome("b", results)])
    assert row.difference is None
    assert [score.value for score in row.scores] == [0.5, 0.5]


def test_one_item_has_no_interval():
    outcomes = [
        outcome(name, {"quiz": results_of({"one": [value]}, value=value)}) for name, value in (("a", 1), ("b", 0))
    ]
    (row,) = compare([benchmark(tasks=("one",))], outcomes)
    assert row.difference is None
    assert [score.value for score in row.scores] == [100, 0]


def test_equal_answers_say_so():
    outcomes = [outcome(name, {"quiz": results_of({"one": [1, 0], "two": [1]}, value=2 / 3)}) for name in ("a", "b")]
    rows = compare([benchmark()], outcomes)
    assert "| the same item for item; 3 of 3 answers alike |" in markdown(rows, outcomes)


def test_a_failure_has_its_reason_and_other_items_are_not_compared(tmp_path):
    outcomes = [
        outcome("base", {"quiz": results_of({"one": [1], "two": [0]}, value=0.5)}),
        outcome("ours", {}, {"quiz": "OutOfMemoryError: no\nroom | left"}),
    ]
    rows = compare([benchmark()], outcomes)
    table = write(rows, outcomes, tmp_path / "new")
    assert "failed: OutOfMemoryError: no room \\| left" in table
    assert rows[0].difference is None
    longer = [outcomes[0], outcome("ours", {"quiz": results_of({"one": [1, 1], "two": [0]}, value=0.5)})]
    assert compare([benchmark()], longer)[0].difference is None


def test_written_files_hold_the_table(tmp_path):
    outcomes = [outcome(name, {"quiz": results_of({"one": [1, 0], "two": [1]}, value=2 / 3)}) for name in ("a", "b")]
    rows = compare([benchmark(paper=(1.0, 2.0))], outcomes)
    table = write(rows, outcomes, tmp_path)
    assert (tmp_path / "table.md").read_text() == table
    content = json.loads((tmp_path / "table.json").read_text())
    assert content["rows"][0]["scores"][0]["value"] == pytest.approx(200 / 3)
    assert [model["name"] for model in content["models"]] == ["a", "b"]
    assert (tmp_path / "table.png").stat().st_size > 5_000
    # A table without shares has no picture, and keeps none of another's
    rows = compare([benchmark("text", "bits_per_byte", tasks=("text",))], [outcome("a", failures={"text": "no"})])
    write(rows, outcomes[:1], tmp_path)
    assert not (tmp_path / "table.png").exists()
