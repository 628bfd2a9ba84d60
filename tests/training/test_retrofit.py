"""The experiment on retrofits: what it plans from what is recorded, and what its report says of made-up losses."""

import numpy as np
import pytest
import torch
from scipy import stats
from transformers import AutoModelForCausalLM

from training.reports.retrofit.corpus import ROW, middle_of, mix, split_documents
from training.reports.retrofit.experiment import LENGTH, plan_runs, read_experiment, row_losses, run_name
from training.reports.retrofit.report import compare_all

from .conftest import words


def record_of(name, options, loss, experiment):
    trained, form, rate, factor, seed = name.split("_")
    parts = ["choosing"] if int(seed) == experiment["seeds"][0] else ["held_out", "unlike"]
    rows = {part: [loss, loss + 0.5] for part in parts}
    return {
        **{"name": name, "trained": trained, "form": form, "seed": int(seed)},
        **{"rate": float(rate), "factor": float(factor), "rows": rows},
    }


def carry_out(losses):
    """Plan, and record what is planned, until there is nothing left; returns the options and records of all runs."""
    experiment, records, made = read_experiment(), {}, {}
    while runs := {name: options for name, options in plan_runs(records).items() if name not in records}:
        made |= runs
        records |= {name: record_of(name, options, losses(name), experiment) for name, options in runs.items()}
    return made, records


def test_the_best_rates_are_run_with_the_other_seeds_against_plain_training():
    """The middle base rate is best, and for each form the largest factor."""
    experiment = read_experiment()

    def loss(name):
        _, form, rate, factor, _ = name.split("_")
        return abs(np.log(float(rate) / 3e-4)) if form == "plain" else 3 - float(factor) / 100

    made, _ = carry_out(loss)
    forms, seeds = len(experiment["forms"]), len(experiment["seeds"]) - 1
    assert len(made) == 2 * (3 + seeds) + 3 * forms * (3 + seeds)
    compared = {name for name in made if not name.endswith("_0")}
    assert {name for name in compared if name.startswith("lora_")} == {
        run_name("lora", form, 3e-4, 0 if form == "plain" else 100, seed)
        for form in ("plain", *experiment["forms"])
        for seed in experiment["seeds"][1:]
    }
    # Plain training differs from a form's by what it loads, and the depth rate it has no use for
    plain, form = made["lora_plain_0.0003_0_1"], made["lora_add-3_0.0003_100_1"]
    assert {name for name in plain if plain[name] != form[name]} == {"model", "control", "depth_lr"}
    assert form["depth_lr"] == pytest.approx(0.03)
    assert plain["control"]
    assert not form["control"]


def test_the_report_pairs_seeds_and_rows():
    experiment = read_experiment()
    generator = np.random.default_rng(0)
    base = generator.normal(3, 0.5, (4, 6))
    plain = {seed: base[seed] for seed in (1, 2, 3)}
    arm = {seed: base[seed] - 0.1 + generator.normal(0, 0.02, 6) for seed in (3, 1, 2)}
    records = {"source": {"rows": {part: base[0].tolist() for part in ("choosing", "held_out", "unlike")}}}
    for name, of_seeds in (
        ("full_plain_3e-05_0", plain),
        ("full_add-1_3e-05_10", arm),
        ("none_add-1_0.0001_1", arm),
        ("lora_add-1_1e-4_1", arm),
    ):
        for seed, rows in of_seeds.items():
            record = records[f"{name}_{seed}"] = record_of(f"{name}_{seed}", {}, 0, experiment)
            record["rows"] = {"held_out": rows.tolist(), "unlike": (rows + seed).tolist()}
    results = compare_all(records, experiment)
    assert results.keys() == {"full, add-1", "none, add-1"}  # with LoRA there is nothing to compare with yet
    found = results["full, add-1"]
    assert found["depth rate"] == pytest.approx(3e-4)
    for part in ("held_out", "unlike"):
        pairs = [(arm[seed], plain[seed]) for seed in (1, 2, 3)]
        by_seed = stats.ttest_rel(*zip(*[(one.mean(), other.mean()) for one, other in pairs])).confidence_interval()
        mean, half = found[part]["over seeds"]
        assert (mean - half, mean + half) == pytest.approx(tuple(by_seed))
        by_row = stats.ttest_rel(*(np.mean(of, 0) for of in zip(*pairs))).confidence_interval()
        mean, half = found[part]["over rows"]
        assert (mean - half, mean + half) == pytest.approx(tuple(by_row))
    # Where depth parameters alone are trained, plain training is the source
    expected = np.mean([arm[seed] - base[0] for seed in (1, 2, 3)])
    assert results["none, add-1"]["held_out"]["over seeds"][0] == pytest.approx(expected)


def test_rows_are_of_documents_that_are_not_trained_on():
    texts = [(f"{kind}/{i}", kind, f"{kind}{i} " * 300) for kind in ("a", "b") for i in range(130)]
    parts = split_documents(mix([*texts, *texts]))
    assert {name: len(rows) for name, rows in parts.items()} == {"train": 60, "choosing": 40, "held_out": 160}
    rows = [row["text"] for part in ("choosing", "held_out") for row in parts[part]]
    middles = {middle_of(row["text"]) for row in parts["train"]}
    assert all(len(row) == ROW for row in rows)
    assert len(middles & set(rows)) == 0


def test_rows_are_measured_as_if_each_were_alone(save_model, tokenizer):
    model = AutoModelForCausalLM.from_pretrained(save_model("Llama")).eval()
    rows = [words(count, seed) for seed, count in enumerate([40, 3, 17, LENGTH + 9, 2, 5, 30, 11, 8, 23])]
    expected = []
    for text in rows:
        ids = tokenizer(text, return_tensors="pt")["input_ids"][:, :LENGTH]
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            log_probabilities = model(ids).logits[0, :-1].double().log_softmax(-1)
        expected.append(-log_probabilities.gather(1, ids[0, 1:, None]).mean().item())
    assert row_losses(model, tokenizer, rows) == pytest.approx(expected, abs=0.01)  # bf16
    assert np.ptp(expected) > 0.1
