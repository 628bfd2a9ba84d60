# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Depth attention: what a sublayer reads from the embedding and the layers before it, token by token.

Attention Residuals (Kimi Team, arXiv 2603.15031) replace the residual sum x_0 + v_1 + … + v_{l-1} by a softmax over the
*sources*: the embedding and earlier sublayer outputs (Full), or their sums over blocks of layers (Block). Sublayer l
has one learned *pseudo-query* w_l; keys and values are the sources themselves, only the key is RMS-normalised:

    input_l = Σ_i softmax_i( w_l · RMSNorm(source_i) ) · source_i

In this file, in the order to read it:
    - `depth_read`: the formula above, written as in the paper. Everything else is this, made cheaper.
    - `DepthAttention`: the parameters, one query and one norm weight per site.
    - `DepthReader`: the interface between a model and the way it reads over depth. A reader lives for one forward
      pass: it is given each block as it closes, and returns what a site reads. `register_depth_reader` adds one.
    - `EagerReader`: the plain reader; tests compare those for training and inference (`depth_readers.py`) with it.
No model family is known here.

Words, ours = Kimi K3's = flash-linear-attention's:
    running sum  = prefix_sum      = the last of `residuals`     what the block's sublayers have added so far
    block        = block_residual  = the others of `residuals`   a finished block's sum; the first is the embedding
    query, norm  = res_proj, res_norm = query, rms_weight        the two parameters of a site
    site         = one read: 2l is the attention of decoder layer l, 2l + 1 its MLP, 2L the output (the final norm)

Shapes: B batch, T tokens, D hidden size, L decoder layers, S = 2L + 1 sites, N closed blocks.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from typing import ClassVar, NamedTuple

import torch
from torch import nn
from transformers import initialization as init


def depth_read(
    sources: list[torch.Tensor], query_D: torch.Tensor, norm_D: torch.Tensor, eps: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Read as the paper writes it: stack, normalise the keys, softmax over depth, weighted sum.

    Args:
        sources: the N sources a site reads, each `[B, T, D]`: closed blocks first, the running sum last.
        query_D: the pseudo-query w.
        norm_D: the key norm's weight γ.
        eps: the key norm's epsilon.

    Returns:
        The site's input `[B, T, D]` in the dtype of the sources, and its depth weights `[B, T, N]`.

    Example:
        import torch
        from modeling_attnres import depth_read

        sources = [torch.randn(2, 5, 16) for _ in range(3)]  # batch 2, 5 tokens, width 16
        mixed, weights = depth_read(sources, query_D=torch.zeros(16), norm_D=torch.ones(16), eps=1e-6)
        assert torch.allclose(mixed, sum(sources) / 3)  # a zero query reads the mean
    """
    values_NBTD = torch.stack(sources)
    # keys: RMSNorm(source)
    keys_NBTD = values_NBTD.to(statistics_dtype(values_NBTD.dtype))
    keys_NBTD = keys_NBTD * torch.rsqrt(keys_NBTD.square().mean(-1, keepdim=True) + eps) * norm_D
    # softmax over the sources, then their weighted sum
    weights_NBT = torch.einsum("d,nbtd->nbt", query_D.to(keys_NBTD.dtype), keys_NBTD).softmax(dim=0)
    mixed_BTD = torch.einsum("nbt,nbtd->btd", weights_NBT, values_NBTD.to(weights_NBT.dtype))
    return mixed_BTD.to(values_NBTD.dtype), weights_NBT.movedim(0, -1)


def statistics_dtype(dtype: torch.dtype) -> torch.dtype:
    """Return the dtype of norms, logits, softmax and running sums: fp32, or fp64 where the sources are fp64."""
    return torch.promote_types(dtype, torch.float32)


def autocast_off(x: torch.Tensor):
    """Return a context without autocast: an empty one where it is off already, which is cheaper to enter."""
    device = x.device.type
    if torch.amp.is_autocast_available(device) and torch.is_autocast_enabled(device):
        return torch.autocast(device, enabled=False)
    return nullcontext()


class DepthAttention(nn.Module):
    """The parameters of depth attention for the whole model: a pseudo-query w and a key norm γ per site.

    | name in memory and on disk | shape  | dtype | at the start |
    |----------------------------|--------|-------|--------------|
    | `model.attn_res.query`     | [S, D] | fp32  | 0            |
    | `model.attn_res.norm`      | [S, D] | fp32  | 1            |

    One module at the root of the model: a block's queries are needed together, PEFT trains them by one name, and small
    steps of a vector that starts at zero are not rounded away. Zero queries and unit norms read the plain mean of the
    sources. Row 0 has no effect: the first sublayer has one source.
    """

    def __init__(self, num_sites: int, hidden_size: int):
        super().__init__()
        self.query = nn.Parameter(torch.empty(num_sites, hidden_size, dtype=torch.float32))
        self.norm = nn.Parameter(torch.empty(num_sites, hidden_size, dtype=torch.float32))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Set the queries to zero and the norms to one, unless they were loaded."""
        init.zeros_(self.query)
        init.ones_(self.norm)

    def forward(self) -> torch.Tensor:
        """Return the effective queries √D · w ⊙ γ of all sites, `[S, D]`.

        The norm's weight only ever appears in the product w · (γ ⊙ x / rms(x)), so it is folded into the query, and so
        is the √D between |x| and rms(x).
        """
        return self.query * self.norm * self.query.shape[-1] ** 0.5

    def _apply(self, fn, recurse: bool = True):
        """Move like any module, but stay in fp32: `model.half()` or `.to(torch.bfloat16)` would lose small queries."""

        def apply_without_narrowing(tensor: torch.Tensor) -> torch.Tensor:
            applied = fn(tensor)
            narrowed = applied.is_floating_point() and applied.dtype.itemsize < tensor.dtype.itemsize
            return tensor.to(applied.device, statistics_dtype(applied.dtype)) if narrowed else applied

        return super()._apply(apply_without_narrowing, recurse)


def is_depth_parameter(name: str) -> bool:
    """Say whether a parameter or tensor is one of depth attention's, by its name; the model may be wrapped."""
    return "attn_res" in name.split(".")


def inverse_size(x_BTD: torch.Tensor, scaled_eps: torch.Tensor) -> torch.Tensor:
    """Return 1 / √(|x|² + D · eps), `[B, T, 1]`, where `scaled_eps` is D · eps: the key norm without its √D.

    The effective queries carry the √D.
    """
    norm_BT1 = torch.linalg.vector_norm(x_BTD, dim=-1, keepdim=True, dtype=scaled_eps.dtype)
    return torch.addcmul(scaled_eps, norm_BT1, norm_BT1).rsqrt_()


def source_logits(x_BTD: torch.Tensor, queries_SD: torch.Tensor, scaled_eps: torch.Tensor) -> torch.Tensor:
    """Return the logits `[B, T, S]` of one source at S sites: w · RMSNorm(x), the norm applied to the product.

    Unlike attention over tokens it has no 1/√D. Computed in the queries' dtype (fp32 or fp64), under autocast too.
    """
    with autocast_off(x_BTD):
        return torch.matmul(x_BTD.to(queries_SD.dtype), queries_SD.t()) * inverse_size(x_BTD, scaled_eps)


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


class DepthReader:
    """How depth is read: one object per forward pass, chosen by `attn_res_implementation`.

    A reader implements `blocks`, `append`, `drop_blocks`, `inputs_for` and `read`, and extends `move_to`. The base
    class closes blocks and carries the running sum from layer to layer. A read is split in two, so that a decoder layer
    can be recomputed, wrapped or offloaded: `inputs_for` is called outside of it, once; `read` maps tensors to tensors.

    Args:
        queries_SD: the effective queries of all sites.
        eps: the key norm's epsilon.
        layout: which site reads which sources (`BlockLayout`).

    Attributes:
        gives_gradients, gives_weights, exports, transforms: what this reader can do. `gives_weights`: `read` returns
            depth weights; `exports`: it can be traced with a dynamic number of tokens; `transforms`: `torch.func` can
            map and differentiate it.
        last_layer: the decoder layer after which the output site is read.
        output_gain: what the output site's mixture is multiplied by.
        depth_weights: the weights of the sites read so far, where they are wanted, or `None`.
    """

    last_layer: nn.Module | None = None
    output_gain: float = 1
    depth_weights: list[torch.Tensor] | None = None
    gives_gradients: ClassVar[bool] = True
    gives_weights: ClassVar[bool] = False
    exports: ClassVar[bool] = True
    transforms: ClassVar[bool] = True

    def __init__(self, queries_SD: torch.Tensor, eps: float, layout):
        self.queries_SD, self.eps, self.layout = queries_SD, eps, layout
        self.dtype: torch.dtype | None = None  # of the embedding: what sublayers are given and layers return
        self.running_sum: torch.Tensor | None = None  # as it was before the last layer rounded and returned it
        self.handed_over: tuple[torch.Tensor, int | None] | None = None  # what it returned, and that tensor's version
        self.opened: tuple[int, torch.Tensor] | None = None  # the last layer that opened a block, and what it was given

    # ------------------------------------------------------------------------------- what a reader implements

    @property
    def num_blocks(self) -> int:
        """The number of closed blocks."""
        return len(self.blocks)

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """The closed blocks `[B, T, D]`, the embedding first."""
        raise NotImplementedError

    def append(self, block_BTD: torch.Tensor) -> None:
        """Take a closed block: the embedding, a finished block's sum, or (Full) one sublayer's output."""
        raise NotImplementedError

    def drop_blocks(self, count: int) -> None:
        """Forget all closed blocks but the first `count`: the layers after them are about to be recomputed."""
        raise NotImplementedError

    def inputs_for(self, site: int) -> NamedTuple:
        """Return what `read` needs at a site beside the running sum: named tensors, made of the blocks so far."""
        raise NotImplementedError

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs) -> tuple[torch.Tensor, torch.Tensor | None]:
        """Read one site.

        Args:
            running_sum_BTD: the running sum, or `None` at a site that opens a block.
            inputs: what `inputs_for` gave for the site.

        Returns:
            The site's input `[B, T, D]`, not yet rounded to the model's dtype, and its depth weights `[B, T, sources]`,
            the running sum's last, or `None` from a reader that does not give them.
        """
        raise NotImplementedError

    def move_to(self, device: torch.device) -> None:
        """Move everything held: a model spread over devices continues where its newest hidden state is."""
        self.queries_SD, self.scaled_eps = self.queries_SD.to(device), self.scaled_eps.to(device)
        if self.running_sum is not None:
            self.running_sum = self.running_sum.to(device)

    # ---------------------------------------------------------------------------- what a decoder layer calls

    def enter_layer(self, layer: int, hidden_states_BTD: torch.Tensor) -> torch.Tensor | None:
        """Close the block that ends where this layer starts one, and return the running sum its attention reads.

        Layers that a user took out or replaced by a module that returns its input add nothing: what they would have
        closed are zero vectors, so that a port then computes what its source does without the same layers.

        Args:
            layer: the index of the decoder layer.
            hidden_states_BTD: what the layer was given, after its hooks.

        Returns:
            The running sum, or `None` where the layer opens a block.

        Raises:
            RuntimeError: a later layer has run already.
        """
        running_sum_BTD = self._take_running_sum(layer, hidden_states_BTD)
        opens = self.layout.opens_block(layer)
        closed_after = self.layout.closed_blocks(2 * layer)
        closed_before = closed_after - 1 if opens else closed_after
        if opens:
            self.opened = layer, hidden_states_BTD
        # Too many blocks: the layer runs again, which only the backward pass may do, to recompute it.
        if self.num_blocks > closed_before:
            if torch._C._current_graph_task_id() == -1:  # no backward pass is running
                raise RuntimeError(
                    f"Decoder layer {layer} runs after {self.num_blocks} blocks have closed, expected "
                    f"{closed_before}: decoder layers must run in their order, each at most once."
                )
            self.drop_blocks(closed_before)
        # Too few: the running sum closes here. If the layer opens no block, the one that does was taken out.
        if self._close_until(closed_after, running_sum_BTD):
            return None if opens else torch.zeros_like(running_sum_BTD)
        return running_sum_BTD

    def leave_layer(self, running_sum_BTD: torch.Tensor, kept_apart: Sequence[torch.Tensor] = ()) -> torch.Tensor:
        """Carry the running sum to the next layer, and return what the layer returns: the same in the model's dtype.

        Args:
            running_sum_BTD: the sum of the block so far; in Full mode the MLP's output.
            kept_apart: sources that closed within the layer; in Full mode the attention's output.
        """
        for block_BTD in kept_apart:
            self.append(block_BTD)
        rounded_BTD = running_sum_BTD.to(self.dtype)
        if rounded_BTD is not running_sum_BTD:  # keep what rounding cuts off, for the next layer
            self.running_sum, self.handed_over = running_sum_BTD, (rounded_BTD, version_of(rounded_BTD))
        return rounded_BTD

    def read_output(self, hidden_states_BTD: torch.Tensor) -> torch.Tensor:
        """Read the output site: what the final norm is given, `[B, T, D]` in the model's dtype."""
        site = self.layout.num_sites - 1
        running_sum_BTD = self._take_running_sum(self.layout.num_layers, hidden_states_BTD)
        if self._close_until(self.layout.closed_blocks(site), running_sum_BTD):  # the last layers were taken out
            running_sum_BTD = torch.zeros_like(running_sum_BTD)
        mixture_BTD, weights_BTN = self.read(running_sum_BTD, self.inputs_for(site))
        if self.depth_weights is not None:
            self.depth_weights.append(weights_BTN)
        if self.output_gain != 1:
            mixture_BTD = mixture_BTD * self.output_gain
        return mixture_BTD.to(self.dtype)

    def _take_running_sum(self, layer: int, hidden_states_BTD: torch.Tensor) -> torch.Tensor:
        """Return the running sum as the layer before made it, or as hooks or other modules changed it since.

        A bf16 layer returns it rounded. Where that value is what arrives here, the part that rounding cut off is put
        back; gradients flow through the tensor that arrives, so that whoever holds it sees its gradient.
        """
        # The first layer is given the embedding: the pass takes its dtype and device.
        if self.dtype is None:
            self.dtype = hidden_states_BTD.dtype
            self.queries_SD = self.queries_SD.to(hidden_states_BTD.device, statistics_dtype(self.dtype))
            self.scaled_eps = self.queries_SD.new_tensor(self.queries_SD.shape[-1] * self.eps)
            return hidden_states_BTD
        if hidden_states_BTD.device != self.queries_SD.device:
            self.move_to(hidden_states_BTD.device)
        running_sum_BTD, self.running_sum = self.running_sum, None
        # A hook replaced the output of the layer that opened the block by its input, which lies in closed blocks: the
        # layer adds nothing. In Full mode its attention, which has closed, adds nothing either.
        if self.opened is not None and self.opened[0] < layer and hidden_states_BTD is self.opened[1]:
            zeros_BTD = torch.zeros_like(hidden_states_BTD)
            if self.layout.full:
                self.drop_blocks(self.num_blocks - 1)
                self.append(zeros_BTD)
            return zeros_BTD
        if running_sum_BTD is None:  # rounding cut nothing off
            return hidden_states_BTD
        # Another tensor than was returned, or a changed one: take what is new of it, entry by entry.
        returned_BTD, version = self.handed_over
        if hidden_states_BTD is not returned_BTD or version is None or version != version_of(returned_BTD):
            untouched_BTD = hidden_states_BTD == running_sum_BTD.to(self.dtype)
            running_sum_BTD = torch.where(untouched_BTD, running_sum_BTD, hidden_states_BTD)
        # The value of the unrounded sum, with the gradient of the tensor that arrived.
        if hidden_states_BTD.requires_grad:
            running_sum_BTD = hidden_states_BTD + (running_sum_BTD - hidden_states_BTD).detach()
        return running_sum_BTD

    def _close_until(self, count: int, running_sum_BTD: torch.Tensor) -> bool:
        """Close blocks until there are `count`: the running sum, then zeros. Say whether there was one to close."""
        missing = count - self.num_blocks
        for index in range(missing):
            self.append(running_sum_BTD if index == 0 else torch.zeros_like(running_sum_BTD))
        return missing > 0


_DEPTH_READERS: dict[str, type[DepthReader]] = {}


def register_depth_reader(name: str, reader: type[DepthReader]) -> None:
    """Make a reader available as `attn_res_implementation=name`.

    Raises:
        ValueError: the name is "auto".
        TypeError: `reader` is no subclass of `DepthReader`.

    Example:
        from modeling_attnres import register_depth_reader
        from modeling_attnres.depth_attention import EagerReader

        class MyReader(EagerReader):
            gives_weights = False

        register_depth_reader("mine", MyReader)  # then: model.config.attn_res_implementation = "mine"
    """
    if name == "auto":
        raise ValueError("'auto' chooses among depth readers and cannot be the name of one.")
    if not (isinstance(reader, type) and issubclass(reader, DepthReader)):
        raise TypeError(f"A depth reader must be a subclass of DepthReader, got {reader!r}.")
    _DEPTH_READERS[name] = reader


def check_depth_reader(name: str) -> None:
    """Raise a ValueError unless `name` is `"auto"` or a registered reader's."""
    if not isinstance(name, str) or (name != "auto" and name not in _DEPTH_READERS):
        names = ", ".join(repr(known) for known in ("auto", *_DEPTH_READERS))
        raise ValueError(f"attn_res_implementation must be one of {names}, got {name!r}.")


def choose_depth_reader(name: str, gradients: bool, weights: bool) -> type[DepthReader]:
    """Return the class of the reader for a pass.

    Args:
        name: `"auto"`, which takes the first of `"two_phase"`, `"training"`, `"eager"` that can do what is asked, or a
            registered name, whose reader must be able to.
        gradients: whether a gradient will be asked for.
        weights: whether depth weights are wanted.

    Raises:
        ValueError: there is no reader of this name, or it cannot do what is asked.
    """
    check_depth_reader(name)
    needs = {
        "gives_gradients": gradients,
        "gives_weights": weights,
        "exports": torch.compiler.is_exporting(),
        "transforms": not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active(),
    }
    # Of each reader, what it lacks of what this pass needs
    lacking = {
        known: [need for need, needed in needs.items() if needed and not getattr(reader, need)]
        for known, reader in _DEPTH_READERS.items()
    }
    candidates = ("two_phase", "training", "eager") if name == "auto" else (name,)
    for candidate in candidates:
        if not lacking[candidate]:
            return _DEPTH_READERS[candidate]
    # None can: say what the last candidate lacks, and which readers could
    wanted = {
        "gives_gradients": "gradients",
        "gives_weights": "depth weights",
        "exports": "export",
        "transforms": "torch.func's transforms",
    }[lacking[candidates[-1]][0]]
    choices = " or ".join(repr(known) for known in ("auto", *(known for known in lacking if not lacking[known])))
    raise ValueError(
        f"The depth reader {name!r} does not support {wanted}, which this pass needs. Set "
        f"config.attn_res_implementation to {choices}"
        + (", or run under torch.no_grad()." if wanted == "gradients" else ".")
    )


class EagerInputs(NamedTuple):
    """What a read block by block needs: the site's query, D · eps, the blocks' logits at the site, and the blocks."""

    query_D: torch.Tensor
    scaled_eps: torch.Tensor
    logits_BTN: torch.Tensor
    blocks_BTD: tuple[torch.Tensor, ...]


class EagerReader(DepthReader):
    """The plain reader: block by block, differentiable any number of times, with depth weights.

    Queries do not depend on activations, so when a block closes one matrix product gives its logits at *every* site; no
    site normalises, upcasts or stacks the blocks again.
    """

    gives_weights = True

    def __init__(self, queries_SD: torch.Tensor, eps: float, layout):
        super().__init__(queries_SD, eps, layout)
        self._blocks_BTD: list[torch.Tensor] = []
        self._logits_BT: list[tuple[torch.Tensor, ...]] = []  # a tensor per site, of each block

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        return self._blocks_BTD

    def append(self, block_BTD: torch.Tensor) -> None:
        self._logits_BT.append(source_logits(block_BTD, self.queries_SD, self.scaled_eps).unbind(-1))
        self._blocks_BTD.append(block_BTD.to(self.dtype))  # a sum is rounded once, when it is complete

    def drop_blocks(self, count: int) -> None:
        del self._blocks_BTD[count:], self._logits_BT[count:]

    def inputs_for(self, site: int) -> EagerInputs:
        logits_BTN = torch.stack([logits_BT[site] for logits_BT in self._logits_BT], dim=-1)
        return EagerInputs(self.queries_SD[site], self.scaled_eps, logits_BTN, tuple(self._blocks_BTD))

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs: EagerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        query_D, scaled_eps, logits_BTN, sources_BTD = inputs
        if running_sum_BTD is not None:
            logit_BT1 = source_logits(running_sum_BTD, query_D[None], scaled_eps)
            logits_BTN = torch.cat((logits_BTN, logit_BT1), dim=-1)
            sources_BTD = (*sources_BTD, running_sum_BTD)
        weights_BTN = logits_BTN.softmax(dim=-1)
        return mix(weights_BTN, sources_BTD), weights_BTN

    def move_to(self, device: torch.device) -> None:
        super().move_to(device)
        self._blocks_BTD = [block_BTD.to(device) for block_BTD in self._blocks_BTD]
        self._logits_BT = [tuple(logit_BT.to(device) for logit_BT in logits_BT) for logits_BT in self._logits_BT]


def mix(weights_BTN: torch.Tensor, sources_BTD: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return the weighted sum of N sources, in the statistics dtype by type promotion: none is upcast whole."""
    first_BTD, *rest = sources_BTD
    mixed_BTD = first_BTD * weights_BTN[..., :1]
    for index, source_BTD in enumerate(rest, start=1):
        mixed_BTD.addcmul_(source_BTD, weights_BTN[..., index : index + 1])
    return mixed_BTD


register_depth_reader("eager", EagerReader)
