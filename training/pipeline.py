"""Pipeline parallelism for models with Attention Residuals: stages of whole decoder layers, on torch's own schedules.

With standard residuals a stage sends one tensor. Here every later layer may read every closed block, so what travels is
the running sum and the closed blocks. A rank that runs several stages (*virtual* stages) has seen blocks before: it
keeps them, and only those that it has neither received nor made travel (the paper's cross-stage caching, section 4.1).

In the order to read them:
    - `pipeline_cut.py`: which stage has which layers, and what travels to it. A pure plan.
    - `pipeline_stage.py`: one stage, as a function of what travels, and the blocks that a rank keeps.
    - this file: the stages of a rank, torch's schedule of them, and what the ranks have in common.
    - `pipeline_files.py`: what the ranks save and load.
    - `pipeline_trainer.py`: the options, and Trainer.

Shapes: B rows of a microbatch, T tokens.
"""

import contextlib
from collections.abc import Iterator

import torch
import torch.distributed as dist
from peft import PeftModel
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleLoopedBFS
from transformers import PreTrainedModel

from common.errors import describe
from modeling_attnres import is_depth_parameter

from .data import IGNORED
from .loading import TrainingError
from .pipeline_cut import cut_layers, layout_of
from .pipeline_stage import BlockCache, Stage, keep_parts


SCHEDULES = {"1f1b": ScheduleInterleaved1F1B, "gpipe": ScheduleLoopedBFS}  # the latter, breadth first, is GPipe's order


class Pipeline:
    """The stages of this rank, and their steps together with the other ranks'.

    Every rank makes it of the same whole model, keeps the modules of its stages, and calls each method when the others
    do, with the same batch. The depth parameters are whole on every rank.

    Args:
        model: a causal language model with the config of Attention Residuals, or PEFT's around one, which then has the
            part of this rank in its place.
        group: of the pipeline's ranks; default: all.
        data_group: of the ranks with the same stages in other replicas, each of which has a part of the batch.
        virtual: V, stages per rank.
        microbatches: the number of parts of a batch; what does not divide is filled with rows that nothing is learned
            from, and the schedule "1f1b" needs a multiple of the ranks unless the number is close to one.
        schedule: "1f1b" (interleaved) or "gpipe".
        caching: a rank keeps the blocks it has seen.
        device: where its stages run; default: where the model is.

    Attributes:
        model: the whole model without the layers, embedding or head of other ranks: its parameters, by their names, are
            for an optimizer.
        adapted: PEFT's model around that, if it is adapted.

    Raises:
        TrainingError: more stages than layers, fewer than two ranks, or a model that cannot be cut.

    Example (of every process under torchrun):
        ```python
        pipeline = Pipeline(model, virtual=2, microbatches=8)
        optimizer = torch.optim.AdamW(pipeline.model.parameters())
        loss = pipeline.run_step({"input_ids": rows, "labels": rows})
        optimizer.step()
        ```
    """

    def __init__(
        self,
        model: PreTrainedModel | PeftModel,
        group: dist.ProcessGroup | None = None,
        data_group: dist.ProcessGroup | None = None,
        virtual: int = 1,
        microbatches: int = 1,
        schedule: str = "1f1b",
        caching: bool = True,
        device: torch.device | None = None,
    ):
        self.group, self.data_group = group or dist.group.WORLD, data_group
        self.rank, ranks = dist.get_rank(self.group), dist.get_world_size(self.group)
        if ranks < 2:
            raise TrainingError(f"A pipeline needs 2 ranks or more, got {ranks}.")
        if microbatches < 1:
            raise TrainingError(f"A pipeline needs 1 microbatch or more, got {microbatches}.")
        self.adapted = model if isinstance(model, PeftModel) else None
        model = model if self.adapted is None else model.get_base_model()
        self.config, self.device, self.schedule = model.config, device or model.device, schedule
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        self.tied = head if head is embedding else None
        layout = layout_of(model.config)
        self.cut = cut_layers(model.config.num_hidden_layers, ranks, virtual, layout, caching)
        self.microbatches = fitting_microbatches(microbatches, ranks) if schedule == "1f1b" else microbatches
        cache = BlockCache()
        self.stages = [Stage(model, self.cut, stage, cache) for stage in self.cut.stages_of(self.rank)]
        self.model = self.keep_parts(model).to(self.device)
        if self.adapted is not None:
            adopt_part(self.adapted, self.model)
        self._running: tuple[tuple[int, int], object] | None = None  # a shape of microbatches, and its schedule
        self._num_learned = 1

    def keep_parts(self, model: PreTrainedModel) -> PreTrainedModel:
        """Return the parts of a model that this rank has of its own."""
        return keep_parts(model, self.cut.layers_on(self.rank), self.rank == 0, self.rank == self.cut.ranks - 1)

    def run_step(self, batch: dict[str, torch.Tensor]) -> torch.Tensor:
        """Run a batch forward and backward.

        Gradients become those of the mean loss over all learned tokens of all replicas, whatever they were.

        Args:
            batch: `input_ids`, `labels`, and what else the model takes, each with a first dimension of rows.

        Returns:
            That loss, on every rank.

        Raises:
            TrainingError: another rank has ended, or did not answer in time.
        """
        for parameter in self.model.parameters():
            parameter.grad = None
        with naming_lost_processes():
            loss, _ = self._run(batch, training=True)
            self._sum_gradients()
        return loss

    @torch.no_grad()
    def evaluate(self, batch: dict[str, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Return the loss of a batch on every rank, and its logits on the last one (elsewhere `None`)."""
        with naming_lost_processes():
            return self._run(batch, training=False)

    def _run(self, batch: dict[str, torch.Tensor], training: bool) -> tuple[torch.Tensor, torch.Tensor | None]:
        for stage in self.stages:
            stage.train(training)
        rows, length = batch["input_ids"].shape
        batch = fill_rows(batch, -rows % self.microbatches)
        labels, input_ids = batch.pop("labels"), batch.pop("input_ids")
        learned = (labels[:, 1:] != IGNORED).sum()
        if self.data_group is not None:
            dist.all_reduce(learned, group=self.data_group)
        self._num_learned = learned
        schedule = self._schedule_for((len(input_ids) // self.microbatches, length))
        losses: list[torch.Tensor] = []
        how = {"target": labels, "losses": losses, "microbatch": torch.arange(self.microbatches), **batch}
        logits = schedule.step(input_ids, return_outputs=False, **how) if training else schedule.eval(input_ids, **how)
        loss = torch.stack(losses).sum().detach() if losses else torch.zeros((), device=self.device)
        dist.all_reduce(loss, group=self.group)  # the last rank has it
        if self.data_group is not None:
            dist.all_reduce(loss, group=self.data_group)
        return loss, None if logits is None else logits[:rows]

    def _schedule_for(self, shape: tuple[int, int]):
        """Return torch's schedule for microbatches of a shape, `(B, T)`; the last one is kept with its buffers."""
        if self._running is None or self._running[0] != shape:
            stages, make = [self._make_stage(stage, shape) for stage in self.stages], SCHEDULES[self.schedule]
            self._running = shape, make(stages, self.microbatches, loss_fn=self._compute_loss, scale_grads=False)
        return self._running[1]

    def _make_stage(self, stage: Stage, shape: tuple[int, int]) -> PipelineStage:
        index, width = stage.stage, (*shape, self.config.hidden_size)
        token_ids = torch.empty(shape, dtype=torch.long, device="meta")
        logits = torch.empty((*shape, self.config.vocab_size), dtype=stage.dtype, device="meta")
        return PipelineStage(
            stage,
            index,
            self.cut.num_stages,
            self.device,
            input_args=token_ids if stage.is_first else stage.tensors_at(index, width),
            output_args=logits if stage.is_last else stage.tensors_at(index + 1, width),
            group=self.group,
        )

    def _compute_loss(self, logits_BTV: torch.Tensor, labels_BT: torch.Tensor) -> torch.Tensor:
        """Return a microbatch's part of the mean over all learned tokens."""
        head = self.stages[-1].model
        how = {"vocab_size": self.config.vocab_size, "num_items_in_batch": self._num_learned}
        return head.loss_function(logits=logits_BTV, labels=labels_BT, **how)

    def _sum_gradients(self) -> None:
        """Sum over stages the gradients of what several have, and over replicas those of all."""
        learned = [(name, one) for name, one in self.model.named_parameters() if one.requires_grad]
        for _, parameter in learned:
            if parameter.grad is None:  # experts that no token came to
                parameter.grad = torch.zeros_like(parameter)
        self._sum_tied_gradient()
        for name, parameter in learned:
            if is_depth_parameter(name):
                dist.all_reduce(parameter.grad, group=self.group)
            if self.data_group is not None:
                dist.all_reduce(parameter.grad, group=self.data_group)

    def _sum_tied_gradient(self) -> None:
        """Sum the gradient of an embedding that is the head, too, over the first and the last rank, which have it."""
        last = self.cut.ranks - 1
        if self.tied is None or not self.tied.requires_grad or self.rank not in (0, last):
            return
        theirs, peer = torch.empty_like(self.tied.grad), last - self.rank
        exchange = [
            dist.P2POp(dist.isend, self.tied.grad, group=self.group, group_peer=peer),
            dist.P2POp(dist.irecv, theirs, group=self.group, group_peer=peer),
        ]
        for work in dist.batch_isend_irecv(exchange):
            work.wait()
        self.tied.grad = self.tied.grad + theirs

    def gradient_norm(self) -> torch.Tensor:
        """Return the norm of the gradient of the whole model, what several ranks have counted once."""
        named = [(name, one.grad) for name, one in self.model.named_parameters() if one.grad is not None]
        counted = [grad for name, grad in named if self.rank == 0 or not is_depth_parameter(name)]
        if self.tied is not None and self.rank > 0:
            counted = [grad for grad in counted if grad is not self.tied.grad]
        square = torch.nn.utils.get_total_norm(counted).square().to(self.device)  # of none it is a zero on the CPU
        with naming_lost_processes():
            dist.all_reduce(square, group=self.group)
        return square.sqrt()


def adopt_part(adapted: PeftModel, part: PreTrainedModel) -> None:
    """Have PEFT's model hold a part of the model that it was put around, so that no rank keeps the whole one."""
    adapted.base_model.model = part
    adapted.base_model_prepare_inputs_for_generation = part.prepare_inputs_for_generation  # it kept a method of that


@contextlib.contextmanager
def naming_lost_processes() -> Iterator[None]:
    """Say that another process was lost, where communication failed.

    Raises:
        TrainingError: in place of what torch raises.
    """
    try:
        yield
    except RuntimeError as error:
        if not isinstance(error, dist.DistError) and "gloo" not in str(error):
            raise
        raise TrainingError(
            f"process {dist.get_rank()} stopped, for another has ended or did not answer in time: {describe(error)}"
        ) from error


def fitting_microbatches(wanted: int, ranks: int) -> int:
    """Return the least number of microbatches, not below the wanted one, that torch's interleaved 1F1B takes."""
    number = wanted
    while number % max(1, number // ranks) != 0:
        number += 1
    return number


def fill_rows(batch: dict[str, torch.Tensor], count: int) -> dict[str, torch.Tensor]:
    """Add rows to a batch from which nothing is learned: its last one again, with labels that are ignored."""
    filled = {name: torch.cat([value, value[-1:].expand(count, *value.shape[1:])]) for name, value in batch.items()}
    filled["labels"][len(filled["labels"]) - count :] = IGNORED
    return filled
