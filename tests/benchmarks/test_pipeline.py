"""What the benchmark of pipelines counts: vectors by the plan and in processes, bytes of tensors that are alive."""

import json

import pytest
import torch
from typer.testing import CliRunner

from benchmarks.__main__ import app
from benchmarks.pipeline import KIMI_K3, LiveBytes, count_by_plan
from modeling_attnres.configuration_attnres import BlockLayout


def test_counts_are_those_of_the_formulas():
    """Two stages a process on two, each of four blocks: 4 of the first, 2 · 4 that are new, and the embedding."""
    count = count_by_plan(BlockLayout(32, tuple(range(0, 32, 2))), 2, 2)
    assert (count["planned"], count["paper"]) == (4 + 2 * 4 + 1, 4 + 4 * 4)
    assert (count["planned without caching"], count["paper without caching"]) == (4 * (1 + 2 + 3) + 3, 4 * (1 + 2 + 3))


def test_kimi_k3_sends_less_than_half_with_caching():
    count = count_by_plan(KIMI_K3, 4, 4)
    assert (count["model"], count["planned"], count["planned without caching"]) == ("93 layers, 8 blocks", 31, 79)


def test_live_bytes_are_those_of_new_tensors_until_they_are_freed():
    before = torch.zeros(1000)
    with LiveBytes() as found:
        first = before + 1
        assert found.alive == 4000
        view = first[:10]
        before.t().add_(1)  # no new bytes
        assert found.alive == 4000
        second = first * 2
        del first
        assert (found.alive, found.peak) == (8000, 8000)
        del view, second
        assert (found.alive, found.peak) == (0, 8000)


def test_live_bytes_have_what_is_kept_for_the_backward_pass():
    weight = torch.ones(100, requires_grad=True)
    with LiveBytes() as found:
        loss = (weight.exp().exp()).sum()
        assert found.alive == 2 * 400 + 4
        loss.backward()
        assert found.alive == 400 + 4  # the gradient, and the loss
        assert found.peak >= 3 * 400


@pytest.mark.exhaustive
@pytest.mark.slow
def test_processes_send_what_is_planned(tmp_path):
    args = ["pipeline", "--part", "counts", "--output", str(tmp_path / "found")]
    result = CliRunner().invoke(app, args, catch_exceptions=False)
    assert result.exit_code == 0, result.output
    *rows, kimi = json.loads((tmp_path / "found-counts.json").read_text())
    assert len(rows) == 6
    for row in rows:
        assert (row["sent"], row["sent without caching"]) == (row["planned"], row["planned without caching"])
    assert "sent" not in kimi


@pytest.mark.exhaustive
@pytest.mark.slow
def test_checkpointing_holds_less_and_each_part_has_its_files(tmp_path):
    """Of a model so small that its time says nothing."""
    small = ["--layers", "8", "--width", "16", "--tokens", "16", "--repeats", "1", "--output", str(tmp_path / "found")]
    result = CliRunner().invoke(app, ["pipeline", "--part", "memory", "--part", "time", *small], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    peaks = json.loads((tmp_path / "found-memory.json").read_text())["cases"]
    plain = {case: cells for case, cells in peaks.items() if "checkpointing" not in case}
    assert len(plain) == 4 + 2
    for case, cells in plain.items():
        for name, cell in cells.items():
            assert peaks[f"{case}, checkpointing"][name]["MiB"] < cell["MiB"]
    times = json.loads((tmp_path / "found-time.json").read_text())["cases"]
    assert set(times) == {"standard residuals", "Block", "Full"}
    assert len(times["Full"]) == 7
    assert len(list(tmp_path.glob("*.png"))) == 2
