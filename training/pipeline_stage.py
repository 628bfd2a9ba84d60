"""One stage of a pipeline: the family's own model with the layers of other stages taken out.

In this file, in the order to read it:
    - `Entrance` and `Exit`: stand-ins beside a stage's layers, which take and leave what travels.
    - `keep_parts`: a model that has some parts of another.
    - `BlockCache`: the blocks that a rank keeps of a microbatch, and how their gradients find back.
    - `Stage`: such a model as a function of what travels.

Shapes: B rows of a microbatch, T tokens, D hidden size.
"""

import contextlib
import copy
from collections.abc import Sequence

import torch
from torch import nn
from transformers import PreTrainedModel

from modeling_attnres.depth_attention import statistics_dtype
from modeling_attnres.modeling_attnres import find_part
from modeling_attnres.residual_stream import DepthPass, LayerElsewhere

from .loading import TrainingError
from .pipeline_cut import Cut


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
        self.dtype = model.dtype  # in which blocks travel; the first parameter of a part may have another
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
            kwargs["inputs_embeds"] = running_sum_BTD.detach().to(self.dtype)
        with self.context():
            if self.is_last:
                return self.model(**kwargs, use_cache=False).logits
            self.model.get_decoder()(**kwargs, use_cache=False)
        blocks_BTD, running_sum_BTD = self.exit.left
        running_sum_BTD = running_sum_BTD.to(self.running_sum_dtype)
        if self.rank_goes_on:
            made = [*blocks_BTD, running_sum_BTD][len(received) : self.cut.closed_after(self.stage + 1)]
            self.cache.keep(index, received, made)
        del self.exit.left
        return running_sum_BTD, *(blocks_BTD[block] for block in self.cut.sent(self.stage + 1))

    def tensors_at(self, stage: int, shape: tuple[int, int, int]) -> tuple[torch.Tensor, ...]:
        """Describe what travels to a stage, by tensors without data."""
        dtypes = [self.running_sum_dtype, *(self.dtype for _ in self.cut.sent(stage))]
        return tuple(torch.empty(shape, dtype=dtype, device="meta", requires_grad=True) for dtype in dtypes)

    @property
    def running_sum_dtype(self) -> torch.dtype:
        """What running sums are kept and travel in: between layers nothing is rounded, nor between stages."""
        return self.dtype if self.model.config.attn_res_mode == "none" else statistics_dtype(self.dtype)
