"""DepthTrainer for a model whose layers are cut into pipeline stages, with replicas beside it."""

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
import torch.distributed as dist
from accelerate import PartialState
from peft import PeftModel
from torch import nn
from torch.utils.data import DataLoader
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.trainer import OPTIMIZER_NAME, SCHEDULER_NAME
from transformers.trainer_pt_utils import AcceleratorConfig

from common.errors import reading
from modeling_attnres import is_depth_parameter

from .loading import TrainingError
from .monitor import Monitor
from .options import Arguments, sampling_of
from .pipeline import SCHEDULES, Pipeline
from .pipeline_cut import cut_layers, layout_of
from .pipeline_files import restore_weights, save_weights
from .trainer import DepthTrainer, row_losses


# What Trainer does elsewhere than in the steps of a pipeline
ELSEWHERE = ("fsdp", "fp16", "torch_compile", "load_best_model_at_end", "label_smoothing_factor", "neftune_noise_alpha")


@dataclass
class PipelineOptions:
    """How the layers of a model are spread over processes."""

    _argument_group_name = "pipeline parallelism"

    pipeline: int | None = field(
        default=None,
        metadata={"help": "Cut the layers into stages on so many processes of torchrun; other processes are replicas."},
    )
    virtual_stages: int = field(
        default=1, metadata={"help": "The number of stages on each of them.", "aliases": ["--virtual"]}
    )
    microbatches: int | None = field(
        default=None, metadata={"help": "The parts of a batch that follow each other. Default: a row each."}
    )
    schedule: str = field(default="1f1b", metadata={"help": f"Their order: {' or '.join(SCHEDULES)}."})

    @property
    def decisive(self) -> dict:
        """What decides which files a checkpoint has, and how batches are cut."""
        chosen = [self.pipeline, self.virtual_stages, self.microbatches, self.schedule]
        return {"pipeline": None if self.pipeline is None else chosen}


NO_PIPELINE = PipelineOptions()


def check_pipeline(options: PipelineOptions, config: PreTrainedConfig, arguments: Arguments) -> None:
    """Refuse a pipeline that cannot work, before data is read.

    Raises:
        TrainingError: names the option.
    """
    if options.pipeline is None:
        if options.virtual_stages != 1 or options.microbatches is not None:
            raise TrainingError("--virtual-stages and --microbatches go with --pipeline.")
        return
    if options.pipeline < 2:
        raise TrainingError(f"--pipeline must be at least 2 processes, got {options.pipeline}.")
    cut_layers(config.num_hidden_layers, options.pipeline, options.virtual_stages, layout_of(config))
    if options.schedule not in SCHEDULES:
        raise TrainingError(f"--schedule must be {' or '.join(SCHEDULES)}, got {options.schedule}.")
    if options.microbatches is not None and options.microbatches < 1:
        raise TrainingError(f"--microbatches must be at least 1, got {options.microbatches}.")
    for name in ELSEWHERE:
        if getattr(arguments, name):
            raise TrainingError(f"--{name} does not go with --pipeline.")
    if sampling_of(arguments) not in ("random", "sequential"):  # others give each process rows of its own
        raise TrainingError(f"--train_sampling_strategy {sampling_of(arguments)} does not go with --pipeline.")
    if arguments.accelerator_config != AcceleratorConfig():
        raise TrainingError("--accelerator_config does not go with --pipeline.")
    if arguments.gradient_accumulation_steps != 1:
        raise TrainingError("--gradient_accumulation_steps does not go with --pipeline, which has --microbatches.")
    launched = int(os.environ.get("WORLD_SIZE", 1))
    if launched % options.pipeline != 0:
        raise TrainingError(
            f"--pipeline {options.pipeline}: expected a multiple of that as processes; torchrun started {launched}."
        )


def choose_trainer(
    options: PipelineOptions,
    model: PreTrainedModel | PeftModel,
    arguments: Arguments,
    monitors: Sequence[Monitor],
    **kwargs,
) -> DepthTrainer:
    """Make the trainer of a model, or of the stages of it that this process has.

    Args:
        options: whether it is cut.
        model: the whole model.
        arguments: of the trainer.
        monitors: of a whole model; a pipeline, of which no process has all, goes without.
        kwargs: what else the trainer takes.
    """
    with reading("TrainingArguments"):
        if options.pipeline is None:
            return DepthTrainer(model, arguments, monitors=monitors, **kwargs)
        return PipelineTrainer(make_pipeline(options, model, arguments), arguments, **kwargs)


def make_pipeline(options: PipelineOptions, model: PreTrainedModel | PeftModel, arguments: Arguments) -> Pipeline:
    """Make the pipeline of this process: neighbours are a pipeline, and every P-th process has the same stages.

    Raises:
        TrainingError: a process would have nothing to train.
    """
    check_learning(options, model)
    replicas = arguments.world_size // options.pipeline
    shape, names = (replicas, options.pipeline), ("data", "pipeline")
    mesh = dist.init_device_mesh(arguments.device.type, shape, mesh_dim_names=names)
    return Pipeline(
        model,
        mesh.get_group("pipeline"),
        mesh.get_group("data"),
        options.virtual_stages,
        options.microbatches or arguments.per_device_train_batch_size,
        options.schedule,
        device=arguments.device,
    )


def check_learning(options: PipelineOptions, model: PreTrainedModel | PeftModel) -> None:
    """Refuse a cut that leaves a process without a parameter that is trained.

    Raises:
        TrainingError: names the process.
    """
    if any(is_depth_parameter(name) and one.requires_grad for name, one in model.named_parameters()):
        return  # every process has them
    layers = model.get_decoder().layers
    cut = cut_layers(len(layers), options.pipeline, options.virtual_stages, None)
    for rank in range(options.pipeline):
        if not any(one.requires_grad for layer in cut.layers_on(rank) for one in layers[layer].parameters()):
            raise TrainingError(
                f"--pipeline {options.pipeline}: nothing is trained in layers {sorted(cut.layers_on(rank))}, which are "
                f"all that process {rank} has. Use fewer processes."
            )


def outline(config: PreTrainedConfig) -> PreTrainedModel:
    """Make a whole model without data, for what is counted of it."""
    with torch.device("meta"):
        return AutoModelForCausalLM.from_config(config)


class PipelineTrainer(DepthTrainer):
    """DepthTrainer that steps with a pipeline: each process trains the layers of its stages.

    A batch is that of a replica: each of its processes is given the same rows. Checkpoints have one file of weights and
    one of the optimizer's state for each process of a pipeline.

    Args:
        pipeline: of this process; its model is what is trained.
    """

    def __init__(self, pipeline: Pipeline, *args, **kwargs):
        super().__init__(pipeline.model, *args, **kwargs)
        self.pipeline = pipeline
        self.replica, self.replicas = dist.get_rank(pipeline.data_group), dist.get_world_size(pipeline.data_group)
        for stage in pipeline.stages:
            stage.context = self.accelerator.autocast
        # accelerate takes each process for a replica: no DDP around a part of a model, and rows by the true replicas
        self.accelerator.prepare_model = lambda model, **kwargs: model

    def get_total_train_batch_size(self, args) -> int:
        """Count the rows of a step, each once."""
        return super().get_total_train_batch_size(args) // self.pipeline.cut.ranks

    def get_train_dataloader(self):
        """Give a replica's processes the same rows, and replicas different ones."""
        return shard(super().get_train_dataloader(), self.replica, self.replicas)

    def get_eval_dataloader(self, eval_dataset=None):
        """Give every process all held-out rows."""
        return shard(super().get_eval_dataloader(eval_dataset), 0, 1)

    def training_step(self, model: nn.Module, inputs: dict, num_items_in_batch=None) -> torch.Tensor:
        return self.pipeline.run_step(self._prepare_inputs(inputs))

    def _clip_grad_norm(self, model: nn.Module) -> torch.Tensor:
        """Clip by the norm of the whole model's gradient."""
        norm = self.pipeline.gradient_norm()
        nn.utils.clip_grads_with_norm_(model.parameters(), self.args.max_grad_norm, norm)
        return norm

    def _get_grad_norm(self, model: nn.Module, grad_norm: torch.Tensor | None = None) -> torch.Tensor:
        return self.pipeline.gradient_norm() if grad_norm is None else grad_norm

    def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None) -> tuple[None, None, None]:
        """Add up the loss of each row of a batch, which the last process computes and the others are told."""
        inputs = self._prepare_inputs(inputs)
        _, logits_BTV = self.pipeline.evaluate(inputs)
        labels_BT = inputs["labels"]
        losses = torch.zeros(len(labels_BT), 2, device=labels_BT.device)
        if logits_BTV is not None:
            losses = row_losses(logits_BTV, labels_BT)
        dist.broadcast(losses, group=self.pipeline.group, group_src=self.pipeline.cut.ranks - 1)
        self.add_held_out(losses)
        return None, None, None

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        if self.replica == 0:  # the others have the same
            save_weights(self.pipeline, Path(output_dir or self.args.output_dir))
        PartialState().wait_for_everyone()  # before they write into the folder, too

    def save_trained(self, target: Path, add_files: Callable[[Path], None]) -> None:
        if self.replica == 0:
            save_weights(self.pipeline, target, add_files)

    def _save_optimizer_and_scheduler(self, output_dir: str) -> None:
        if self.replica == 0:
            torch.save(self.optimizer.state_dict(), self._optimizer_file(output_dir))
        if self.args.should_save:
            torch.save(self.lr_scheduler.state_dict(), Path(output_dir) / SCHEDULER_NAME)

    def _load_optimizer_and_scheduler(self, checkpoint: str | None) -> None:
        if checkpoint is None:
            return
        with reading(checkpoint):
            self.optimizer.load_state_dict(torch.load(self._optimizer_file(checkpoint), weights_only=True))
            self.lr_scheduler.load_state_dict(torch.load(Path(checkpoint) / SCHEDULER_NAME, weights_only=True))

    def _optimizer_file(self, checkpoint: str) -> Path:
        return Path(checkpoint) / f"{self.pipeline.rank}-{OPTIMIZER_NAME}"

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: nn.Module | None = None) -> None:
        with reading(resume_from_checkpoint):
            restore_weights(self.pipeline, Path(resume_from_checkpoint))


def shard(loader: DataLoader, index: int, count: int) -> DataLoader:
    """Have a data loader that accelerate prepared give the batches of one of so many processes."""
    sampler = loader.batch_sampler
    sampler.process_index, sampler.num_processes, sampler.even_batches = index, count, count > 1
    return loader
