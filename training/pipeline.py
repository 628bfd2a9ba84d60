"""Pipeline parallelism for models with Attention Residuals: stages of whole decoder layers, on torch's own schedules.

With standard residuals a stage sends one tensor. Here every later layer may read every closed block, so what travels is
the running sum and the closed blocks. A rank that runs several stages (*virtual* stages) has seen blocks before: it
keeps them, and only those that it has neither received nor made travel (the paper's cross-stage caching, section 4.1).

In this file, in the order to read it:
    - `Cut`: which stage has which layers, and what travels to it. A pure plan; the runtime sends what it says.
    - `Stage`: the family's own model with the layers of other stages taken out, as a function of what travels.
    - `BlockCache`: the blocks that a rank keeps of a microbatch, and how their gradients find back.
    - `Pipeline`: the stages of this rank, torch's schedule of them, and what the ranks have in common.

Stage c of C = P·V runs on rank c mod P. Shapes: B rows of a microbatch, T tokens, D hidden size.
"""

import contextlib
import copy
import json
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import safe_open
from safetensors.torch import save_file
from torch import nn
from torch.distributed.pipelining import PipelineStage
from torch.distributed.pipelining.schedules import ScheduleInterleaved1F1B, ScheduleLoopedBFS
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from common.errors import describe
from common.files import complete_or_absent
from common.quiet import quiet_transformers
from modeling_attnres import is_depth_parameter
from modeling_attnres.configuration_attnres import BlockLayout
from modeling_attnres.depth_attention import statistics_dtype
from modeling_attnres.modeling_attnres import find_part
from modeling_attnres.residual_stream import DepthPass, LayerElsewhere

from .data import IGNORED
from .loading import TrainingError


SCHEDULES = {"1f1b": ScheduleInterleaved1F1B, "gpipe": ScheduleLoopedBFS}  # the latter, breadth first, is GPipe's order


# ------------------------------------------------------------------------------------------------------------- the plan


@dataclass(frozen=True)
class Cut:
    """Which decoder layers each stage has, and what travels between stages.

    Args:
        starts: the first decoder layer of each of the C stages.
        num_layers: L, decoder layers.
        ranks: P; stage c runs on rank c mod P.
        layout: which blocks there are; `None`: standard residuals, of which there are none.
        caching: a rank keeps the blocks that it has received or made.

    Example:
        from modeling_attnres.configuration_attnres import BlockLayout
        from training.pipeline import cut_layers

        layout = BlockLayout(16, starts=tuple(range(0, 16, 2)))
        cut = cut_layers(16, ranks=2, virtual=2, layout=layout)
        assert cut.starts == (0, 4, 8, 12)
        assert [cut.num_sent(stage) for stage in range(4)] == [0, 3, 2, 2]  # 3: the embedding, a block, the running sum
    """

    starts: tuple[int, ...]
    num_layers: int
    ranks: int
    layout: BlockLayout | None
    caching: bool = True

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def layers_of(self, stage: int) -> range:
        """Return the decoder layers of a stage."""
        return [range(start, end) for start, end in pairwise((*self.starts, self.num_layers))][stage]

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank."""
        return range(rank, self.num_stages, self.ranks)

    def layers_on(self, rank: int) -> set[int]:
        """Return the decoder layers of a rank's stages."""
        return {layer for stage in self.stages_of(rank) for layer in self.layers_of(stage)}

    def closed_before(self, stage: int) -> int:
        """Return how many blocks have closed where the stage begins; its first layer may close one more."""
        first = self.starts[stage]
        return 0 if self.layout is None else self.closed_after(stage) - self.layout.opens_block(first)

    def closed_after(self, stage: int) -> int:
        """Return how many blocks have closed once the stage's first layer has closed what ends there."""
        return 0 if self.layout is None else self.layout.closed_blocks(2 * self.starts[stage])

    def known(self, stage: int) -> int:
        """Return how many of the blocks the stage's rank has from its stage before.

        That one ended where another began, with the blocks closed there; if that one's first layer closes another, it
        is the running sum with which the rank's stage ended.
        """
        before = stage - self.ranks
        return self.closed_after(before + 1) if self.caching and before >= 0 else 0

    def sent(self, stage: int) -> range:
        """Return which blocks travel to a stage, beside the running sum."""
        return range(min(self.known(stage), self.closed_before(stage)), self.closed_before(stage))

    def num_sent(self, stage: int) -> int:
        """Return how many tensors `[B, T, D]` travel to a stage, the running sum included."""
        within_a_rank = self.ranks == 1
        return 0 if stage == 0 or within_a_rank else len(self.sent(stage)) + 1

    @property
    def total_sent(self) -> int:
        """How many tensors `[B, T, D]` travel in one forward pass; as many gradients travel back."""
        return sum(self.num_sent(stage) for stage in range(self.num_stages))


def cut_layers(num_layers: int, ranks: int, virtual: int, layout: BlockLayout | None, caching: bool = True) -> Cut:
    """Cut a model's layers into ranks · virtual stages as equal as can be, the longer ones first.

    Raises:
        TrainingError: there are more stages than layers.
    """
    if ranks < 1 or virtual < 1:
        raise TrainingError(f"A pipeline needs 1 rank and 1 virtual stage or more, got {ranks} and {virtual}.")
    stages = ranks * virtual
    if stages > num_layers:
        raise TrainingError(
            f"A pipeline of {ranks} ranks with {virtual} virtual stages each has {stages} stages, but the model has "
            f"{num_layers} decoder layers: each stage needs one."
        )
    size, longer = divmod(num_layers, stages)
    starts = tuple(stage * size + min(stage, longer) for stage in range(stages))
    return Cut(starts, num_layers, ranks, layout, caching)


def describe_cut(config: PreTrainedConfig, ranks: int, virtual: int) -> list[str]:
    """Describe in lines how a model is cut, and what travels in a forward pass, per token.

    Beside it stands the paper's count for a model whose stages are C equal numbers of blocks, N_p each: without caching
    C (C - 1) / 2 · N_p, with it P (P - 1) / 2 · N_p + (V - 1) P² · N_p. It leaves out the embedding, and counts blocks
    that a rank has made itself.

    Raises:
        TrainingError: as `cut_layers`.
    """
    layout, layers = layout_of(config), config.num_hidden_layers
    cut, whole = (cut_layers(layers, ranks, virtual, layout, caching) for caching in (True, False))
    lines = [
        f"stage {stage} on rank {stage % ranks}: layers {own.start} to {own.stop - 1}, "
        f"sent {cut.num_sent(stage)} ({whole.num_sent(stage)} without caching)"
        for stage in range(cut.num_stages)
        if (own := cut.layers_of(stage))
    ]
    lines.append(f"together: {cut.total_sent} vectors a token ({whole.total_sent} without caching)")
    if layout is not None:
        blocks = (2 * layers if layout.full else len(layout.blocks)) / cut.num_stages
        cached = (ranks * (ranks - 1) / 2 + (virtual - 1) * ranks**2) * blocks
        history = cut.num_stages * (cut.num_stages - 1) / 2 * blocks
        lines.append(f"by the paper's formulas, of {blocks:g} blocks a stage: {cached:g} ({history:g})")
    return lines


def layout_of(config: PreTrainedConfig) -> BlockLayout | None:
    """Return the blocks of a model, `None` where it has standard residuals.

    Raises:
        TrainingError: what travels would not be running sums and blocks alone.
    """
    if getattr(config, "output_router_logits", False):
        raise TrainingError(
            "output_router_logits: the router loss of a pipeline's stages is not gathered; expected false."
        )
    if config.attn_res_mode == "none":
        return None
    if config.attn_res_form == "add":
        raise TrainingError('attn_res_form="add" cannot be cut into pipeline stages; expected "replace".')
    return config.attn_res_layout


# ---------------------------------------------------------------------------------------------------------- one stage


class Entrance(LayerElsewhere):
    """The stand-in before a stage's first layer: it begins with what has arrived."""

    arrived: tuple[Sequence[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states_BTD: torch.Tensor, *args, depth_pass: DepthPass | None = None, **kwargs):
        blocks_BTD, running_sum_BTD = self.arrived
        return running_sum_BTD if depth_pass is None else depth_pass.resume(blocks_BTD, running_sum_BTD)


class Exit(LayerElsewhere):
    """The stand-in after a stage's last layer: it keeps what is to be handed on."""

    left: tuple[Sequence[torch.Tensor], torch.Tensor]
    layer_index: int

    def forward(self, hidden_states_BTD: torch.Tensor, *args, depth_pass: DepthPass | None = None, **kwargs):
        self.left = [], hidden_states_BTD
        if depth_pass is not None:
            self.left = depth_pass.hand_on(self.layer_index, hidden_states_BTD)
        return hidden_states_BTD


def stand_in(layer: nn.Module, index: int, kind: type[LayerElsewhere] = LayerElsewhere) -> LayerElsewhere:
    """Make what stands for a layer: its plain attributes, by which families choose masks, and no parameter."""
    twin = copy.copy(layer)
    twin.__class__, twin.layer_index = kind, index
    twin._modules, twin._parameters, twin._buffers = {}, {}, {}
    return twin


def with_children(module: nn.Module, **children: nn.Module) -> nn.Module:
    """Return a module that shares all with another but some of its children."""
    twin = copy.copy(module)
    twin._modules = module._modules | children
    return twin


def keep_parts(
    model: PreTrainedModel,
    layers: set[int],
    is_first: bool,
    is_last: bool,
    kinds: dict[int, type[LayerElsewhere]] | None = None,
) -> PreTrainedModel:
    """Return a model that has some parts of another; it shares their modules, under their names.

    Args:
        model: a causal language model.
        layers: the decoder layers to keep.
        is_first, is_last: keep the embedding; keep the final norm and the head.
        kinds: the stand-ins of other layers that are to be of a class of their own.

    Raises:
        TrainingError: the decoder has parameters outside of its layers, embedding and final norm.
    """
    decoder, kinds = model.get_decoder(), kinds or {}
    kept = nn.ModuleList(
        layer if index in layers else stand_in(layer, index, kinds.get(index, LayerElsewhere))
        for index, layer in enumerate(decoder.layers)
    )
    embedding, norm = outer_parts(decoder)
    left_out = ([] if is_first else [embedding]) + ([] if is_last else [norm])
    parts = {"layers": kept} | {name: nn.Identity() for name in left_out}
    heads = {} if is_last else {name: nn.Identity() for name, _ in model.named_children()}
    where = next(name for name, child in model.named_children() if child is decoder)
    return with_children(model, **heads | {where: with_children(decoder, **parts)})


class BlockCache:
    """The blocks that a rank keeps of each microbatch, from one of its stages to the next.

    A block that a stage *received* is a leaf of its graph. Later stages of the rank are given the same leaf, so that
    autograd itself adds up its gradient: it is complete when the stage that received it sends it back, for that one
    runs backward last. A block that a stage *made* is kept as a new leaf, whose gradient is added by a hook when the
    block's own arrives.
    """

    def __init__(self):
        self._blocks: dict[int, list[torch.Tensor]] = {}

    def keep(self, microbatch: int, received: Sequence[torch.Tensor], made: Sequence[torch.Tensor]) -> None:
        """Keep the blocks that a stage knows: those that it received, then those that it made."""
        self._blocks[microbatch] = [*received, *map(detach_for_later, made)]

    def take(self, microbatch: int) -> list[torch.Tensor]:
        """Give away what the rank's stage before kept; the graph holds it from here on."""
        return self._blocks.pop(microbatch)


def detach_for_later(block_BTD: torch.Tensor) -> torch.Tensor:
    """Return a leaf with a block's values; its gradient is added to the block's own, which must come after it."""
    leaf_BTD = block_BTD.detach()
    if block_BTD.requires_grad:
        leaf_BTD.requires_grad_()
        block_BTD.register_hook(lambda grad_BTD: grad_BTD if leaf_BTD.grad is None else grad_BTD + leaf_BTD.grad)
    return leaf_BTD


class Stage(nn.Module):
    """One stage: the family's own model, in which other stages' layers are stood for, as a function of tensors.

    Args:
        model: a whole causal language model; its modules are shared, not copied.
        cut: of its layers.
        stage: which of the cut.
        cache: of the rank.

    """

    def __init__(self, model: PreTrainedModel, cut: Cut, stage: int, cache: BlockCache):
        super().__init__()
        self.cut, self.stage, self.cache = cut, stage, cache
        self.is_first, self.is_last = stage == 0, stage == cut.num_stages - 1
        self.rank_goes_on = cut.caching and stage + cut.ranks < cut.num_stages
        self.context = contextlib.nullcontext  # what the forward runs in, as autocast
        layers = cut.layers_of(stage)
        kinds = {layers.start - 1: Entrance, layers.stop: Exit}  # they take and leave what travels
        self.model = keep_parts(model, set(layers), self.is_first, self.is_last, kinds)
        own = self.model.get_decoder().layers
        self.entrance = None if self.is_first else own[layers.start - 1]
        self.exit = None if self.is_last else own[layers.stop]

    def forward(self, *arrived: torch.Tensor, microbatch: torch.Tensor, **kwargs):
        """Run the stage's layers.

        Args:
            arrived: the token ids (first stage), or the running sum and the blocks that travelled.
            microbatch: its index, `[1]`.
            kwargs: what the model takes beside token ids.

        Returns:
            The running sum and the blocks that travel on, or the logits (last stage).
        """
        index = int(microbatch)
        received: list[torch.Tensor] = []
        if self.is_first:
            kwargs["input_ids"] = arrived[0]
        else:
            running_sum_BTD, *blocks_BTD = arrived
            known = self.cache.take(index) if self.cut.caching and self.stage >= self.cut.ranks else []
            blocks_BTD = [*known, *blocks_BTD]
            # If the first layer closes the running sum, that is a block, too
            received = [*blocks_BTD, running_sum_BTD][: self.cut.closed_after(self.stage)]
            self.entrance.arrived = blocks_BTD[: self.cut.closed_before(self.stage)], running_sum_BTD
            # Masks and positions are made for it; the stand-ins let no value of it through
            kwargs["inputs_embeds"] = running_sum_BTD.detach().to(self.model.dtype)
        with self.context():
            if self.is_last:
                return self.model(**kwargs, use_cache=False).logits
            self.model.get_decoder()(**kwargs, use_cache=False)
        blocks_BTD, running_sum_BTD = self.exit.left
        running_sum_BTD = running_sum_BTD.to(running_sum_dtype(self.model))
        if self.rank_goes_on:
            made = [*blocks_BTD, running_sum_BTD][len(received) : self.cut.closed_after(self.stage + 1)]
            self.cache.keep(index, received, made)
        del self.exit.left
        return running_sum_BTD, *(blocks_BTD[block] for block in self.cut.sent(self.stage + 1))

    def tensors_at(self, stage: int, shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        """Describe what travels to a stage, by tensors without data."""
        dtypes = [running_sum_dtype(self.model), *(self.model.dtype for _ in self.cut.sent(stage))]
        return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for dtype in dtypes)


def running_sum_dtype(model: PreTrainedModel) -> torch.dtype:
    """Return what running sums are kept and travel in: between layers nothing is rounded, nor between stages."""
    return model.dtype if model.config.attn_res_mode == "none" else statistics_dtype(model.dtype)


def outer_parts(decoder: PreTrainedModel) -> tuple[str, str]:
    """Return the names of a decoder's embedding and its final norm.

    Raises:
        TrainingError: it has parameters elsewhere outside of its layers.
    """
    children = dict(decoder.named_children())
    embedding = next(name for name, child in children.items() if child is decoder.get_input_embeddings())
    norm = find_part(decoder.config.base_model_type(), "final_norm", set(children))
    for name, child in children.items():
        if name not in (embedding, norm, "layers", "attn_res") and any(True for _ in child.parameters()):
            raise TrainingError(
                f"{type(decoder).__name__} has parameters in {name!r}, beside its layers: no stage's of a pipeline."
            )
    return embedding, norm


# ------------------------------------------------------------------------------------------------- the stages of a rank


class Pipeline:
    """The stages of this rank, and their steps together with the other ranks'.

    Every rank makes it of the same whole model, keeps the modules of its stages, and calls each method when the others
    do, with the same batch. The depth parameters are whole on every rank.

    Args:
        model: a causal language model with the config of Attention Residuals.
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
        model: PreTrainedModel,
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
        self.config, self.device, self.schedule = model.config, device or model.device, schedule
        head, embedding = model.get_output_embeddings().weight, model.get_input_embeddings().weight
        self.tied = head if head is embedding else None
        layout = layout_of(model.config)
        self.cut = cut_layers(model.config.num_hidden_layers, ranks, virtual, layout, caching)
        self.microbatches = fitting_microbatches(microbatches, ranks) if schedule == "1f1b" else microbatches
        cache = BlockCache()
        self.stages = [Stage(model, self.cut, stage, cache) for stage in self.cut.stages_of(self.rank)]
        self.model = self.keep_parts(model).to(self.device)
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
        logits = torch.empty((*shape, self.config.vocab_size), dtype=stage.model.dtype, device="meta")
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
        square = torch.nn.utils.get_total_norm(counted).square()
        with naming_lost_processes():
            dist.all_reduce(square, group=self.group)
        return square.sqrt()

    def save_model(self, target: Path, add_files: Callable[[Path], None] = lambda folder: None) -> None:
        """Write the whole model, complete or not at all: each rank its tensors, one file a rank.

        The folder is a checkpoint like any other; the names are those of a model that was never cut.

        Args:
            target: the folder, which is absent or empty, and which all ranks can write to.
            add_files: writes on the first rank what else belongs there.

        Raises:
            TrainingError: a rank could not write its part.
        """
        writing = complete_or_absent(target) if self.rank == 0 else contextlib.nullcontext()
        with naming_lost_processes(), writing as folder:
            where = [folder]
            dist.broadcast_object_list(where, group=self.group, group_src=0)
            part, error = where[0] / f"stage-{self.rank}", None
            try:
                self._save_part(part)
            except Exception as raised:  # others wait for this rank's answer
                error = describe(raised)
            errors = [None] * self.cut.ranks
            dist.all_gather_object(errors, error, group=self.group)
            for rank, found in enumerate(errors):
                if found is not None:
                    raise TrainingError(f"{target}: pipeline rank {rank} cannot write its part: {found}.")
            if self.rank == 0:
                join_parts(folder, [folder / f"stage-{rank}" for rank in range(self.cut.ranks)])
                add_files(folder)
        dist.barrier(group=self.group)

    def _save_part(self, part: Path) -> None:
        """Write what this rank saves to a folder; the first one's is a checkpoint, with a config and its code."""
        model, state = self.model, self._own_state()
        if self.rank == 0:
            model.save_pretrained(part, state_dict=state, max_shard_size="1000TB")
        else:  # save_pretrained writes on the first rank alone
            part.mkdir()
            state = {name: value.contiguous() for name, value in revert_weight_conversion(model, state).items()}
            save_file(state, part / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})

    def _own_state(self) -> dict[str, torch.Tensor]:
        """Return what this rank saves: of what several have, one rank has it."""
        state = self.model.state_dict()
        if self.rank == 0:
            return state
        tied = None if self.tied is None else self.tied.data_ptr()
        return {
            name: value
            for name, value in state.items()
            if not is_depth_parameter(name) and (tied is None or value.data_ptr() != tied)
        }


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


def join_parts(folder: Path, parts: list[Path]) -> None:
    """Make one checkpoint of those that the ranks wrote into folders within it."""
    files, size = {}, 0
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        (part / SAFE_WEIGHTS_NAME).rename(folder / name)
        with safe_open(folder / name, "pt") as file:
            files |= dict.fromkeys(file.keys(), name)
        size += (folder / name).stat().st_size
    for path in parts[0].iterdir():  # the config and its code
        path.rename(folder / path.name)
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    for part in parts:
        shutil.rmtree(part)


def load_part(path: str | Path, cut: Cut, rank: int, **kwargs) -> PreTrainedModel:
    """Load a causal language model for a rank: the layers of other ranks are left out, in memory and from disk.

    Args:
        path: of a model with Attention Residuals.
        cut: of its layers.
        rank: in the pipeline.
        kwargs: for `from_pretrained`.
    """
    config = AutoConfig.from_pretrained(path)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    own = cut.layers_on(rank)

    def make_without_layers(self, config, *args, **kwargs):
        model_class.__init__(self, config, *args, **kwargs)
        layers = self.get_decoder().layers
        for index, layer in enumerate(layers):
            if index not in own:
                layers[index] = stand_in(layer, index)

    part_class = type(model_class.__name__, (model_class,), {"__init__": make_without_layers})
    with quiet_transformers():  # it reports the tensors left out
        model = part_class.from_pretrained(path, config=config, **kwargs)
    model.__class__ = model_class
    return model


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
