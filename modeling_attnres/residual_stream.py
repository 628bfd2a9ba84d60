# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""The residual stream of one forward pass, as depth attention changes it: between layers, and within one.

Between layers a `DepthPass` closes blocks, gives them to a reader, and carries what layers return:
    - `ReplacePass`, the paper's form: a layer returns the running sum of its block. Sublayers read mixtures.
    - `AddPass`, the form "add": a layer returns the standard residual stream. Sublayers read it plus gate × mixture.

Within a layer the base family's own forward runs. `LayerView` is its `self`, and what reads the residual stream (two
norms, or attention and MLP themselves in a family without pre-norms) reads it through
    - `ResidualStream`, which the forward is given in place of hidden states (the paper's form), or
    - `AddedMixture`, which leaves the forward its hidden states (the form "add").

Shapes: B batch, T tokens, D hidden size.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence

import torch
from torch import nn

from .depth_attention import DepthReader, statistics_dtype
from .sequence_shards import SequenceShards, gather, shard_sequence, take_own


def add_output(running_sum_BTD: torch.Tensor | None, output_BTD: torch.Tensor) -> torch.Tensor:
    """Add a sublayer's output to the running sum of its block, or open one with it.

    The sum is kept in the statistics dtype: rounding it to bf16 after every sublayer would cost more than all else.
    """
    if running_sum_BTD is None:
        return output_BTD
    dtype = statistics_dtype(running_sum_BTD.dtype)
    if running_sum_BTD.dtype != dtype:
        running_sum_BTD = running_sum_BTD.to(dtype)
    return running_sum_BTD + output_BTD


def version_of(tensor: torch.Tensor) -> int | None:
    """Return a number that changes with every write to the tensor, or `None` where torch keeps none."""
    if torch.compiler.is_compiling() or tensor.is_inference():
        return None
    return tensor._version


# --------------------------------------------------------------------------------------------------- between the layers


class DepthPass:
    """What decoder layers call in one forward pass. It closes blocks; a subclass knows what travels between layers.

    Args:
        reader: how depth is read; it is given each block as it closes.

    Attributes:
        last_layer: the decoder layer after which the output site is read.
        output_gain: what the output site's mixture is multiplied by.
        depth_weights: the weights of the sites read so far, where they are wanted, or `None`.
        sequence_mesh: the ranks that share the sequence, where prefill is sharded over it, or `None`.
        shards: the tokens that this rank has of the sequence, or `None`: all of them.
    """

    last_layer: nn.Module | None = None
    output_gain: float = 1
    depth_weights: list[torch.Tensor] | None = None
    sequence_mesh: torch.distributed.DeviceMesh | None = None
    shards: SequenceShards | None = None

    def __init__(self, reader: DepthReader):
        self.reader, self.layout = reader, reader.layout
        self._has_gradients = torch.is_grad_enabled()
        self._entered: dict[int, bool] = {}  # the layers that have run, each with whether gradients were on then
        self._is_read = False  # whether the output site has been read

    def enter_layer(self, layer: int, hidden_states_BTD: torch.Tensor) -> torch.Tensor | None:
        """Close the block that ends where this layer starts one, and return what the layer's forward goes on with.

        Layers that a user took out or replaced by a module that returns its input add nothing: what they would have
        closed are zero vectors, so that a port then computes what its source does without the same layers.

        Args:
            layer: the index of the decoder layer.
            hidden_states_BTD: what the layer was given, after its hooks.

        Returns:
            The residual stream (form "add"), or the running sum, or `None` where the layer opens a block.

        Raises:
            RuntimeError: a later layer has run already.
        """
        raise NotImplementedError

    def inputs_for(self, layer: int) -> tuple:
        """Return what the layer's two reads need beside what `enter_layer` returns: tensors, made of closed blocks."""
        raise NotImplementedError

    def stream_maker(self) -> Callable:
        """Return what makes a layer's stream of the results of `enter_layer` and `inputs_for`; it holds no tensor."""
        reader, keep_weights = self.reader, self.depth_weights is not None
        how = reader.read, reader.dtype, self.layout.full, keep_weights, self.shards
        return functools.partial(self.stream_class(), *how)

    @staticmethod
    def stream_class() -> type[LayerStream]:
        """Return the class of a layer's stream."""
        raise NotImplementedError

    def leave_layer(self, running_sum_BTD: torch.Tensor, kept_apart: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Take what a layer made, and return what the layer returns, in the model's dtype.

        Args:
            running_sum_BTD: what its stream ended with.
            kept_apart: what closed within the layer (in Full mode, after its attention).
        """
        raise NotImplementedError

    def read_output(self, hidden_states_BTD: torch.Tensor) -> torch.Tensor:
        """Read the output site: what the final norm is given, `[B, T, D]` in the model's dtype."""
        raise NotImplementedError

    def hand_on(self, layer: int, hidden_states_BTD: torch.Tensor) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        """Return what the layers from this one on continue with in another pass: closed blocks and the running sum.

        Args:
            layer: the index of the first of them.
            hidden_states_BTD: what the layer before it returned.
        """
        raise NotImplementedError

    def resume(self, blocks_BTD: Sequence[torch.Tensor], running_sum_BTD: torch.Tensor) -> torch.Tensor:
        """Begin with what another pass handed on, and return the hidden states that the next layer is given."""
        raise NotImplementedError

    def _advance(self, layer: int, running_sum_BTD: torch.Tensor) -> bool:
        """Close what closes where the layer starts; say whether anything did."""
        if self._is_read and layer not in self._entered:
            raise RuntimeError(
                f"Decoder layer {layer} runs after the output site was read: this family's model runs all its layers, "
                "whatever config.num_hidden_layers says. Cut model.layers, too."
            )
        self._entered.setdefault(layer, torch.is_grad_enabled())
        closed_after = self.layout.closed_blocks(2 * layer)
        self._go_back(layer, closed_after - 1 if self.layout.opens_block(layer) else closed_after)
        # Too few blocks: the running sum closes here. If the layer opens none, the one that does was taken out.
        return self._close_until(closed_after, running_sum_BTD)

    def _go_back(self, layer: int, count: int) -> None:
        """Drop what has closed beyond `count` blocks: the layer runs again, which only the backward pass may do."""
        if self.reader.num_blocks > count:
            if torch._C._current_graph_task_id() == -1:  # no backward pass is running
                raise RuntimeError(
                    f"Decoder layer {layer} runs after {self.reader.num_blocks} blocks have closed, expected {count}: "
                    "decoder layers must run in their order, each at most once."
                )
            if self._has_gradients and not self._entered.get(layer, True):
                raise RuntimeError(
                    f"Decoder layer {layer} is recomputed by reentrant checkpointing around it, which loses the "
                    "gradients of closed blocks. Use use_reentrant=False, or model.gradient_checkpointing_enable()."
                )
            self._drop_blocks(count)

    def _drop_blocks(self, count: int) -> None:
        self.reader.drop_blocks(count)

    def _close_until(self, count: int, running_sum_BTD: torch.Tensor) -> bool:
        """Close blocks until there are `count`: the running sum, then zeros. Say whether there was one to close."""
        missing = count - self.reader.num_blocks
        for index in range(missing):
            self._close(running_sum_BTD if index == 0 else torch.zeros_like(running_sum_BTD))
        return missing > 0

    def _close(self, block_BTD: torch.Tensor) -> None:
        self.reader.append(block_BTD)

    def _keep_weights(self, weights_BTN: torch.Tensor | None) -> None:
        if self.depth_weights is not None:
            self.depth_weights.append(gather(self.shards, weights_BTN))


class ReplacePass(DepthPass):
    """The paper's form: layers return the running sum of their block, in Full mode their MLP's output."""

    def __init__(self, reader: DepthReader):
        super().__init__(reader)
        self.running_sum: torch.Tensor | None = None  # as it was before the last layer rounded and returned it
        self.handed_over: tuple[torch.Tensor, int | None] | None = None  # what it returned, and that tensor's version
        self.opened: tuple[int, torch.Tensor] | None = None  # the last layer that opened a block, and what it was given
        self._unrounded: set[int] = set()  # the layers that were given a sum that was not rounded

    def enter_layer(self, layer: int, hidden_states_BTD: torch.Tensor) -> torch.Tensor | None:
        running_sum_BTD = self._take_running_sum(layer, hidden_states_BTD)
        opens = self.layout.opens_block(layer)
        if opens:
            self.opened = layer, hidden_states_BTD
        if self._advance(layer, running_sum_BTD):
            return None if opens else torch.zeros_like(running_sum_BTD)
        return running_sum_BTD

    def inputs_for(self, layer: int) -> tuple:
        return self.reader.inputs_for(2 * layer), self.reader.inputs_for(2 * layer + 1)

    @staticmethod
    def stream_class() -> type[LayerStream]:
        return ResidualStream

    def leave_layer(self, running_sum_BTD: torch.Tensor, kept_apart: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        for block_BTD in kept_apart:
            self._close(block_BTD)
        rounded_BTD = running_sum_BTD.to(self.reader.dtype)
        if rounded_BTD.itemsize < running_sum_BTD.itemsize:  # keep what rounding cuts off, for the next layer
            self.running_sum, self.handed_over = running_sum_BTD, (rounded_BTD, version_of(rounded_BTD))
        return rounded_BTD

    def read_output(self, hidden_states_BTD: torch.Tensor) -> torch.Tensor:
        site, self._is_read = self.layout.num_sites - 1, True
        running_sum_BTD = self._take_running_sum(self.layout.num_layers, hidden_states_BTD)
        if self._close_until(self.layout.closed_blocks(site), running_sum_BTD):  # the last layers were taken out
            running_sum_BTD = torch.zeros_like(running_sum_BTD)
        mixture_BTD, weights_BTN = self.reader.read(running_sum_BTD, self.reader.inputs_for(site))
        self._keep_weights(weights_BTN)
        if self.output_gain != 1:
            mixture_BTD = mixture_BTD * self.output_gain
        return gather(self.shards, mixture_BTD.to(self.reader.dtype))

    def hand_on(self, layer: int, hidden_states_BTD: torch.Tensor) -> tuple[Sequence[torch.Tensor], torch.Tensor]:
        running_sum_BTD = self._take_running_sum(layer, hidden_states_BTD)
        return self.reader.blocks, running_sum_BTD

    def resume(self, blocks_BTD: Sequence[torch.Tensor], running_sum_BTD: torch.Tensor) -> torch.Tensor:
        self.reader.start(blocks_BTD[0])  # the embedding
        for block_BTD in blocks_BTD:
            self._close(block_BTD)
        return self.leave_layer(running_sum_BTD)

    def _take_running_sum(self, layer: int, hidden_states_BTD: torch.Tensor) -> torch.Tensor:
        """Return the running sum as the layer before made it, or as hooks or other modules changed it since.

        A bf16 layer returns it rounded. Where that value is what arrives here, the part that rounding cut off is put
        back; gradients flow through the tensor that arrives, so that whoever holds it sees its gradient.
        """
        reader, given_BTD = self.reader, hidden_states_BTD
        if reader.dtype is None:  # the first layer is given the embedding
            self.shards = shard_sequence(self.sequence_mesh, given_BTD)
            hidden_states_BTD = take_own(self.shards, given_BTD)
            reader.start(hidden_states_BTD)
            return hidden_states_BTD
        hidden_states_BTD = take_own(self.shards, given_BTD)  # whole where a hook put the embedding
        if hidden_states_BTD.device != reader.scaled_eps.device:
            reader.move_to(hidden_states_BTD.device)
            if self.running_sum is not None:
                self.running_sum = self.running_sum.to(hidden_states_BTD.device)
        running_sum_BTD, self.running_sum = self.running_sum, None
        # A hook replaced the output of the layer that opened the block by its input, which lies in closed blocks: the
        # layer adds nothing. In Full mode its attention, which has closed, adds nothing either.
        if self.opened is not None and self.opened[0] < layer and given_BTD is self.opened[1]:
            zeros_BTD = torch.zeros_like(hidden_states_BTD)
            if self.layout.full:
                self._drop_blocks(reader.num_blocks - 1)
                self._close(zeros_BTD)
            return zeros_BTD
        # A layer that is recomputed from outside: what rounding cut off is gone, the dtype is that of the first time
        if layer in self._entered:
            return hidden_states_BTD.to(reader.scaled_eps.dtype) if layer in self._unrounded else hidden_states_BTD
        if running_sum_BTD is None:  # rounding cut nothing off
            return hidden_states_BTD
        self._unrounded.add(layer)
        # Another tensor than was returned, or a changed one: take what is new of it, entry by entry.
        returned_BTD, version = self.handed_over
        if hidden_states_BTD is not returned_BTD or version is None or version != version_of(returned_BTD):
            with torch.no_grad():
                untouched_BTD = hidden_states_BTD == running_sum_BTD.to(reader.dtype)
                running_sum_BTD = torch.where(untouched_BTD, running_sum_BTD, hidden_states_BTD)
        # The value of the unrounded sum, with the gradient of the tensor that arrived.
        if hidden_states_BTD.requires_grad:
            running_sum_BTD = hidden_states_BTD + (running_sum_BTD - hidden_states_BTD).detach()
        return running_sum_BTD


class AddPass(DepthPass):
    """The form "add": layers return the standard residual stream; a block is what it changed in the stream.

    So whatever a family does before it adds an output (post-norms, multipliers), and whatever hooks add, is in it. The
    null source, a learned vector, is the first block.
    """

    def __init__(self, reader: DepthReader):
        super().__init__(reader)
        # The stream where each block closed; only the backward pass, which recomputes layers, goes back in it.
        self._closed_at: list[torch.Tensor] = []
        self._first_layer: int | None = None  # 0, unless it was taken out

    def enter_layer(self, layer: int, hidden_states_BTD: torch.Tensor) -> torch.Tensor:
        reader = self.reader
        if reader.dtype is None:  # the first layer is given the embedding
            reader.start(hidden_states_BTD)
            self._first_layer = layer
        if layer == self._first_layer:
            self._go_back(layer, 0)
            reader.append(reader.parameters.null_D.expand(hidden_states_BTD.shape))
        if hidden_states_BTD.device != reader.scaled_eps.device:
            reader.move_to(hidden_states_BTD.device)
        self._advance(layer, hidden_states_BTD)
        return hidden_states_BTD

    def inputs_for(self, layer: int) -> tuple:
        return tuple(self._inputs_of(site) for site in (2 * layer, 2 * layer + 1))

    @staticmethod
    def stream_class() -> type[LayerStream]:
        return AddedMixture

    def _inputs_of(self, site: int) -> tuple:
        return self.reader.parameters.gates_SD[site], self.reader.inputs_for(site)

    def leave_layer(self, running_sum_BTD: torch.Tensor, kept_apart: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        for stream_BTD in kept_apart:
            self._close(stream_BTD)
        return running_sum_BTD

    def read_output(self, hidden_states_BTD: torch.Tensor) -> torch.Tensor:
        site, self._is_read = self.layout.num_sites - 1, True
        self._close_until(self.layout.closed_blocks(site), hidden_states_BTD)  # where the last layers were taken out
        running_sum_BTD = self._since_last_close(hidden_states_BTD) if self.layout.reads_running_sum(site) else None
        gate_D, inputs = self._inputs_of(site)
        mixture_BTD, weights_BTN = self.reader.read(running_sum_BTD, inputs)
        self._keep_weights(weights_BTN)
        return torch.addcmul(hidden_states_BTD, gate_D, mixture_BTD).to(self.reader.dtype)

    def _since_last_close(self, stream_BTD: torch.Tensor) -> torch.Tensor:
        """Return what has been added to the stream since a block closed."""
        return difference(stream_BTD, self._closed_at[-1]) if self._closed_at else stream_BTD

    def _drop_blocks(self, count: int) -> None:
        super()._drop_blocks(count)
        del self._closed_at[max(count - 1, 0) :]  # the null source closed nowhere

    def _close_until(self, count: int, stream_BTD: torch.Tensor) -> bool:
        missing = count - self.reader.num_blocks
        for _ in range(missing):  # after the first nothing has been added since
            self._close(stream_BTD)
        return missing > 0

    def _close(self, stream_BTD: torch.Tensor) -> None:
        self.reader.append(self._since_last_close(stream_BTD))
        if not self._has_gradients:
            self._closed_at.clear()
        self._closed_at.append(stream_BTD)


def difference(stream_BTD: torch.Tensor, earlier_BTD: torch.Tensor) -> torch.Tensor:
    """Return what was added to the stream, in the statistics dtype."""
    dtype = statistics_dtype(stream_BTD.dtype)
    return stream_BTD.to(dtype) - earlier_BTD.to(stream_BTD.device, dtype)


# ------------------------------------------------------------------------------------------------------- within a layer

_NOT_PRE_NORM = (
    "the layer does something else with it than a norm's read and the addition of a sublayer's output before each "
    'sublayer, so depth attention cannot take its place in this family. attn_res_form="add", which leaves the residual '
    "stream as it is, can go with it."
)


class LayerStream:
    """What reads depth within one call of one layer; what goes in and what comes out are tensors.

    Args:
        read: the reader's `read`.
        dtype: what the sublayers compute in.
        full: keep the two sublayers' outputs apart.
        keep_weights: keep the depth weights of its reads.
        shards: the tokens that this rank has of a sharded sequence, or `None`.
        running_sum: what `DepthPass.enter_layer` returned `[B, T, D]`, or `None`.
        inputs: what `DepthPass.inputs_for` gave for the layer's two sites.
    """

    def __init__(
        self,
        read: Callable,
        dtype: torch.dtype,
        full: bool,
        keep_weights: bool,
        shards: SequenceShards | None,
        running_sum: torch.Tensor | None,
        inputs: tuple,
    ):
        self._read, self._dtype, self._full, self._keep_weights = read, dtype, full, keep_weights
        self._shards = shards
        self.running_sum, self._inputs = running_sum, inputs
        self.kept_apart: list[torch.Tensor] = []
        self.weights: list[torch.Tensor] = []
        self.num_reads = self.num_outputs = 0


class ResidualStream(LayerStream):
    """What the forward of a base family's layer is given as hidden states, in the paper's form.

    A pre-norm layer does two things with them, and this supports no more: a norm reads them, and the sublayer's output
    is added. `running_sum` is the sum of the block so far, or `None` where the layer opens a block.
    """

    @property
    def hidden_states(self) -> ResidualStream:
        """What the layer's forward is given."""
        return self

    def read(self, hidden_states: object, name: str, sublayer: int, gain: float) -> torch.Tensor:
        """Return the input of the next sublayer `[B, T, D]`, times `gain`."""
        if hidden_states is not self:
            raise TypeError(f"{name} reads something else than the residual stream: {_NOT_PRE_NORM}")
        mixture_BTD, weights_BTN = self._read(self.running_sum, self._inputs[self.num_reads])
        self.num_reads += 1
        if self._keep_weights:
            self.weights.append(gather(self._shards, weights_BTN))
        if gain != 1:
            mixture_BTD = mixture_BTD * gain
        return gather(self._shards, mixture_BTD.to(self._dtype))

    def add(self, output_BTD: torch.Tensor) -> ResidualStream:
        """Take a sublayer's output."""
        self.num_outputs += 1
        if self.num_outputs != self.num_reads:
            raise TypeError(
                f"two outputs added after one read of the residual stream (parallel blocks): {_NOT_PRE_NORM}"
            )
        output_BTD = take_own(self._shards, output_BTD)
        if self._full and self.running_sum is not None:
            self.kept_apart.append(self.running_sum)
            self.running_sum = output_BTD
        else:
            self.running_sum = add_output(self.running_sum, output_BTD)
        return self

    def finish(self, result: object, layer_class: type) -> torch.Tensor:
        """Return the new running sum, once the forward returned the stream."""
        if result is not self or self.num_outputs != 2:
            raise TypeError(f"{layer_class.__name__}: expected two sublayers around one residual stream.")
        return self.running_sum

    __add__ = __radd__ = add

    @classmethod
    def __torch_function__(cls, function: Callable, types, args: tuple = (), kwargs=None):
        """Take `tensor + stream`, and `stream + tensor` under torch.compile: operations on tensors, which call this."""
        if function.__name__ not in ("add", "__add__", "__radd__"):
            raise TypeError(f"{function.__name__} of the residual stream: {_NOT_PRE_NORM}")
        left, right = args
        return left.add(right) if isinstance(left, ResidualStream) else right.add(left)

    def __getattr__(self, name: str):
        raise TypeError(f"{name} of the residual stream: {_NOT_PRE_NORM}")

    def __mul__(self, other):
        raise TypeError(f"a multiple or a part of the residual stream: {_NOT_PRE_NORM}")

    __rmul__ = __imul__ = __getitem__ = __mul__


class AddedMixture(LayerStream):
    """How the two sublayers of a layer read its hidden states in the form "add".

    `running_sum` is here the residual stream; the inputs of each site are its gate, `[D]`, and what the reader gave.
    """

    @property
    def hidden_states(self) -> torch.Tensor:
        """What the layer's forward is given."""
        return self.running_sum

    def read(self, stream_BTD: torch.Tensor, name: str, sublayer: int, gain: float) -> torch.Tensor:
        """Return stream + gate × mixture."""
        if sublayer == 0 and stream_BTD is not self.hidden_states:
            raise TypeError(
                f"{name} reads something else than the layer's hidden states (a norm is before it): name the family's "
                "norms with register_family_parts."
            )
        gate_D, inputs = self._inputs[sublayer]
        running_sum_BTD = None
        if self._full and sublayer == 1:  # what attention added is a source of its own
            if stream_BTD is self.hidden_states:
                raise TypeError(
                    f"{name} reads the residual stream before attention has added to it (parallel blocks): in Full "
                    'mode their outputs cannot be told apart. Use attn_res_mode="block".'
                )
            running_sum_BTD = difference(stream_BTD, self.hidden_states)
            self.kept_apart.append(stream_BTD)
        mixture_BTD, weights_BTN = self._read(running_sum_BTD, inputs)
        self.num_reads += 1
        if self._keep_weights:
            self.weights.append(weights_BTN)
        return torch.addcmul(stream_BTD, gate_D, mixture_BTD).to(self._dtype)

    def finish(self, result: object, layer_class: type) -> torch.Tensor:
        """Return the new residual stream, which the forward returned."""
        if self.num_reads != 2:
            raise TypeError(
                f"{layer_class.__name__}: expected two reads of the residual stream, found {self.num_reads}."
            )
        return result


class LayerElsewhere(nn.Module):
    """Stands for a decoder layer that another pipeline stage runs: the model's forward passes through it."""

    def forward(self, hidden_states_BTD: torch.Tensor, *args, depth_pass: DepthPass | None = None, **kwargs):
        """Return what it is given."""
        return hidden_states_BTD


class LayerView:
    """A base family's layer as its own forward sees it (`self`): what reads the residual stream reads depth, too."""

    forward = None  # transformers' wrapper of a layer's forward looks it up in the class

    def __init__(self, layer: nn.Module, stream: LayerStream):
        self.layer, self.stream = layer, stream

    def __getattr__(self, name: str):
        value = self.layer._modules.get(name)  # faster than the layer's own __getattr__
        if value is None:
            return getattr(self.layer, name)
        how = self.layer.reads.get(name)
        if how is None:
            return value
        stream = self.stream

        def read_and_run(hidden_states, *args, **kwargs):
            return value(stream.read(hidden_states, name, *how), *args, **kwargs)

        return read_and_run
