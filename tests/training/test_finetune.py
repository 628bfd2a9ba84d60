"""Fine-tuning through the command line, and what PEFT makes of the result."""

import errno
import json
import math
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from peft import LoraConfig, PeftModel, get_peft_model
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer

from conversion.port import Blocks, port_checkpoint
from demo.weights import smollm2
from tests.families import BY_NAME, FAMILIES, tokens
from tests.oracle import relative_error
from tests.training import conftest, tokenization_words
from training.checkpoints import all_checkpoints
from training.data import hold_out, read_documents
from training.finetune import Recipe, check_arguments, finetune_model
from training.loading import TrainingError
from training.monitor import DepthMonitor
from training.options import Arguments

from .conftest import refused, succeed, words


ROOT = Path(__file__).parents[2]
QUICK = {
    "max_steps": 3,
    "per_device_train_batch_size": 4,
    "learning_rate": 1e-3,
    "logging_steps": 1,
    "lr_scheduler_type": "constant",
    "disable_tqdm": True,
    "save_strategy": "no",
    "use_cpu": True,
}


def command(model, data, output, *flags, **arguments):
    options = QUICK | arguments
    given = [part for name, value in options.items() for part in (f"--{name}", str(value))]
    start = ["finetune", "--model", str(model), "--data", str(data), "--output", str(output), "--length", "32"]
    return [*start, "--depth-lr", "1e-3", *flags, *given]


def run(*args, **kwargs):
    """Run the command in this process."""
    succeed(*command(*args, **kwargs))
    return json.loads((Path(args[2]) / "result.json").read_text())


def losses(result):
    return [entry["loss"] for entry in result["log"] if "loss" in entry]


def saved(output):
    return load_file(output / "adapter/adapter_model.safetensors")


def check_all_moved(output):
    """Every tensor that starts at a known value has left it: LoRA's B at zero, queries and key norms random before."""
    names = saved(output)
    assert any("attn_res" in name for name in names)
    for name, value in names.items():
        assert value.isfinite().all(), name
        assert value.any(), name


@pytest.mark.parametrize("lora", ["all-linear", "attention", "experts", "none"])
def test_finetuning_trains_and_saves_what_was_asked(lora, family, save_model, text_file, tmp_path):
    if lora == "experts" and family.name == "Llama":
        pytest.skip("no experts")
    flags = ["--no-packed"] if family.name == "KimiLinear" else []
    model = save_model(family.name)
    result = run(model, text_file, tmp_path / "out", "--lora", lora, *flags)
    assert result["steps"] == 3
    assert result["held_out_loss"]["after"] != result["held_out_loss"]["before"]
    check_all_moved(tmp_path / "out")
    names = saved(tmp_path / "out")
    depth = {name for name in names if ".attn_res." in name}
    assert len(depth) == 2
    assert all("lora_" in name for name in set(names) - depth)
    assert {
        "all-linear": any(".self_attn." in name for name in names),
        "attention": all(".self_attn." in name for name in set(names) - depth),
        "experts": all(".experts." in name for name in set(names) - depth),
        "none": not set(names) - depth,
    }[lora]
    assert lora == "none" or set(names) - depth


def test_a_step_of_all_weights_is_that_of_a_plain_loop(save_model, tokenizer, tmp_path):
    """One of SGD over four texts: the depth parameters at their own rate, all others at the base rate."""
    model, texts = save_model(), [words(5 + 3 * seed, seed) for seed in range(4)]
    data = tmp_path / "few.jsonl"
    data.write_text("".join(json.dumps({"text": text}) + "\n" for text in [*texts, words(12, 9)]))
    rows = [tokenizer(text)["input_ids"] + [tokenizer.eos_token_id] for text in texts]
    expected = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64)
    total = sum(expected(torch.tensor([ids]), labels=torch.tensor([ids])).loss * (len(ids) - 1) for ids in rows)
    (total / sum(len(ids) - 1 for ids in rows)).backward()
    flags = ["--lora", "full", "--no-packed", "--held-out", str(13 / (sum(map(len, rows)) + 13))]
    how = {"max_steps": 1, "optim": "sgd", "learning_rate": 0.1, "max_grad_norm": 0}
    result = run(model, data, tmp_path / "out", *flags, "--depth-lr", "10", **how)
    assert result["rows"] == {"training": 4, "held_out": 1}
    found = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model").state_dict()
    for name, parameter in expected.named_parameters():
        step = (10 if "attn_res" in name else 0.1) * parameter.grad
        torch.testing.assert_close(found[name].double(), (parameter - step).double(), rtol=1e-4, atol=1e-5)


def test_all_weights_are_trained_and_a_model_is_written(save_model, text_file, tmp_path):
    model = save_model()
    result = run(model, text_file, tmp_path / "out", "--lora", "full", weight_decay=0.5)
    assert not (tmp_path / "out/adapter").exists()
    before, after = (AutoModelForCausalLM.from_pretrained(path) for path in (model, tmp_path / "out/model"))
    assert all(not torch.equal(value, before.state_dict()[name]) for name, value in after.state_dict().items())
    again = run(tmp_path / "out/model", text_file, tmp_path / "again", "--lora", "full", max_steps=1)
    assert again["held_out_loss"]["before"] == pytest.approx(result["held_out_loss"]["after"], rel=1e-5)
    refused("this run is finished", *command(model, text_file, tmp_path / "out", "--lora", "full"))


@pytest.mark.parametrize("flag", ["--no-depth", "--control"])
def test_all_weights_but_the_depth_parameters(flag, save_model, text_file, tmp_path):
    model = save_model()
    run(model, text_file, tmp_path / "out", "--lora", "full", flag)
    before, after = (load_file(path / "model.safetensors") for path in (model, tmp_path / "out/model"))
    depth = {name for name in before if "attn_res" in name}
    assert before.keys() - after.keys() == (depth if flag == "--control" else set())
    for name, value in after.items():
        assert torch.equal(value, before[name]) == (name in depth)


def test_a_run_of_all_weights_goes_on(save_model, text_file, tmp_path):
    model, saving = save_model(), {"save_strategy": "steps", "save_steps": 1}
    expected = run(model, text_file, tmp_path / "out", "--lora", "full", **saving)
    for name in ("model", "checkpoint-2", "checkpoint-3"):
        shutil.rmtree(tmp_path / "out" / name)
    found = run(model, text_file, tmp_path / "out", "--lora", "full", "--resume", **saving)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-6)


def test_depth_parameters_have_their_own_learning_rate_and_no_decay(save_model, text_file, tmp_path):
    model = save_model()
    run(model, text_file, tmp_path / "still", "--depth-lr", "0", weight_decay=0.5)
    run(model, text_file, tmp_path / "moved", weight_decay=0.5)
    before = AutoModelForCausalLM.from_pretrained(model).model.attn_res.state_dict()
    for name, value in before.items():
        key = next(key for key in saved(tmp_path / "still") if key.endswith(f"attn_res.{name}"))
        assert torch.equal(saved(tmp_path / "still")[key], value)
        moved = (saved(tmp_path / "moved")[key] - value).abs()
        assert 0 < moved.max() <= 3.1e-3  # three steps of Adam at 1e-3


def test_no_depth_and_control_leave_depth_out(save_model, text_file, tmp_path):
    model = save_model()
    for flag in ("--no-depth", "--control"):
        run(model, text_file, tmp_path / flag, flag)
        assert not any("attn_res" in name for name in saved(tmp_path / flag))


@pytest.mark.parametrize("flag", ["--dora", "--rslora"])
def test_variants_of_lora(flag, save_model, text_file, tmp_path):
    result = run(save_model(), text_file, tmp_path / "out", flag)
    assert result["held_out_loss"]["after"] != result["held_out_loss"]["before"]
    check_all_moved(tmp_path / "out")
    assert any("lora_magnitude" in name for name in saved(tmp_path / "out")) == (flag == "--dora")


@pytest.mark.parametrize("bits", ["4bit", "8bit"])
def test_quantised_base(bits, save_model, text_file, tmp_path):
    """The frozen linear maps are quantised, the depth parameters are not, and both kinds of adapter learn."""
    result = run(save_model(hidden_size=64, intermediate_size=64), text_file, tmp_path / "out", "--quantise", bits)
    assert result["held_out_loss"]["after"] != result["held_out_loss"]["before"]
    check_all_moved(tmp_path / "out")
    assert {value.dtype for name, value in saved(tmp_path / "out").items() if "attn_res" in name} == {torch.float32}


def test_bf16(save_model, text_file, tmp_path):
    result = run(save_model(), text_file, tmp_path / "out", bf16=True)
    assert result["held_out_loss"]["after"] != result["held_out_loss"]["before"]
    check_all_moved(tmp_path / "out")
    assert {value.dtype for value in saved(tmp_path / "out").values()} == {torch.float32}


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing_changes_no_loss(reentrant, save_model, text_file, tmp_path):
    model = save_model()
    expected = run(model, text_file, tmp_path / "plain")
    kwargs = json.dumps({"use_reentrant": reentrant})
    found = run(
        model, text_file, tmp_path / "out", activation_checkpointing=True, activation_checkpointing_kwargs=kwargs
    )
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)


def test_a_full_disk_leaves_the_last_good_checkpoint(save_model, text_file, tmp_path, monkeypatch):
    """Whichever file of the second checkpoint does not fit."""
    model, saving = save_model(), {"save_strategy": "steps", "save_steps": 1}
    expected = run(model, text_file, tmp_path / "whole", **saving)
    for step in ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state"):
        output = tmp_path / step
        original = getattr(Trainer, step)

        def fails(self, *args, original=original, **kwargs):
            if self.state.global_step == 2:
                raise OSError(errno.ENOSPC, "No space left on device")
            return original(self, *args, **kwargs)

        with monkeypatch.context() as patch:
            patch.setattr(Trainer, step, fails)
            message = r"stopped at step 2: .*No space left.* checkpoint-1 is complete: continue with --resume"
            refused(message, *command(model, text_file, output, **saving))
        assert not (output / "adapter").exists()
        found = run(model, text_file, output, "--resume", **saving)
        assert losses(found) == pytest.approx(losses(expected), rel=1e-6)


def test_what_cannot_work_is_refused_before_a_model_is_loaded(save_model, text_file, tmp_path, monkeypatch):
    model = save_model()
    monkeypatch.setattr("training.finetune.load_model", lambda *_: pytest.fail("a model was loaded"))

    def refused(message, *flags, model=model, data=text_file, output=tmp_path / "out", **arguments):
        conftest.refused(message, *command(model, data, output, *flags, **arguments))

    # What does not fit the model
    base = tmp_path / "base"
    BY_NAME["Llama"].base_causal_lm().save_pretrained(base)
    refused("is a 'llama', without Attention Residuals. Port it first: python -m conversion port", model=base)
    refused("--held-out must lie between 0 and 1, got 1.0", "--held-out", "1")
    refused("--length must be at least 2", "--length", "1")
    refused("--depth: a model with standard residuals", "--control", "--depth")
    refused("Use --no-packed", model=save_model("KimiLinear"))
    empty = tmp_path / "empty.txt"
    empty.write_text("")
    refused("empty.txt is empty", data=empty)
    short = tmp_path / "short.txt"
    short.write_text("w1")
    refused("1 rows to train on and 0 held out", data=short)
    refused("1 rows to train on and 0 held out", data=short, output=tmp_path / "runs" / "out")
    assert not (tmp_path / "out").exists()
    assert not (tmp_path / "runs").exists()
    (tmp_path / "mine").mkdir()
    refused("1 rows to train on and 0 held out", data=short, output=tmp_path / "mine")
    assert (tmp_path / "mine").is_dir()  # it was there before
    (tmp_path / "done/adapter").mkdir(parents=True)
    refused("this run is finished", output=tmp_path / "done")
    # Options of ours, and of Trainer
    refused("--quantise 4bit: quantised weights are frozen", "--lora", "full", "--quantise", "4bit")
    refused("--rslora: a kind of LoRA, and --lora full has none", "--lora", "full", "--rslora")
    refused("--rank must be at least 1, got 0", "--rank", "0")
    refused("--alpha must be at least 1, got -1", "--alpha", "-1")
    refused("--depth-lr must be 0 or more, got nan", "--depth-lr", "nan")
    refused("--per_device_train_batch_size must be at least 1, got 0", per_device_train_batch_size=0)
    refused("--gradient_accumulation_steps must be at least 1, got 0", gradient_accumulation_steps=0)
    refused("an option of the optimiser cannot be read: Invalid learning rate: -1", learning_rate=-1)
    refused("only 'loss' is measured", metric_for_best_model="accuracy")
    refused("the options cannot be read: .*--unheard_of", unheard_of=3)
    refused("argument --max_steps.*: invalid int value: 'many'", max_steps="many")
    refused("argument --lr_scheduler_type.*: invalid choice: 'unheard-of'", lr_scheduler_type="unheard-of")
    refused("the options cannot be read", save_strategy="epoch", eval_strategy="steps", load_best_model_at_end=True)


@pytest.mark.parametrize("flag", ["--packed", "--no-packed"])
def test_the_held_out_loss_is_that_of_a_token_whatever_the_batches(flag, save_model, tmp_path):
    """Against float64, a piece of a text at a time."""
    model, data = save_model(), tmp_path / "data.jsonl"
    texts = [words(3 if seed % 4 else 32, seed) for seed in range(40)]
    data.write_text("\n".join(json.dumps({"text": text}) for text in texts))
    tokenizer = AutoTokenizer.from_pretrained(model)
    _, documents = hold_out(read_documents([data], tokenizer), 0.5)
    pieces = [piece for document in documents for piece in document.cut(32)]
    exact = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
    with torch.no_grad():
        chances = [exact(torch.tensor([piece.ids])).logits[0, :-1].log_softmax(-1) for piece in pieces]
    expected = -torch.cat([chance[range(len(one.ids) - 1), one.ids[1:]] for chance, one in zip(chances, pieces)]).mean()
    for size in (1, 3, 8):
        how = {"max_steps": 1, "per_device_eval_batch_size": size}
        found = run(model, data, tmp_path / f"out{size}", "--held-out", "0.5", flag, **how)
        assert found["held_out_loss"]["before"] == pytest.approx(expected.item(), rel=2e-6)


def test_a_run_that_diverges_saves_nothing(save_model, text_file, tmp_path):
    with pytest.warns(UserWarning, match="Training stops"):
        refused(
            "The loss ended at nan, after step",
            *command(save_model(), text_file, tmp_path / "out", learning_rate=1e30, max_grad_norm=0),
        )
    assert not (tmp_path / "out/adapter").exists()
    assert not (tmp_path / "out/result.json").exists()


def test_a_run_that_is_ended_early_goes_on(save_model, text_file, tmp_path, monkeypatch):
    """As when a signal ends it after a checkpoint: it is not taken for finished."""

    def end(self, args, state, control, **kwargs):
        control.should_training_stop = state.global_step == 2

    how = {"save_strategy": "steps", "save_steps": 1, "max_steps": 4}
    given = command(save_model(), text_file, tmp_path / "out", **how)
    with monkeypatch.context() as ended:
        ended.setattr(DepthMonitor, "on_step_end", end)
        refused("Training ended after step 2 of 4. Continue with --resume", *given)
    assert not (tmp_path / "out/adapter").exists()
    succeed(*given, "--resume")
    assert json.loads((tmp_path / "out/result.json").read_text())["steps"] == 4


def test_a_checkpoint_has_no_weights_of_a_step_whose_loss_was_not_finite(save_model, text_file, tmp_path):
    how = {"save_strategy": "steps", "save_steps": 1, "learning_rate": 1e30, "max_grad_norm": 0}
    with pytest.warns(UserWarning, match="Training stops"):
        refused("The loss ended at nan", *command(save_model(), text_file, tmp_path / "out", **how))
    log = json.loads((all_checkpoints(tmp_path / "out")[-1] / "trainer_state.json").read_text())["log_history"]
    assert all(math.isfinite(loss) for loss in losses({"log": log}))


def test_every_held_out_row_is_measured_whatever_batches_drop(save_model, text_file, tmp_path):
    model, how = save_model(), {"max_steps": 1, "per_device_eval_batch_size": 4}
    found = [
        run(model, text_file, tmp_path / f"out{drop}", "--held-out", "0.2", dataloader_drop_last=drop, **how)
        for drop in (False, True)
    ]
    assert found[0]["rows"]["held_out"] % 4 != 0
    assert found[0]["held_out_loss"]["before"] == found[1]["held_out_loss"]["before"]


def test_router_losses_count_once_whatever_a_step_accumulates(save_model, text_file, tmp_path):
    """The loss of a step is the mean of its batches' losses, router losses included, as the base has them."""
    fields = {"output_router_logits": True, "router_aux_loss_coef": 10.0}
    model, how = save_model("Mixtral", **fields), {"max_steps": 1, "train_sampling_strategy": "sequential"}
    of_steps = [
        losses(run(model, text_file, tmp_path / name, per_device_train_batch_size=1, **(how | more)))
        for name, more in {
            "alone": {"max_steps": 2, "learning_rate": 0, "depth_lr": 0},
            "together": {"gradient_accumulation_steps": 2},
        }.items()
    ]
    assert of_steps[0][0] > 10
    assert of_steps[1] == pytest.approx([sum(of_steps[0]) / 2], rel=1e-4)


def test_processes_that_would_not_train_together_are_refused(save_model, text_file, tmp_path, monkeypatch):
    arguments = Arguments(output_dir=str(tmp_path / "out"))
    monkeypatch.setenv("WORLD_SIZE", "2")  # as torchrun sets it; on CPUs transformers uses one process unless told so
    with pytest.raises(TrainingError, match=r"2 processes were launched, and each would train alone.*--use-cpu"):
        check_arguments(Recipe(model=str(save_model()), data=[text_file]), arguments)


def test_nothing_to_train_is_refused(save_model, text_file, tmp_path):
    args = (save_model(), text_file, tmp_path / "out")
    refused("leaves nothing to train", *command(*args, "--lora", "none", "--no-depth"))
    refused("has no experts", *command(*args, "--lora", "experts"))
    assert not (tmp_path / "out").exists()


def test_the_command_reports_errors_without_a_traceback(save_model, tmp_path):
    (tmp_path / "bad.jsonl").write_text('{"text": "w1"}\n{')
    args = command(save_model(), tmp_path / "bad.jsonl", tmp_path / "out")
    done = subprocess.run([sys.executable, "-m", "training", *args], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 2
    assert done.stderr.splitlines()[-1].startswith(f"error: {tmp_path / 'bad.jsonl'}, line 2: no JSON")
    assert "Traceback" not in done.stderr


# ------------------------------------------------------------------------------------------------- adapters with PEFT


def adapted(family, seed=0, **fields):
    """A model with a LoRA whose every tensor is random, depth parameters included."""
    model = family.causal_lm()
    torch.manual_seed(seed)
    config = LoraConfig(r=4, target_modules="all-linear", modules_to_save=["attn_res"], task_type="CAUSAL_LM", **fields)
    model = get_peft_model(model, config)
    randomise(model, seed)
    return model.eval()


def randomise(model, seed):
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.1)


def logits(model):
    with torch.no_grad():
        return model(tokens()).logits


def test_all_linear_touches_no_depth_parameter(family):
    model = family.causal_lm()
    adapter = get_peft_model(model, LoraConfig(target_modules="all-linear", task_type="CAUSAL_LM"))
    names = [name for name, parameter in adapter.named_parameters() if parameter.requires_grad]
    assert names
    assert not any("attn_res" in name for name in names)


def test_merging_changes_nothing(family):
    model = adapted(family)
    expected = logits(model)
    assert relative_error(logits(model.merge_and_unload()), expected) <= 1e-5


def test_disabling_the_adapter_gives_the_base_back(family):
    expected = logits(family.causal_lm())
    model = adapted(family)
    assert relative_error(logits(model), expected) > 1e-2
    with model.disable_adapter():
        assert torch.equal(logits(model), expected)


def test_two_adapters_switch_cleanly(family):
    model = adapted(family, seed=0)
    first = logits(model)
    config = LoraConfig(r=2, target_modules=["o_proj"], modules_to_save=["attn_res"], task_type="CAUSAL_LM")
    model.add_adapter("second", config)
    model.set_adapter("second")
    randomise(model, 5)
    second = logits(model)
    assert relative_error(second, first) > 1e-2
    for name, expected in (("default", first), ("second", second), ("default", first)):
        model.set_adapter(name)
        assert torch.equal(logits(model), expected)


@pytest.mark.parametrize("family", [FAMILIES[0], FAMILIES[3]], ids=lambda family: family.name)
def test_an_adapter_loads_in_a_fresh_process_with_remote_code(family, save_model, text_file, tmp_path, run_isolated):
    model = save_model(family.name)
    run(model, text_file, tmp_path / "out")
    code = f"""
import torch
from peft import AutoPeftModelForCausalLM
model = AutoPeftModelForCausalLM.from_pretrained({str(tmp_path / "out/adapter")!r}, trust_remote_code=True).eval()
with torch.no_grad():
    torch.save(model(torch.arange(3, 40)[None]).logits, 'logits.pt')
"""
    run_isolated(code)
    here = PeftModel.from_pretrained(AutoModelForCausalLM.from_pretrained(model), tmp_path / "out/adapter").eval()
    with torch.no_grad():
        expected = here(torch.arange(3, 40)[None]).logits
    assert relative_error(torch.load(tmp_path / "logits.pt"), expected) <= 1e-6


def test_a_tokenizer_that_is_code_runs_only_where_it_is_trusted(save_model, tokenizer, tmp_path):
    """Kimi's is: fine-tuned on conversations, and merged."""
    model = save_model("KimiLinear")
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja"):
        (model / name).unlink()
    shutil.copy(Path(tokenization_words.__file__), model)
    (model / "words.json").write_text(json.dumps(tokenizer.get_vocab()))
    config = {"tokenizer_class": "WordsTokenizer", "eos_token": "</s>", "chat_template": tokenizer.chat_template}
    config["auto_map"] = {"AutoTokenizer": ["tokenization_words.WordsTokenizer", None]}
    (model / "tokenizer_config.json").write_text(json.dumps(config))
    turns = [{"role": "user", "content": "w0 w1"}, {"role": "assistant", "content": "w2 w3"}]
    data = tmp_path / "chat.jsonl"
    data.write_text((json.dumps({"messages": turns}) + "\n") * 20)

    args = (model, data, tmp_path / "out", "--no-packed")
    refused(r"its tokenizer \(if it is code that you trust: --trust-remote-code\) cannot be read", *command(*args))
    assert run(*args, "--trust-remote-code")["rows"] == {"training": 19, "held_out": 1}
    succeed("merge", tmp_path / "out/adapter", tmp_path / "merged")  # which runs no code
    merged = AutoTokenizer.from_pretrained(tmp_path / "merged", trust_remote_code=True)
    assert merged.apply_chat_template(turns)["input_ids"] == tokenizer.apply_chat_template(turns)["input_ids"]


@pytest.mark.slow
@pytest.mark.xdist_group("smollm2")
def test_the_real_model_learns_a_text(tmp_path):
    """SmolLM2-135M ported, LoRA and depth parameters, three steps."""
    port_checkpoint(str(smollm2()), tmp_path / "ported", Blocks(number=8), link=True)
    (tmp_path / "text.txt").write_text((ROOT / "LICENSE").read_text()[:4000] * 2)
    options = {"per_device_train_batch_size": 2, "learning_rate": 5e-4}
    result = run(tmp_path / "ported", tmp_path / "text.txt", tmp_path / "out", "--held-out", "0.2", **options)
    assert result["held_out_loss"]["after"] < result["held_out_loss"]["before"] - 0.05


def test_the_same_seed_gives_the_same_run(save_model, text_file, tmp_path):
    model = save_model()
    first, second, other = (
        losses(run(model, text_file, tmp_path / name, seed=seed)) for name, seed in (("a", 3), ("b", 3), ("c", 4))
    )
    assert first == second
    assert first != other


def test_finetune_is_a_function_too(save_model, text_file, tmp_path):
    recipe = Recipe(model=str(save_model()), data=[text_file], length=32)
    result = finetune_model(recipe, Arguments(output_dir=tmp_path / "out", **QUICK))
    assert result["steps"] == 3
