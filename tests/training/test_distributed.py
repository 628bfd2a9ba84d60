"""Two processes over gloo compute what one does: DDP and FSDP2 through Trainer, FSDP2 alone, tensor parallel."""

import json
import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as checkpoint
from transformers import AutoModelForCausalLM

from tests.families import FAMILIES
from tests.oracle import relative_error
from tests.processes import launch

from . import test_pretrain as pretraining
from .conftest import refused
from .distributed import train
from .test_finetune import command, losses, run, saved


ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.slow


def run_case(case, output, *models):
    output.mkdir()
    launch(ROOT / "tests/training/distributed.py", case, output, *models)
    return torch.load(output / "result.pt")


def assert_same_adapters(one, two):
    expected, found = saved(one), saved(two)
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=1e-3, atol=1e-5)


def test_ddp_follows_the_loss_of_one_process(save_model, text_file, tmp_path):
    """With an odd number of rows held out: one of them is read by both processes, and counts once."""
    model, held_out = save_model(), ("--held-out", "0.22")
    expected = run(model, text_file, tmp_path / "one", *held_out)
    how = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "ddp_backend": "gloo"}
    launch("-m", "training", *command(model, text_file, tmp_path / "two", *held_out, **how))
    found = json.loads((tmp_path / "two/result.json").read_text())
    assert found["rows"]["held_out"] % 2 == 1
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-5)
    assert_same_adapters(tmp_path / "one", tmp_path / "two")


# Muon makes orthogonal, in bf16, what differs by rounding; of a part of a matrix its steps would be others altogether
MUON = (["--muon"], 2e-4)


@pytest.mark.exhaustive
@pytest.mark.parametrize(("family", "flags", "tolerance"), [("Llama", [], 1e-5), ("Qwen3Moe", *MUON)])
def test_pretraining_with_ddp_follows_one_process(family, flags, tolerance, save_config, text_file, tmp_path):
    config = save_config(family)
    expected = pretraining.run(config, text_file, tmp_path / "one", *flags)
    how = {"per_device_train_batch_size": 2, "per_device_eval_batch_size": 2, "ddp_backend": "gloo"}
    launch("-m", "training", *pretraining.command(config, text_file, tmp_path / "two", *flags, **how))
    found = json.loads((tmp_path / "two/result.json").read_text())
    assert losses(found) == pytest.approx(losses(expected), rel=tolerance)
    assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=tolerance)


@pytest.mark.exhaustive
@pytest.mark.parametrize(
    ("flags", "tolerance"),
    [
        ([], 1e-5),
        MUON,
        (["--set", "attn_res_form=add"], 1e-5),
        (["--set", "attn_res_weights=static"], 1e-5),
        (["--set", "attn_res_query=input"], 1e-5),
    ],
)
def test_pretraining_with_fsdp2_follows_one_process_and_saves_the_model(
    flags, tolerance, save_config, text_file, tmp_path
):
    config = save_config()
    expected = pretraining.run(config, text_file, tmp_path / "one", *flags)
    how = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "fsdp_config": "{}"}
    args = pretraining.command(config, text_file, tmp_path / "two", "--fsdp", *flags, **how)
    launch(ROOT / "tests/training/distributed.py", *args)
    found = json.loads((tmp_path / "two/result.json").read_text())
    assert losses(found) == pytest.approx(losses(expected), rel=tolerance)
    assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=tolerance)
    one, two = (pretraining.saved(tmp_path / name) for name in ("one", "two"))
    assert one.keys() == two.keys()
    for name, value in one.items():
        assert relative_error(two[name], value) <= 250 * tolerance, name


def test_fsdp_where_accelerate_would_not_use_it_is_refused(save_model, text_file, tmp_path):
    args = command(save_model(), text_file, tmp_path / "out", "--fsdp")
    refused("--fsdp: accelerate shards on accelerators only", *args)


def finetune_with_fsdp(model, data, output, *flags, config="{}", **arguments):
    """The command's result, of two processes that shard what one process has."""
    arguments = {"per_device_train_batch_size": 2, "ddp_backend": "gloo", "fsdp_config": config, **arguments}
    args = command(model, data, output, "--fsdp", *flags, **arguments)
    launch(ROOT / "tests/training/distributed.py", *args)
    return json.loads((output / "result.json").read_text())


def test_finetuning_with_fsdp2_follows_one_process_saves_its_adapter_and_resumes(save_model, text_file, tmp_path):
    """From a checkpoint of which each process wrote its part."""
    (tmp_path / "fsdp.json").write_text(json.dumps({"state_dict_type": "SHARDED_STATE_DICT"}))
    how = {"config": tmp_path / "fsdp.json", "save_strategy": "steps", "save_steps": 2, "max_steps": 4}
    model, one, two, again = save_model(), tmp_path / "one", tmp_path / "two", tmp_path / "again"
    expected = run(model, text_file, one, max_steps=4)
    found = finetune_with_fsdp(model, text_file, two, **how)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-5)
    assert_same_adapters(one, two)

    shutil.copytree(two / "checkpoint-2", again / "checkpoint-2")
    shutil.copy(two / "recipe.json", again)
    resumed = finetune_with_fsdp(model, text_file, again, "--resume", **how)
    assert losses(resumed) == pytest.approx(losses(found), rel=1e-6)
    assert resumed["held_out_loss"]["after"] == pytest.approx(found["held_out_loss"]["after"], rel=1e-6)


@pytest.mark.exhaustive
def test_finetuning_experts_with_fsdp2_and_checkpointing_follows_one_process(save_model, text_file, tmp_path):
    model, flags = save_model("Qwen3Moe"), ("--lora", "experts", "--activation_checkpointing", "True")
    expected = run(model, text_file, tmp_path / "one", *flags)
    found = finetune_with_fsdp(model, text_file, tmp_path / "two", *flags)
    assert losses(found) == pytest.approx(losses(expected), rel=1e-5)
    assert_same_adapters(tmp_path / "one", tmp_path / "two")


@pytest.mark.exhaustive
def test_finetuning_with_fsdp2_in_bf16_reads_its_depth_weights(save_model, text_file, tmp_path):
    """FSDP casts what the model returns, and of that only the fields."""
    found = finetune_with_fsdp(save_model(), text_file, tmp_path / "out", bf16=True)
    assert all(0 < entry["depth/entropy_of_mean"] < 1 for entry in found["log"] if "loss" in entry)


def test_fsdp_checkpointing_that_could_not_be_saved_is_refused(save_model, text_file, tmp_path):
    config = json.dumps({"activation_checkpointing": True})
    args = command(save_model(), text_file, tmp_path / "out", "--fsdp", fsdp_config=config)
    refused(r"PEFT could not save them\. Use --activation_checkpointing True", *args)


def test_fsdp2_follows_the_loss_of_one_process(save_model, tmp_path):
    """And its sharded checkpoint, loaded in one process, is the model that one process trained."""
    model = save_model("Qwen3Moe")
    found = run_case("fsdp", tmp_path / "out", model)
    alone = AutoModelForCausalLM.from_pretrained(model).train()
    assert found["losses"] == pytest.approx(train(alone, slice(None)), rel=1e-5)
    assert "DepthAttention" in " ".join(found["units"])
    loaded = AutoModelForCausalLM.from_pretrained(model)
    state = loaded.state_dict()
    checkpoint.load(state, checkpoint_id=str(tmp_path / "out/sharded"))
    loaded.load_state_dict(state)
    with torch.no_grad():
        ids = torch.arange(3, 40)[None]
        assert relative_error(loaded.eval()(ids).logits, alone.eval()(ids).logits) <= 1e-3


def test_tensor_parallel_gives_the_same_logits(save_model, tmp_path):
    """Where the base family can: its own plan fails for DeepSeek-V3 with a low-rank query, ours included or not."""
    fields = {"DeepseekV3": {"q_lora_rank": None}}
    models = [save_model(family.name, **fields.get(family.name, {})) for family in FAMILIES]
    results = run_case("tp", tmp_path / "out", *models)
    for family, model, found in zip(FAMILIES, models, results, strict=True):
        with torch.no_grad():
            expected = AutoModelForCausalLM.from_pretrained(model).eval()(torch.arange(3, 40)[None]).logits
        assert relative_error(found["logits"], expected) <= 1e-5, family.name
        assert found["sharded"] or not family.base("Config")(**family.tiny).base_model_tp_plan, family.name
