"""Pipeline parallelism: processes over gloo compute what one does, and send what the paper's formulas count."""

import json
import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from modeling_attnres.configuration_attnres import BlockLayout
from tests.families import BY_NAME
from tests.oracle import relative_error
from tests.processes import launch
from training.loading import TrainingError
from training.pipeline import fitting_microbatches
from training.pipeline_cut import cut_layers, layout_of
from training.pipeline_trainer import PipelineOptions, check_learning

from . import test_finetune as finetuning
from . import test_pretrain as pretraining
from .conftest import refused, succeed


ROOT = Path(__file__).parents[2]
processes = pytest.mark.slow


def start(ranks: int, case: str, output: Path, **environment: str) -> list[subprocess.Popen]:
    """Start a process a rank, none of which the others' launcher would end."""
    command = [sys.executable, str(ROOT / "tests/training/pipelines.py"), case, str(output)]
    shared = os.environ | environment | {"OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)}
    shared |= {"MASTER_ADDR": "localhost", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(ranks)}
    return [
        subprocess.Popen(command, cwd=ROOT, env=shared | {"RANK": str(rank)}, stderr=subprocess.PIPE, text=True)
        for rank in range(ranks)
    ]


def free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("localhost", 0))
        return sock.getsockname()[1]


def finish(started: list[subprocess.Popen]) -> list[tuple[int, str]]:
    """The exit status of each process, and what it wrote to stderr."""
    try:
        errors = [process.communicate(timeout=240)[1] for process in started]
    finally:
        for process in started:
            process.kill()
    return [(process.returncode, error) for process, error in zip(started, errors, strict=True)]


def run(ranks: int, case: str, output: Path, **environment: str) -> dict:
    for status, error in finish(start(ranks, case, output, **environment)):
        assert status == 0, error[-3000:]
    return torch.load(output)


# ------------------------------------------------------------------------------------------- the same as in one process

TOLERANCES = {
    "float32": {"loss": 1e-6, "gradient": 1e-6, "worst gradient": 2e-6, "norm": 1e-6, "logits": 1e-6},
    # where the loss, of fp32 logits in transformers, is what remains
    "float64": {"loss": 2e-7, "gradient": 5e-8, "worst gradient": 2e-7, "norm": 1e-8, "logits": 1e-15},
}


def assert_equal(found: dict, dtype: str = "float32") -> None:
    for setting, errors in found.items():
        for name, error in errors.items():
            assert error <= TOLERANCES[dtype][name.removeprefix("evaluated ")], (setting, name)


@processes
@pytest.mark.parametrize(
    ("ranks", "dtype"),
    [
        (2, "float32"),
        pytest.param(2, "float64", marks=pytest.mark.exhaustive),
        pytest.param(4, "float32", marks=pytest.mark.exhaustive),
    ],
)
def test_a_step_is_that_of_one_process(ranks, dtype, tmp_path):
    found = run(ranks, "equal", tmp_path / "errors.pt", DTYPE=dtype)
    assert {setting[0] for setting in found} == {"block", "straddling", "uneven", "heads", "full", "none"}
    assert_equal(found, dtype)


@pytest.mark.exhaustive
@processes
def test_an_embedding_that_is_the_head_has_the_gradient_of_both(tmp_path):
    assert_equal(run(2, "tied", tmp_path / "errors.pt"))


@pytest.mark.exhaustive
@processes
def test_what_is_frozen_has_no_gradient_and_what_is_not_the_same(tmp_path):
    assert_equal(run(2, "frozen", tmp_path / "errors.pt"))


@pytest.mark.exhaustive
@processes
def test_experts_and_linear_attention_are_those_of_one_process(tmp_path):
    """That is given the same microbatches: a router's choices make more of their rounding errors."""
    assert_equal(run(2, "families", tmp_path / "errors.pt"))


@pytest.mark.exhaustive
@processes
def test_replicas_beside_the_pipeline_share_the_gradient(tmp_path):
    assert_equal(run(4, "replicas", tmp_path / "errors.pt"))


@pytest.mark.exhaustive
@processes
def test_checkpointed_layers_run_twice_and_change_no_gradient(tmp_path):
    found = run(2, "checkpointing", tmp_path / "errors.pt")
    assert len(found) == 4 * 2 * 3
    for setting, errors in found.items():
        assert errors.pop("runs") == 0, setting  # more or fewer than the processes expect
    assert_equal(found)


# --------------------------------------------------------------------------------------------------------- what travels


def paper(ranks: int, virtual: int, blocks: int, caching: bool) -> int:
    """Blocks sent per token, as the paper counts them, where each stage is `blocks` whole blocks."""
    chunks = ranks * virtual
    if not caching:
        return chunks * (chunks - 1) // 2 * blocks
    return ranks * (ranks - 1) // 2 * blocks + (virtual - 1) * ranks**2 * blocks


def expected(ranks: int, virtual: int, blocks: int, caching: bool) -> int:
    """The paper's count, and where it differs.

    The embedding is a source, too: it travels to every stage, or with caching to every rank, once. And the paper counts
    the block that a later stage's own rank made among those that it is sent.
    """
    if not caching:
        return paper(ranks, virtual, blocks, caching) + ranks * virtual - 1
    return paper(ranks, virtual, blocks, caching) + (ranks - 1) - (virtual - 1) * ranks * blocks


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("virtual", [1, 2, 3, 4])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_the_plan_sends_what_the_paper_counts(ranks, virtual, caching):
    for blocks in (1, 2, 3):
        for size in (1, 2):
            layers = ranks * virtual * blocks * size
            layout = BlockLayout(layers, tuple(range(0, layers, size)))
            cut = cut_layers(layers, ranks, virtual, layout, caching)
            assert cut.total_sent == expected(ranks, virtual, blocks, caching)


@pytest.mark.exhaustive
@processes
def test_what_is_sent_is_what_the_plan_says(tmp_path):
    found = run(4, "count", tmp_path / "counts.pt")
    assert found == {key: expected(*key[:2], 2, key[2]) for key in found}
    assert found.keys() == {
        (ranks, v, caching) for ranks in (2, 3, 4) for v in (1, 2, 3, 4) for caching in (True, False)
    }


def test_kimi_k3_on_paper():
    """93 layers in blocks of 12, cut into 4 · 4 stages of which most begin within a block."""
    layout = BlockLayout(93, tuple(range(0, 93, 12)))
    cached, whole = (cut_layers(93, 4, 4, layout, caching) for caching in (True, False))
    assert [len(cached.layers_of(stage)) for stage in range(16)] == [6] * 13 + [5] * 3
    assert whole.total_sent == sum(seen_by_hand(layout, whole.starts[stage]) + 1 for stage in range(1, 16))
    assert cached.total_sent < whole.total_sent / 2


def test_the_plan_is_printed(save_config):
    """Six layers in blocks of two, cut into 2 · 3 stages of a layer: every other one begins within a block."""
    out = succeed("stages", save_config(attn_res_block_size=2), "--pipeline", 2, "--virtual", 3)
    *stages, together, formulas = out.splitlines()
    assert stages[3] == "stage 3 on rank 1: layers 3 to 3, sent 1 (3 without caching)"
    assert together == "together: 6 vectors a token (14 without caching)"
    assert formulas == "by the paper's formulas, of 0.5 blocks a stage: 4.5 (7.5)"


def seen_by_hand(layout: BlockLayout, layer: int) -> int:
    """How many blocks have closed before a layer: the embedding, and those that another began after."""
    return 1 + sum(start < layer for start in layout.starts[1:])


def test_a_rank_is_sent_no_block_twice_and_misses_none():
    for layout in (
        BlockLayout(13, (0, 1, 5, 6, 7, 12)),
        BlockLayout(13, tuple(range(13)), full=True),
        BlockLayout(13, (0,)),
    ):
        for ranks in (2, 3, 4):
            for virtual in (1, 2, 3):
                cut = cut_layers(13, ranks, virtual, layout)
                for rank in range(ranks):
                    has: set[int] = set()
                    for stage in range(rank, cut.num_stages, ranks):
                        sent = set(cut.sent(stage))
                        assert not sent & has
                        has |= sent
                        assert has >= set(range(cut.closed_before(stage)))
                        if stage + 1 < cut.num_stages:  # what it makes, and the running sum if that is a block now
                            has = set(range(cut.closed_after(stage + 1)))


# ------------------------------------------------------------------------------------------------------------- refusals


def test_more_stages_than_layers_are_refused():
    with pytest.raises(TrainingError, match="has 8 stages, but the model has 6 decoder layers"):
        cut_layers(6, 4, 2, None)


def test_the_form_add_is_refused():
    with pytest.raises(TrainingError, match='attn_res_form="add" cannot be cut'):
        layout_of(BY_NAME["Llama"].config(attn_res_form="add"))


def test_microbatches_that_the_schedule_cannot_order_are_filled_up():
    assert [fitting_microbatches(number, 2) for number in (1, 2, 3, 5, 6, 7)] == [1, 2, 3, 6, 6, 8]


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline", 4, "--virtual-stages", 2], "has 8 stages, but the model has 6 decoder layers"),
        (["--pipeline", 2], "a multiple of that as processes; torchrun started 1"),
        (["--pipeline", 0], "--pipeline must be at least 2 processes, got 0"),
        (["--pipeline", 2, "--gradient-accumulation-steps", 2], "gradient_accumulation_steps does not go with"),
        (["--pipeline", 2, "--schedule", "zigzag"], "--schedule must be 1f1b or gpipe, got zigzag"),
        (["--virtual-stages", 2], "go with --pipeline"),
    ],
)
def test_options_that_cannot_work_are_refused(flags, message, save_config, text_file, tmp_path):
    refused(message, *pretraining.command(save_config(), text_file, tmp_path / "out", *flags))


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--pipeline", 4, "--virtual-stages", 2], "has 8 stages, but the model has 6 decoder layers"),
        (["--pipeline", 2], "a multiple of that as processes; torchrun started 1"),
        (["--pipeline", 2, "--quantise", "4bit"], "--quantise 4bit does not go with --pipeline"),
        (["--pipeline", 2, "--label-smoothing-factor", 0.1], "--label_smoothing_factor does not go with --pipeline"),
        (["--pipeline", 2, "--train-sampling-strategy", "batch_rebalance"], "batch_rebalance does not go with"),
        (["--pipeline", 2, "--accelerator-config", '{"even_batches": false}'], "--accelerator_config does not go with"),
        (["--microbatches", 2], "go with --pipeline"),
    ],
)
def test_finetuning_that_cannot_work_is_refused_before_data_is_read(flags, message, save_model, tmp_path):
    refused(message, *finetuning.command(save_model(), tmp_path / "absent.txt", tmp_path / "out", *flags))


def test_a_process_with_nothing_to_learn_is_refused():
    model, options = BY_NAME["Llama"].causal_lm(), PipelineOptions(pipeline=2)
    model.requires_grad_(False)
    model.model.layers[0].requires_grad_(True)
    with pytest.raises(TrainingError, match=r"nothing is trained in layers \[3, 4, 5\].*process 1"):
        check_learning(options, model)
    model.model.attn_res.requires_grad_(True)
    check_learning(options, model)


# ---------------------------------------------------------------------------------------------------------- the command


@processes
@pytest.mark.parametrize(
    ("ranks", "rows", "flags"),
    [(2, 4, []), pytest.param(4, 2, ["--muon", "--schedule", "gpipe"], marks=pytest.mark.exhaustive)],
)
def test_pretraining_follows_one_process_and_resumes(ranks, rows, flags, save_config, text_file, tmp_path):
    config, muon = save_config(), ["--muon"] if "--muon" in flags else []
    one = pretraining.run(config, text_file, tmp_path / "one", *muon)
    how = {"per_device_train_batch_size": rows, "ddp_backend": "gloo", "save_strategy": "steps", "save_steps": 2}
    flags = [*flags, "--pipeline", 2, "--virtual-stages", 2, "--resume"]
    args = pretraining.command(config, text_file, tmp_path / "two", *flags, **how)
    launch("-m", "training", *args, ranks=ranks)
    assert_same_run(one, tmp_path, tolerance=2e-4 if muon else 1e-5)
    # once more, from its middle
    for leftover in ("model", "checkpoint-4"):
        shutil.rmtree(tmp_path / "two" / leftover)
    (tmp_path / "two/result.json").unlink()
    launch("-m", "training", *args, ranks=ranks)
    assert_same_run(one, tmp_path, tolerance=2e-4 if muon else 1e-5)


# So large an epsilon makes Adam's step of a small gradient small, where it would amplify what rounding changed
SMOOTH = {"max_steps": 4, "learning_rate": 0.01, "adam_epsilon": 0.1, "per_device_eval_batch_size": 3}
REENTRANT = ["--gradient_checkpointing", "True", "--gradient_checkpointing_kwargs", '{"use_reentrant": true}']


@processes
@pytest.mark.parametrize(
    ("ranks", "rows", "flags", "pipeline"),
    [
        pytest.param(
            *(2, 4, ["--lora", "full", "--no-packed"], ["--virtual-stages", 2, "--gradient_checkpointing", "True"]),
            marks=pytest.mark.exhaustive,
        ),
        pytest.param(2, 4, ["--lora", "none"], ["--microbatches", 3], marks=pytest.mark.exhaustive),
        (2, 4, ["--lora", "all-linear"], ["--virtual-stages", 2, *REENTRANT]),
        pytest.param(4, 2, ["--dora", "--no-depth"], ["--schedule", "gpipe"], marks=pytest.mark.exhaustive),
        pytest.param(2, 4, ["--lora", "full", "--control"], [], marks=pytest.mark.exhaustive),
    ],
)
def test_finetuning_follows_one_process_and_resumes(ranks, rows, flags, pipeline, save_model, text_file, tmp_path):
    model, one, two = save_model(), tmp_path / "one", tmp_path / "two"
    flags = [*flags, "--depth-lr", 0.01]
    expected = finetuning.run(model, text_file, one, *map(str, flags), **SMOOTH)
    how = SMOOTH | {"per_device_train_batch_size": rows, "ddp_backend": "gloo", "save_strategy": "steps"}
    flags += ["--pipeline", 2, *pipeline, "--resume", "--save-steps", 2]
    args = finetuning.command(model, text_file, two, *flags, **how)
    launch("-m", "training", *args, ranks=ranks)
    assert_same_tuning(one, two, expected, from_zero=1e-5)
    # once more, from its middle
    shutil.copytree(two, tmp_path / "whole")
    for leftover in (trained(two), two / "checkpoint-4"):
        shutil.rmtree(leftover)
    (two / "result.json").unlink()
    launch("-m", "training", *args, ranks=ranks)
    assert_same_tuning(tmp_path / "whole", two, json.loads((tmp_path / "whole/result.json").read_text()))


def trained(output: Path) -> Path:
    """The folder of what a run trained."""
    return next(path for path in (output / "adapter", output / "model") if path.exists())


def assert_same_tuning(one: Path, two: Path, expected: dict, from_zero: float = 1e-6) -> None:
    """Within 1e-6; what began at zero, LoRA's B, and is all made of gradients, within another tolerance."""
    found = json.loads((two / "result.json").read_text())
    assert finetuning.losses(found) == pytest.approx(finetuning.losses(expected), rel=1e-6)
    assert found["held_out_loss"] == pytest.approx(expected["held_out_loss"], rel=1e-6)
    assert (found["steps"], found["rows"]) == (expected["steps"], expected["rows"])
    assert trained(one).name == trained(two).name
    if trained(one).name == "adapter":
        saved, kinds = finetuning.saved, [settings_of(folder) for folder in (one, two)]
        assert kinds[0] == kinds[1]
    else:
        saved = pretraining.saved
    weights, others = saved(one), saved(two)
    assert weights.keys() == others.keys()
    for name, value in weights.items():
        assert relative_error(others[name], value) <= (from_zero if "lora_B" in name else 1e-6), name


def settings_of(output: Path) -> dict:
    """The config of an adapter, with names in order."""
    settings = json.loads((output / "adapter/adapter_config.json").read_text())
    return {name: sorted(value) if isinstance(value, list) else value for name, value in settings.items()}


@pytest.mark.exhaustive
@processes
def test_bf16_is_that_of_one_process(save_config, text_file, tmp_path):
    """In the first step, before its rounding errors are trained on."""
    config, once = save_config(), {"max_steps": 1}
    whole = pretraining.run(config, text_file, tmp_path / "whole", **once)
    one = pretraining.run(config, text_file, tmp_path / "one", "--bf16", "True", **once)
    how = once | {"bf16": True, "ddp_backend": "gloo", "pipeline": 2}
    launch("-m", "training", *pretraining.command(config, text_file, tmp_path / "two", **how))
    two = json.loads((tmp_path / "two/result.json").read_text())
    assert pretraining.losses(two) == pytest.approx(pretraining.losses(one), rel=2e-7)
    assert pretraining.losses(two) != pytest.approx(pretraining.losses(whole), rel=1e-6)


def assert_same_run(one: dict, folder: Path, tolerance: float) -> None:
    """The second run of a folder found what the first one did, which is given."""
    two = json.loads((folder / "two/result.json").read_text())
    assert pretraining.losses(two) == pytest.approx(pretraining.losses(one), rel=tolerance)
    assert two["held_out_loss"] == pytest.approx(one["held_out_loss"], rel=tolerance)
    assert [two[name] for name in ("steps", "parameters", "rows")] == [one[n] for n in ("steps", "parameters", "rows")]
    assert two["run"]["tokens"] == one["run"]["tokens"]
    expected, found = pretraining.saved(folder / "one"), pretraining.saved(folder / "two")
    assert expected.keys() == found.keys()
    for name, value in expected.items():
        assert relative_error(found[name], value) <= 100 * tolerance, name


# ------------------------------------------------------------------------------------------------ checkpoints, and loss


@processes
@pytest.mark.exhaustive
@pytest.mark.parametrize("family", ["Llama", "Qwen3Moe"])
def test_ranks_load_their_layers_alone_and_save_one_model(family, tmp_path):
    source = tmp_path / "model"
    BY_NAME[family].causal_lm(attn_res_block_size=2).save_pretrained(source)
    found = run(3, "checkpoint", tmp_path / "sizes.pt", MODEL=str(source))
    assert max(found["parts"]) < 0.7 * found["whole"]
    assert sorted(path.name for path in (tmp_path / "saved").glob("model[.-]*")) == [
        *(f"model-0000{number}-of-00003.safetensors" for number in (1, 2, 3)),
        "model.safetensors.index.json",
    ]
    one, two = (AutoModelForCausalLM.from_pretrained(tmp_path / name).state_dict() for name in ("model", "saved"))
    assert one.keys() == two.keys()
    assert all(torch.equal(value, two[name]) for name, value in one.items())


@processes
@pytest.mark.parametrize(
    ("how", "end"),
    [("stepping", 3), *(pytest.param(*case, marks=pytest.mark.exhaustive) for case in (("saving", 3), ("hanging", 2)))],
)
def test_a_rank_that_dies_or_hangs_ends_the_others_with_its_reason(how, end, tmp_path):
    timeout = "5" if how == "hanging" else "60"
    *others, (lost, _) = finish(start(3, "lost", tmp_path / "nothing", HOW=how, TIMEOUT=timeout))
    assert lost == end
    for rank, (status, error) in enumerate(others):
        assert status == 2, error
        assert re.search(f"^error: process {rank} stopped, for another has ended", error, re.MULTILINE)
    assert list(tmp_path.iterdir()) == []
