"""Candidates take turns without favour to a place in them, and reports are written whole."""

import json
import os

import pytest

from benchmarks import measure
from benchmarks.measure import compare, in_own_process, report


NAMES = ["base", "twice", "thrice"]


@pytest.fixture
def no_clock(monkeypatch):
    """A run takes as many seconds as it returns."""
    monkeypatch.setattr(measure, "seconds", lambda run, *_: run())


def order_of_runs(turns):
    ran = []

    def run(name):
        ran.append(name)
        return float(len(ran))

    compare({name: lambda name=name: run(name) for name in NAMES}, turns - 1, "")
    return [tuple(ran[start : start + len(NAMES)]) for start in range(0, len(ran), len(NAMES))]


def test_each_turn_has_all_candidates_in_an_order_of_its_own(no_clock):
    turns = order_of_runs(60)
    assert {frozenset(turn) for turn in turns} == {frozenset(NAMES)}
    assert len(turns) == 60
    assert len(set(turns)) == 6  # every order occurs
    assert order_of_runs(60) == turns


def test_what_runs_between_comes_before_each_and_is_not_timed(no_clock):
    events = []

    def run(name, taken):
        events.append(name)
        return taken

    runs = {name: lambda name=name, taken=taken: run(name, taken) for name, taken in zip(NAMES, (2.0, 4.0, 6.0))}
    rows = compare(runs, 3, "", between=lambda: events.append("between"))
    assert events[::2] == ["between"] * 12
    assert "between" not in events[1::2]
    assert rows == {
        "base": {"ratio": 1, "seconds": 2},
        "twice": {"ratio": 2, "seconds": 4},
        "thrice": {"ratio": 3, "seconds": 6},
    }


def test_ratios_are_those_within_a_turn_and_the_first_turn_warms_up(no_clock):
    """A machine that slows down between turns changes no ratio."""
    base, other = iter([100.0, 1.0, 2.0, 4.0]), iter([1.0, 3.0, 6.0, 12.0])
    rows = compare({"base": lambda: next(base), "other": lambda: next(other)}, 3, "")
    assert rows["other"] == {"ratio": 3, "seconds": 6}


def test_another_process_returns_what_it_was_asked():
    assert in_own_process(os.getpid) != os.getpid()


def test_a_report_is_written_whole(tmp_path, monkeypatch):
    results = {"a case": {"base": {"ratio": 1.0, "seconds": 2.0}, "other": {"ratio": 1.5, "seconds": 3.0}}}
    report("Title", results, tmp_path / "new" / "one")
    assert json.loads((tmp_path / "new" / "one.json").read_text())["cases"] == results
    assert (tmp_path / "new" / "one.png").read_bytes().startswith(b"\x89PNG")

    def full(*_, **__):
        raise OSError("no space left")

    monkeypatch.setattr("matplotlib.figure.Figure.savefig", full)
    with pytest.raises(OSError, match="no space left"):
        report("Title", results, tmp_path / "two")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "two.json"]
