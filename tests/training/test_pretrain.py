"""Pre-training through the command line, against a plain loop; what goes on, is refused, and is saved."""

import json
import re
from pathlib import Path

import pytest
import torch
from torch.nn.functional import cross_entropy
from torch.optim import AdamW
from transformers import AutoModelForCausalLM, AutoTokenizer, LlamaConfig

from modeling_attnres import DepthAttention, is_depth_parameter
from tests.conftest import ROOT
from tests.families import BY_NAME
from training import trainer
from training.__main__ import pretrain_options
from training.loading import make_config
from training.pretrain import Pretraining, make_model

from .conftest import refused, succeed
from .test_checkpoints import die, run_and_die


QUICK = {
    "max_steps": 4,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-2,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
    "data_seed": 7,
    "disable_tqdm": True,
    "save_strategy": "no",
    "use_cpu": True,
}
LENGTH, EVERY = 16, 10  # tokens of a row; of so many documents the last is held out


def command(config, data, output, *flags, **arguments):
    options = QUICK | arguments
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    start = ["pretrain", "--config", config, "--data", data, "--output", output, "--length", LENGTH]
    return list(map(str, [*start, "--held-out", 1 / EVERY, *flags, *given]))


def run(*args, **kwargs):
    """Run the command in this process."""
    succeed(*command(*args, **kwargs))
    return json.loads((Path(args[2]) / "result.json").read_text())


def losses(result):
    return [entry["loss"] for entry in result["log"] if "loss" in entry]


def saved(output):
    return AutoModelForCausalLM.from_pretrained(output / "model").state_dict()


def rows_of(path, tokenizer) -> tuple[torch.Tensor, torch.Tensor]:
    """The rows to train on and those held out, as `[R, LENGTH]`, by a plain reading of the file."""
    streams = [], []
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        ids = tokenizer(json.loads(line)["text"])["input_ids"] + [tokenizer.eos_token_id]
        streams[number % EVERY == 0].extend(ids)
    return tuple(torch.tensor(ids[: len(ids) // LENGTH * LENGTH]).view(-1, LENGTH) for ids in streams)


def mean_loss(model, batch_BT):
    logits_BTV = model(batch_BT, use_cache=False).logits
    return cross_entropy(logits_BTV[:, :-1].flatten(0, 1), batch_BT[:, 1:].flatten())


def train_plainly(model, rows_RT, steps=QUICK["max_steps"], factor=1.0, batch=QUICK["per_device_train_batch_size"]):
    """The loss of each step, in the order that a seed of 7 gives."""
    order = torch.randperm(len(rows_RT), generator=torch.Generator().manual_seed(7))
    rate, depth, decayed, rest = QUICK["learning_rate"], [], [], []
    for name, parameter in model.named_parameters():
        (depth if is_depth_parameter(name) else rest if "norm" in name else decayed).append(parameter)
    groups = [
        {"params": decayed, "weight_decay": 0.1},
        {"params": rest, "weight_decay": 0},
    ]
    for parameter in depth:  # a matrix that makes a query of R numbers moves it R times as far
        inputs = parameter.shape[-1] if parameter.dim() == 3 else 1
        groups.append({"params": [parameter], "weight_decay": 0, "lr": factor * rate / inputs})
    optimizer = AdamW(groups, lr=rate)
    found = []
    for step in range(steps):
        loss = mean_loss(model, rows_RT[order[step * batch : (step + 1) * batch]])
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def test_a_file_of_options_is_what_they_are_on_the_command_line(tmp_path):
    fields = {"config": "folder", "data": ["a", "b"], "output": "out", "set": ["x=1", "y=2"], "depth-lr-factor": 2}
    (tmp_path / "recipe.yaml").write_text(json.dumps(fields))
    parse = pretrain_options().parse
    by_file, *_ = parse([str(tmp_path / "recipe.yaml"), "--mode", "none"])
    line = "--config folder --data a --data b --output out --set x=1 --set y=2 --depth_lr_factor 2 --mode none"
    assert by_file == parse(line.split())[0]
    assert by_file == Pretraining("folder", ["a", "b"], mode="none", fields=["x=1", "y=2"], depth_lr_factor=2.0)


def test_help_shows_an_example(capsys):
    with pytest.raises(SystemExit, match="0"):
        pretrain_options().parse(["--help"])
    assert "Example: python -m training pretrain --config demo/tiny" in " ".join(capsys.readouterr().out.split())


@pytest.mark.parametrize(
    ("mode", "fields"),
    [
        ("none", {}),
        ("block", {}),
        ("full", {}),
        ("full", {"attn_res_query": "input"}),
        ("block", {"attn_res_query": "input", "attn_res_query_rank": 4}),
    ],
)
def test_the_losses_are_those_of_a_plain_loop(mode, fields, save_config, text_file, tokenizer, tmp_path):
    config, factor = save_config(), 3.0
    changed = [part for name, value in fields.items() for part in ("--set", f"{name}={value}")]
    flags = ["--mode", mode, "--depth-lr-factor", factor, *changed]
    result = run(config, text_file, tmp_path / "out", *flags, weight_decay=0.1)
    rows_RT, held_out_RT = rows_of(text_file, tokenizer)
    assert result["rows"] == {"training": len(rows_RT), "held_out": len(held_out_RT)}
    model = make_model(make_config(config, {"attn_res_mode": mode} | fields), 42)
    with torch.no_grad():
        before = mean_loss(model, held_out_RT).item()
    expected = train_plainly(model.train(), rows_RT, factor=factor)
    assert losses(result) == pytest.approx(expected, rel=1e-5)
    with torch.no_grad():
        after = mean_loss(model.eval(), held_out_RT).item()
    assert result["held_out_loss"] == pytest.approx({"before": before, "after": after}, rel=1e-5)
    for name, value in model.state_dict().items():
        torch.testing.assert_close(saved(tmp_path / "out")[name], value, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe", "KimiLinear"])
@pytest.mark.parametrize("mode", ["block", "full"])
def test_a_seed_gives_the_baseline_the_same_weights(family, mode, save_config, monkeypatch):
    """Even if depth parameters were drawn, too."""
    monkeypatch.setattr(DepthAttention, "reset_parameters", lambda self: torch.rand(3))
    folder = save_config(family)
    with_depth = make_model(make_config(folder, {"attn_res_mode": mode}), 3).state_dict()
    baseline = make_model(make_config(folder, {"attn_res_mode": "none"}), 3).state_dict()
    assert {name for name in with_depth if not is_depth_parameter(name)} == baseline.keys()
    assert all(torch.equal(with_depth[name], value) for name, value in baseline.items())
    other = make_model(make_config(folder, {"attn_res_mode": "none"}), 4).state_dict()
    assert not torch.equal(other["lm_head.weight"], baseline["lm_head.weight"])


@pytest.mark.parametrize("config", ["demo/tiny", "base"])
@pytest.mark.parametrize("mode", ["block", "full"])
def test_a_new_model_begins_as_its_baseline(config, mode, tmp_path, monkeypatch):
    """Which takes norms whose eps is that of a mean; with the eps of a sum it is far from that."""
    monkeypatch.chdir(ROOT)
    if config == "base":
        config = tmp_path / "base"
        LlamaConfig(hidden_size=64, num_hidden_layers=16, num_attention_heads=4, vocab_size=99).save_pretrained(config)

    def logits(**fields):
        with torch.no_grad():
            return make_model(make_config(config, fields), 0).eval()(ids_BT).logits

    ids_BT = torch.arange(3, 43).view(2, 20)
    expected = logits(attn_res_mode="none")
    torch.testing.assert_close(logits(attn_res_mode=mode), expected, rtol=0, atol=1e-5 * expected.abs().max().item())
    other = logits(attn_res_mode=mode, attn_res_scale_norm_eps=False)
    assert (other - expected).abs().max() > 1e-2 * expected.abs().max()


def test_accumulated_gradients_are_those_of_a_larger_batch(save_config, text_file, tmp_path):
    config = save_config()
    expected = run(config, text_file, tmp_path / "whole")
    split = {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 4}
    found = run(config, text_file, tmp_path / "split", **split)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)


@pytest.mark.parametrize("flags", [[], ["--muon"]])
@pytest.mark.parametrize(
    "schedule",
    [
        {"lr_scheduler_type": "cosine", "warmup_steps": 1},
        {"lr_scheduler_type": "warmup_stable_decay", "lr_scheduler_kwargs": '{"num_decay_steps": 2}'},
    ],
)
def test_a_killed_run_goes_on_to_the_same_result(flags, schedule, save_config, text_file, tmp_path, monkeypatch):
    """Killed when all steps are done, and when a checkpoint of two is complete."""
    config, saving = save_config(), {"save_strategy": "steps", "save_steps": 2} | schedule
    whole = run(config, text_file, tmp_path / "whole", *flags, **saving)
    assert len({entry["learning_rate"] for entry in whole["log"] if "loss" in entry}) > 1
    args = command(config, text_file, tmp_path / "out", *flags, **saving)
    run_and_die(monkeypatch, trainer, "whole_file", die, args)
    assert not (tmp_path / "out/model").exists()
    for file in (tmp_path / "out/checkpoint-4").iterdir():
        file.unlink()
    assert "continuing from checkpoint-2" in succeed(*args, "--resume")
    result = json.loads((tmp_path / "out/result.json").read_text())
    assert losses(result) == pytest.approx(losses(whole), rel=1e-6)
    assert result["held_out_loss"] == pytest.approx(whole["held_out_loss"], rel=1e-6)
    refused("this run is finished", *args)


def test_another_run_does_not_continue_this_one(save_config, text_file, tmp_path, monkeypatch):
    config, output = save_config(), tmp_path / "out"
    args = command(config, text_file, output, save_strategy="steps", save_steps=2)
    run_and_die(monkeypatch, trainer, "whole_file", die, args)
    for flags, message in {
        ("--mode", "none"): "attn_res_mode is 'none', expected 'block'",
        ("--set", "hidden_act=gelu"): "hidden_act is 'gelu', expected 'silu'",
        ("--length", 8): "length is 8, expected 16",
        ("--depth-lr-factor", 2): r"depth_lr_factor is 2\.0, expected 1\.0",
        ("--muon",): "muon is True, expected False",
        ("--learning_rate", 1): r"learning_rate is 1\.0, expected 0\.01",
    }.items():
        refused(f"--resume: {message}", *args, "--resume", *flags)
    refused("shards holds other data: held_out is 0.1, not 0.2", *args, "--resume", "--held-out", 0.2)


def test_what_is_saved_loads_elsewhere_with_its_tokenizer(save_config, text_file, tmp_path, run_isolated):
    run(save_config(), text_file, tmp_path / "out", "--mode", "full", "--set", "num_hidden_layers=3")
    ids = torch.arange(3, 20)[None]
    with torch.no_grad():
        expected = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")(ids).logits
    said = run_isolated(
        "import torch; from transformers import AutoModelForCausalLM as M, AutoTokenizer as T\n"
        f"folder = {str(tmp_path / 'out/model')!r}; model = M.from_pretrained(folder, trust_remote_code=True)\n"
        "config = model.config\n"
        "assert config.attn_res_mode == 'full' and config.num_hidden_layers == 3 and config.use_cache\n"
        "print(T.from_pretrained(folder)('w1 w2')['input_ids'], config.eos_token_id)\n"
        f"torch.save(model(torch.arange(3, 20)[None]).logits.detach(), {str(tmp_path / 'logits.pt')!r})"
    )
    assert said.split("\n")[-2] == "[7, 8] 2"
    torch.testing.assert_close(torch.load(tmp_path / "logits.pt"), expected)


def test_a_config_of_a_base_family_becomes_one_with_attention_residuals(tokenizer, text_file, tmp_path):
    family = BY_NAME["Llama"]
    family.base("Config")(**family.tiny).save_pretrained(tmp_path / "base")
    tokenizer.save_pretrained(tmp_path / "base")
    run(tmp_path / "base", text_file, tmp_path / "out", "--set", "attn_res_block_size=2", "rms_norm_eps=1e-3")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model").config
    assert (config.model_type, config.attn_res_block_size, config.rms_norm_eps) == ("attnres_llama", 2, 1e-3)
    assert config.attn_res_scale_norm_eps


@pytest.mark.parametrize("family", ["Mixtral", "Qwen3Moe", "DeepseekV3", "KimiLinear"])
def test_mixtures_of_experts_train_and_report_their_load(family, save_config, text_file, tmp_path):
    config = save_config(family)
    result = run(config, text_file, tmp_path / "out", max_steps=6)
    logged = [entry for entry in result["log"] if "loss" in entry]
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert all(1 <= entry["experts/largest_load"] <= 8 and 0 <= entry["experts/unused"] < 1 for entry in logged)


def test_router_losses_are_those_of_the_base(save_config, text_file, tokenizer, tmp_path):
    fields = {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    config = save_config("Mixtral")
    flags = [f"{name}={json.dumps(value)}" for name, value in fields.items()]
    result = run(config, text_file, tmp_path / "out", "--set", *flags, max_steps=1)
    rows_RT, _ = rows_of(text_file, tokenizer)
    order = torch.randperm(len(rows_RT), generator=torch.Generator().manual_seed(7))
    batch_BT = rows_RT[order[:4]]
    model = make_model(make_config(config, fields), 42)
    outputs = model(batch_BT, use_cache=False)
    expected = mean_loss(model, batch_BT) + 0.5 * outputs.aux_loss
    assert losses(result) == pytest.approx([expected.item()], rel=1e-5)
    assert losses(result)[0] > mean_loss(model, batch_BT).item() + 0.1


def test_what_does_not_fit_is_refused_before_training(save_config, text_file, tmp_path, monkeypatch):
    monkeypatch.setattr("training.pretrain.make_model", lambda *_: pytest.fail("a model was made"))
    config = save_config()
    for flags, message in {
        ("--length", 300): "--length 300: the model has 256 positions",
        ("--length", 1): "--length must be at least 2",
        ("--held-out", 0): r"--held-out must lie between 0 and 0\.5, got 0\.0",
        ("--held-out", 0.01): "no row of 16 tokens is held out, of 0 tokens",
        ("--set", "vocab_size=50"): r"the tokenizer has the token 95 \('w89'\), .* 50: --set vocab_size=96",
        ("--set", "attn_res_mod=none"): "--set attn_res_mod: no field of .* Near names: .*attn_res_mode",
        ("--set", "attn_res_mode"): "--set attn_res_mode: expected NAME=VALUE",
        ("--set", "attn_res_mode=deep"): "attn_res_mode.*deep",
        ("--set", "attn_res_block_size=0"): "attn_res_block_size must be at least 1",
        ("--set", "hidden_size=wide"): "Field 'hidden_size' expected int, got str",
        ("--depth-lr-factor", -1): "--depth-lr-factor must be 0 or more",
        ("--muon", "--optim", "sgd"): "--muon goes with --optim adamw_torch or adamw_torch_fused, got sgd",
        ("--tokenizer", tmp_path): "its tokenizer",
        ("--gradient_accumulation_steps", 0): "--gradient_accumulation_steps must be at least 1",
        ("--fsdp",): "--fsdp: accelerate shards on accelerators only",
    }.items():
        refused(message, *command(config, text_file, tmp_path / re.sub(r"\W", "", str(flags)), *flags))
    refused("nowhere cannot be read", *command(tmp_path / "nowhere", text_file, tmp_path / "out"))
    refused("nothing.jsonl is missing", *command(config, tmp_path / "nothing.jsonl", tmp_path / "out"))


def test_a_baseline_stops_at_a_loss_that_is_not_finite(save_config, text_file, tmp_path):
    args = command(save_config(), text_file, tmp_path / "out", "--mode", "none", learning_rate=1e30, max_steps=90)
    with pytest.warns(UserWarning, match=r"The loss at step \d is nan\. Training stops"):
        refused("The loss ended at nan, after step", *args)
    assert not (tmp_path / "out/model").exists()


def test_a_tokenizer_trained_on_the_data_goes_with_the_model(save_config, text_file, tmp_path):
    run(save_config(), text_file, tmp_path / "out", "--tokenizer", "train", "--set", "vocab_size=300")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "out/model")
    config = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model").config
    assert len(tokenizer) <= 300
    assert tokenizer.decode(tokenizer("w1 w23 höher\n")["input_ids"]) == "w1 w23 höher\n"
    assert len(tokenizer(" w23")["input_ids"]) < 4
    ids = config.eos_token_id, config.pad_token_id
    assert tokenizer.convert_ids_to_tokens(ids) == ["<|endoftext|>", "<|padding|>"]
