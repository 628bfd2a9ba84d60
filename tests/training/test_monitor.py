"""What the monitor logs, to whom, and when it warns."""

import warnings

import pytest
import torch
from transformers import TrainerCallback, TrainingArguments

from tests.families import BY_NAME, tokens
from training.depth import mean_depth_weights, site_statistics
from training.monitor import DepthMonitor
from training.trainer import DepthTrainer


class Tracker(TrainerCallback):
    """Stands for TensorBoard, W&B, …: callbacks that read what is logged."""

    def __init__(self):
        self.seen = []

    def on_log(self, args, state, control, logs=None, **kwargs):
        self.seen.append(dict(logs))


def train(tmp_path, model, monitor, rate=1e-2, steps=6):
    tracker = Tracker()
    arguments = TrainingArguments(
        tmp_path / "out", max_steps=steps, logging_steps=1, learning_rate=rate, report_to="none", save_strategy="no",
        logging_nan_inf_filter=False, use_cpu=True, disable_tqdm=True, lr_scheduler_type="constant",
    )  # fmt: skip
    rows = [{"input_ids": row, "labels": row} for row in tokens(batch=8)]
    trainer = DepthTrainer(model, arguments, train_dataset=rows, callbacks=[tracker], depth_lr=rate, monitors=[monitor])
    trainer.train()
    return trainer, tracker


def test_trackers_see_what_the_model_says(tmp_path):
    model = BY_NAME["Llama"].causal_lm()
    trainer, tracker = train(tmp_path, model, DepthMonitor(tokens(batch=1)), rate=1e-4, steps=2)
    logged = tracker.seen[1]
    assert logged == {key: trainer.state.log_history[1][key] for key in logged}
    weights = mean_depth_weights(model.eval(), tokens(batch=1))
    expected = [one for one, w in zip(site_statistics(model.config, weights), weights) if len(w) > 1]
    assert logged["depth/entropy_of_mean"] == pytest.approx(
        sum(one.entropy_of_mean for one in expected) / len(expected)
    )
    assert logged["depth/reach"] == pytest.approx(sum(one.reach for one in expected) / len(expected))
    assert logged["depth/largest_weight"] == pytest.approx(max(one.largest for one in expected))
    queries = model.model.attn_res.query.detach()
    assert logged["depth/query_norm_mean"] == pytest.approx(queries.norm(dim=-1).mean().item())
    assert logged["depth/query_norm_max"] == pytest.approx(queries.norm(dim=-1).max().item())


def test_a_healthy_run_warns_of_nothing(tmp_path):
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*(pseudo-query|weight on|loss at step).*")
        train(tmp_path, BY_NAME["Llama"].causal_lm(), DepthMonitor(tokens(batch=1)))


def test_queries_that_do_not_move(tmp_path):
    model = BY_NAME["Llama"].causal_lm()
    model.model.attn_res.requires_grad_(False)
    with pytest.warns(UserWarning, match=r"After 5 steps no query has moved .*--depth-lr"):
        train(tmp_path, model, DepthMonitor(tokens(batch=1)))


def test_a_site_that_collapses(tmp_path):
    model = BY_NAME["Llama"].causal_lm()
    with torch.no_grad():
        model.model.attn_res.query[7] = 1e3 * torch.randn(32, generator=torch.Generator().manual_seed(0))
        monitor = DepthMonitor(tokens(batch=1, length=1))
    with pytest.warns(UserWarning, match=r"site 7 \(layer 3 MLP\) puts 1\.0000 of its weight on one source"):
        train(tmp_path, model, monitor, steps=1)


def test_a_loss_that_is_not_finite_stops_training(tmp_path):
    model = BY_NAME["Llama"].causal_lm()
    with torch.no_grad():
        model.lm_head.weight[5] = float("nan")
    with pytest.warns(UserWarning, match=r"The loss at step 1 is nan\. Training stops\. Try a lower --learning_rate"):
        trainer, _ = train(tmp_path, model, DepthMonitor(tokens(batch=1)))
    assert trainer.state.global_step == 1
