"""Scaling laws: against known coefficients, scipy's own fit, and the paper's rows."""

import csv
import json
import math

import numpy as np
import pytest
from scipy.optimize import curve_fit
from torch.utils.flop_counter import FlopCounterMode

from tests import families
from tests.conftest import ROOT
from tests.training.conftest import refused, succeed
from training.scaling import (
    Law,
    Run,
    compare_modes,
    count_active_parameters,
    count_flops_per_token,
    describe_run,
    fit_law_with_floor,
    fit_power_law,
    read_run,
    read_runs,
)


PAPER = ROOT / "training" / "paper_scaling.csv"
PRINTED = {"none": Law(1.891, 0.057), "block": Law(1.870, 0.058), "full": Law(1.865, 0.057)}  # C in PFLOP/s-days
SIZES = ((1e6, 2e8), (2e6, 4e8), (4e6, 8e8), (8e6, 16e8), (16e6, 32e8))  # parameters, tokens
LINE, CURVE = "A·C^-α", "E + A·C^-α"


def make_runs(laws: dict[str, Law], seeds=(0,), noise: float = 0.0, generator=None) -> list[Run]:
    """Runs whose losses are those of laws, with normal noise of each run's own."""
    runs = []
    for mode, law in laws.items():
        for parameters, tokens in SIZES:
            loss = law.loss_at(6 * parameters * tokens / 8.64e19)
            for seed in seeds:
                factor = 1 + noise * generator.normal() if noise else 1
                runs.append(Run(mode, seed, parameters, tokens, loss * factor))
    return runs


def write_json(path, runs: list[Run], **changed):
    path.write_text(json.dumps({"runs": [vars(run) | changed for run in runs]}))
    return path


# Fits


@pytest.mark.parametrize("law", [Law(1.9, 0.057), Law(3.0, 0.3), Law(0.02, 1.1)])
def test_a_power_law_is_found_again(law):
    compute = np.geomspace(1e-6, 10, 6)
    found = fit_power_law(compute, np.array([law.loss_at(one) for one in compute]))
    assert (found.amplitude, found.exponent, found.floor) == pytest.approx((law.amplitude, law.exponent, 0))


@pytest.mark.parametrize("law", [Law(0.7, 0.2, floor=1.2), Law(0.01, 0.4, floor=1.69), Law(1.9, 0.057, floor=0)])
def test_a_floor_is_found_again(law):
    compute = np.geomspace(1e-6, 10, 6)
    found = fit_law_with_floor(compute, np.array([law.loss_at(one) for one in compute]))
    assert found.exponent == pytest.approx(law.exponent, rel=2e-3)
    assert found.floor == pytest.approx(law.floor, abs=5e-3)
    assert found.amplitude == pytest.approx(law.amplitude, rel=2e-2)


def test_with_noise_the_floor_is_that_of_another_fit():
    compute, generator = np.geomspace(1e-3, 10, 8), np.random.default_rng(0)
    loss = (1.5 + 0.6 * compute**-0.3) * (1 + 0.002 * generator.normal(size=8))
    found = fit_law_with_floor(compute, loss)
    other, _ = curve_fit(lambda c, e, a, x: e + a * c**-x, compute, loss, p0=(1, 1, 0.2), sigma=loss)
    assert (found.floor, found.amplitude, found.exponent) == pytest.approx(tuple(other), rel=1e-3)


def test_worth_by_hand():
    """With one exponent, the baseline needs (A of the baseline / A)^(1 / α) times the compute, everywhere."""
    found = compare_modes(make_runs({"none": Law(2.0, 0.1), "block": Law(1.9, 0.1)}))
    assert found["modes"]["block"]["laws"][LINE]["worth"]["value"] == pytest.approx((2.0 / 1.9) ** 10)
    assert found["modes"]["none"]["laws"][LINE]["loss"]["value"] == pytest.approx(2.0 * found["compute"] ** -0.1)
    assert found["compute"] == pytest.approx(6 * 16e6 * 32e8 / (1e15 * 86400))


def test_no_compute_reaches_below_a_floor_and_none_helps_a_rising_loss():
    assert Law(1, 0.5, floor=2).compute_for(1.9) == math.inf
    assert Law(1, 0.5, floor=2).compute_for(2.25) == pytest.approx(16)
    assert math.isnan(Law(1, -0.1).compute_for(0.9))


# Intervals


def test_how_often_intervals_hold_the_truth():
    generator, laws, held, repeats = np.random.default_rng(0), {"none": Law(2.0, 0.08)}, 0, 200
    for _ in range(repeats):
        runs = make_runs(laws, seeds=(0, 1, 2), noise=0.004, generator=generator)
        found = compare_modes(runs, laws=(LINE,), resamples=100)["modes"]["none"]["laws"][LINE]["exponent"]
        held += found["low"] <= 0.08 <= found["high"]
    assert 0.85 <= held / repeats <= 0.96  # nominally 95 %, of three seeds some 89 %; drawn uncorrected 82 %


def test_what_a_seed_does_to_both_modes_is_no_difference():
    """Noise that two modes have in common, seed by seed, widens the interval of their difference only unpaired."""
    base = make_runs({"none": Law(2.0, 0.1)}, seeds=(0, 1, 2), noise=0.01, generator=np.random.default_rng(1))
    widths = []
    for shift in (0, 10):
        runs = base + [Run("block", r.seed + shift, r.parameters, r.tokens, r.loss * 0.98) for r in base]
        worth = compare_modes(runs, laws=(LINE,), resamples=300)["modes"]["block"]["laws"][LINE]["worth"]
        widths.append(worth["high"] - worth["low"])
        assert worth["low"] <= worth["value"] <= worth["high"]
    assert widths[0] * 3 < widths[1]


def test_one_seed_has_no_interval(tmp_path):
    runs = make_runs({"none": Law(2.0, 0.1), "block": Law(1.9, 0.1)})
    text = succeed("scaling", write_json(tmp_path / "runs.json", runs), "--output", tmp_path / "out")
    assert "No intervals for none, block" in text
    found = json.loads((tmp_path / "out/scaling.json").read_text())
    assert found["modes"]["block"]["laws"][CURVE]["worth"]["low"] is None


# The paper


def test_the_papers_fits_are_worth_what_it_says():
    losses = {mode: law.loss_at(5.6) for mode, law in PRINTED.items()}
    assert (round(losses["none"], 3), round(losses["block"], 3)) == (1.714, 1.692)
    assert round(PRINTED["none"].compute_for(losses["block"]) / 5.6, 2) == 1.25


def test_the_papers_rows_give_its_fits_to_their_rounding():
    """No count of compute gives every printed digit; this one (training/README.md) comes within these."""
    runs = read_runs([PAPER])
    assert round(max(run.compute for run in runs), 1) == 5.6
    found = compare_modes(runs, laws=(LINE,), compute=5.6)["modes"]
    for mode, law in PRINTED.items():
        assert found[mode]["laws"][LINE]["amplitude"]["value"] == pytest.approx(law.amplitude, abs=0.0045)
        assert found[mode]["laws"][LINE]["exponent"]["value"] == pytest.approx(law.exponent, abs=0.00095)
    assert found["block"]["laws"][LINE]["worth"]["value"] == pytest.approx(1.25, abs=0.03)


def test_6_flops_a_parameter_alone_do_not_give_the_papers_fits():
    runs = [Run(run.mode, run.seed, run.parameters, run.tokens, run.loss) for run in read_runs([PAPER])]
    assert max(run.compute for run in runs) == pytest.approx(6 * 528e6 * 119e9 / 8.64e19)
    for mode, law in PRINTED.items():
        found = compare_modes(runs, laws=(LINE,))["modes"][mode]["laws"][LINE]
        assert found["amplitude"]["value"] < law.amplitude - 0.025
        assert found["exponent"]["value"] < law.exponent - 0.001


def paper_config(parameters: float) -> dict:
    """The ready config of one of the paper's sizes."""
    return json.loads((ROOT / f"configuration/scaling-law-{parameters / 1e6:.0f}M/config.json").read_text())


HEAD, KEY, LENGTH, CHUNK = 128, 192, 8192, 64  # width of values and of keys; tokens; tokens of a chunk of KDA
FULL_LAYERS = {
    "a quarter": lambda config: config["num_hidden_layers"] / 4,
    "rounded down": lambda config: config["num_hidden_layers"] // 4,
    "rounded up": lambda config: -(-config["num_hidden_layers"] // 4),
    "the ready config's": lambda config: config["layer_types"].count("full_attention"),
}
ATTENTION = {"whole": 12 * HEAD, "causal": 6 * HEAD, "MLA": 6 * (KEY + HEAD), "causal MLA": 3 * (KEY + HEAD)}
KDA = 3 * (6 * HEAD**2 + 3 * CHUNK * HEAD + CHUNK**2)  # a head and token, chunk by chunk


@pytest.mark.parametrize("layers", FULL_LAYERS.values(), ids=FULL_LAYERS.keys())
@pytest.mark.parametrize("attention", ATTENTION.values(), ids=ATTENTION.keys())
@pytest.mark.parametrize("linear", [0, KDA], ids=["", "KDA"])
@pytest.mark.parametrize("output", [False, True], ids=["", "head"])
def test_no_count_of_compute_gives_all_of_the_papers_digits(layers, attention, linear, output):
    runs = []
    for run in read_runs([PAPER]):
        config = paper_config(run.parameters)
        full, heads = layers(config), config["num_attention_heads"]
        flops = 6 * run.parameters + heads * (attention * LENGTH * full + linear * (config["num_hidden_layers"] - full))
        flops += 6 * config["hidden_size"] * config["vocab_size"] * output
        runs.append(Run(run.mode, 0, run.parameters, run.tokens, run.loss, flops))
    agreeing = 0
    for mode, of_mode in compare_modes(runs, laws=(LINE,))["modes"].items():
        if mode in PRINTED:
            law = of_mode["laws"][LINE]
            agreeing += round(law["amplitude"]["value"], 3) == PRINTED[mode].amplitude
            agreeing += round(law["exponent"]["value"], 3) == PRINTED[mode].exponent
    assert agreeing <= 4  # of 6


def test_the_papers_rows_count_attention_in_one_layer_of_four():
    rows = [row for row in csv.DictReader(PAPER.read_text().splitlines()) if row["mode"] == "none"]
    assert len(rows) == 5
    for row in rows:
        active = float(row["parameters"])
        config = paper_config(active)
        width = config["num_attention_heads"] * config["v_head_dim"]
        attention = 12 * width * config["model_max_length"] * config["num_hidden_layers"] / 4
        assert float(row["flops_per_token"]) == 6 * active + attention


# The command


def test_files_and_folders_give_the_same(tmp_path):
    runs = make_runs({"none": Law(2.0, 0.1), "full": Law(1.9, 0.11, floor=0.1)}, seeds=(0, 1))
    write_json(tmp_path / "runs.json", runs)
    with open(tmp_path / "runs.csv", "w", newline="") as file:
        writer = csv.DictWriter(file, [*vars(runs[0]), "comment"])
        writer.writeheader()
        writer.writerows(vars(run) | {"comment": "passed over"} for run in runs)
    for number, run in enumerate(runs):
        folder = tmp_path / "runs" / str(number)
        folder.mkdir(parents=True)
        (folder / "result.json").write_text(json.dumps({"run": vars(run), "log": []}))
    found = [sorted(read_runs([tmp_path / name]), key=str) for name in ("runs.json", "runs.csv", "runs")]
    assert found[0] == found[1] == found[2] == sorted(runs, key=str)


def test_the_command_writes_what_it_found(tmp_path):
    generator = np.random.default_rng(2)
    laws = {"none": Law(2.0, 0.1), "block": Law(1.9, 0.1)}
    file = write_json(tmp_path / "runs.json", make_runs(laws, (0, 1, 2), 0.002, generator))
    text = succeed("scaling", file, "--output", tmp_path / "out", "--compute", "1e-3")
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == ["scaling.json", "scaling.png"]
    found = json.loads((tmp_path / "out/scaling.json").read_text())
    assert found["compute"] == 1e-3
    worth = found["modes"]["block"]["laws"][LINE]["worth"]
    assert worth["low"] <= (2.0 / 1.9) ** 10 <= worth["high"]
    assert f"{worth['value']:.4g}" in text
    assert (tmp_path / "out/scaling.png").read_bytes().startswith(b"\x89PNG")
    refused("out exists and is not empty", "scaling", file, "--output", tmp_path / "out")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"loss": None}, r"runs.json, run 1: no 'loss'; expected mode, seed, parameters, tokens, loss"),
        ({"loss": -1.0}, r"runs.json, run 1: loss: expected a number above 0, found -1.0"),
        ({"tokens": "many"}, r"tokens: expected a number above 0, found 'many'"),
        ({"parameters": True}, r"parameters: expected a number above 0, found True"),
        ({"flops_per_token": 0}, r"flops_per_token: expected a number above 0, found 0"),
        ({"seed": 1.5}, r"seed: expected a whole number, found 1.5"),
        ({"parameters": 1e6, "tokens": 1e9}, r"5 runs of mode 'none', seed 0, 1e\+06 parameters and 1e\+09 tokens"),
    ],
)
def test_a_wrong_record_is_refused(tmp_path, changed, message):
    file = write_json(tmp_path / "runs.json", make_runs({"none": Law(2.0, 0.1)}), **changed)
    refused(message, "scaling", file, "--output", tmp_path / "out")
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("a.csv", "mode,seed,parameters,tokens,loss\nnone,0,1e6,1e8,2\nnone,0,2e6,1e8,x\n", r"a.csv, line 3: loss"),
        ("a.csv", "mode,seed,parameters,tokens\nnone,0,1e6,1e8\n", r"a.csv, line 2: no 'loss'"),
        ("a.csv", "", r"a.csv: no runs"),
        ("a.json", '{"runs": {}}', r"a.json: runs: expected a list"),
        ("a.json", '{"runs": [3]}', r"a.json, run 1: expected an object with mode"),
        ("a.json", "{", r"a.json as JSON cannot be read"),
        ("a.txt", "", r"a.txt: expected a .csv or .json file"),
        ("folder/a.csv", "", r"folder: no result.json in it or below"),
    ],
)
def test_a_wrong_file_is_refused(tmp_path, name, content, message):
    path = tmp_path / name
    path.parent.mkdir(exist_ok=True)
    path.write_text(content)
    refused(message, "scaling", tmp_path / name.partition("/")[0], "--output", tmp_path / "out")


def test_what_cannot_be_fitted_is_refused(tmp_path):
    one_size = write_json(tmp_path / "one.json", make_runs({"none": Law(2.0, 0.1)}, seeds=(0, 1))[:2])
    refused("mode 'none': all its runs took .* needs two sizes", "scaling", one_size, "--output", tmp_path / "out")
    some = write_json(tmp_path / "some.json", make_runs({"block": Law(2.0, 0.1)}))
    refused("no runs of the baseline 'none', found block", "scaling", some, "--output", tmp_path / "out")
    refused("--compute must be above 0", "scaling", PAPER, "--output", tmp_path / "out", "--compute", "-1")
    refused("nowhere.csv is missing", "scaling", tmp_path / "nowhere.csv", "--output", tmp_path / "out")


def test_a_floor_needs_four_sizes():
    runs = [run for run in make_runs({"none": Law(2.0, 0.1)}) if run.parameters < 8e6]
    assert list(compare_modes(runs)["modes"]["none"]["laws"]) == [LINE]


# What pretrain leaves


def test_active_parameters_of_experts():
    model = families.BY_NAME["Mixtral"].causal_lm()
    aside, share = ("embed_tokens", "lm_head", "attn_res"), model.config.num_experts_per_tok / model.config.num_experts
    tensors = {name: tensor for name, tensor in model.state_dict().items() if not any(end in name for end in aside)}
    experts = sum(tensor.numel() for name, tensor in tensors.items() if ".experts." in name)
    assert experts > 0
    everything = sum(tensor.numel() for tensor in tensors.values())
    assert count_active_parameters(model) == round(everything - experts + experts * share)


def test_flops_are_those_that_torch_counts():
    """The products of a training step: 6 a parameter of a matrix and token, and attention's, over all positions."""
    model = families.BY_NAME["Llama"].causal_lm(attn_res_mode="none")
    model.set_attn_implementation("eager")
    parameters = count_active_parameters(model)
    not_matrices = sum(parameter.numel() for name, parameter in model.named_parameters() if "norm" in name)
    for length in (4, 16):
        ids = families.tokens(batch=2, length=length)
        with FlopCounterMode(display=False) as counter:
            model(ids, labels=ids).loss.backward()
        counted = counter.get_total_flops() / ids.numel()
        head = 6 * model.lm_head.weight.numel()
        assert counted == count_flops_per_token(model.config, parameters - not_matrices, length) + head


def test_linear_attention_is_not_counted():
    config = families.BY_NAME["KimiLinear"].causal_lm().config
    full = config.layer_types.count("full_attention")
    assert 0 < full < config.num_hidden_layers
    expected = 600 + 12 * 8 * config.num_attention_heads * config.v_head_dim * full
    assert count_flops_per_token(config, 100, 8) == expected


def test_a_window_bounds_what_attention_takes():
    config = families.BY_NAME["Llama"].causal_lm().config
    config.sliding_window = 5  # as Mistral has it: of all layers
    width = config.num_attention_heads * config.head_dim
    for length in (3, 8):
        expected = 600 + 12 * min(length, 5) * width * config.num_hidden_layers
        assert count_flops_per_token(config, 100, length) == expected
    config.layer_types = ["sliding_attention", "full_attention"] + ["linear_attention"] * (config.num_hidden_layers - 2)
    assert count_flops_per_token(config, 100, 8) == 600 + 12 * (5 + 8) * width


def test_modes_take_the_same_compute():
    described = [
        describe_run(families.BY_NAME["Llama"].causal_lm(attn_res_mode=mode), length=8, tokens=100, seed=1, loss=2.0)
        for mode in ("none", "block", "full")
    ]
    assert [one.pop("mode") for one in described] == ["none", "block", "full"]
    assert described[0] == described[1] == described[2]
    assert read_run(described[0] | {"mode": "none"}, "here").loss == 2.0
