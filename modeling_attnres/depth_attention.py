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
Then `residual_stream.py`: how a pass of a model closes blocks and carries the running sum from layer to layer. No model
family is known here. Other forms (static weights, queries from the input, …) are read by `depth_forms.py`.

Words, ours = Kimi K3's = flash-linear-attention's:
    running sum  = prefix_sum      = the last of `residuals`     what the block's sublayers have added so far
    block        = block_residual  = the others of `residuals`   a finished block's sum; the first is the embedding
    query, norm  = res_proj, res_norm = query, rms_weight        the two parameters of a site
    site         = one read: 2l is the attention of decoder layer l, 2l + 1 its MLP, 2L the output (the final norm)

Shapes: B batch, T tokens, D hidden size, L decoder layers, S = 2L + 1 sites, N closed blocks. With several heads D is
two axes, H heads × E = D / H, and what is one number per token (logits, weights) has an axis H, too.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass
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
        assert torch.allclose(mixed, sum(sources) / 3, atol=1e-6)  # a zero query reads the mean
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


@dataclass(frozen=True)
class DepthForm:
    """The form of depth attention; the defaults are the paper's. Its fields are those of the config (`attn_res_…`)."""

    additive: bool = False
    heads: int = 1
    query: str = "learned"
    query_rank: int | None = None
    weights: str = "softmax"
    key_norm: bool = True

    @property
    def unusual(self) -> str:
        """What only the reader `"general"` reads, as the config says it; empty where every reader does."""
        fields = {"query": self.query, "weights": self.weights, "key_norm": self.key_norm}
        usual = {"query": "learned", "weights": "softmax", "key_norm": True}
        return ", ".join(f"attn_res_{name}={value!r}" for name, value in fields.items() if value != usual[name])

    def share_at_start(self, num_sources: int) -> int:
        """Return n, where a site of a new model reads its sources' sum / n: by that a port scales its norms' eps."""
        return {"sigmoid": 2, "static_raw": 1}.get(self.weights, num_sources)


class DepthParameters(NamedTuple):
    """What `DepthAttention` gives to a pass; `None` is what the form does not have."""

    queries_SD: torch.Tensor | None = None  # effective queries √D · w ⊙ γ of all sites
    key_gains_SD: torch.Tensor | None = None  # √D · γ, for queries that are made of the input
    query_down_SRD: torch.Tensor | None = None
    query_up_SDR: torch.Tensor | None = None
    static_SN: torch.Tensor | None = None  # logits or weights that no activation changes
    null_D: torch.Tensor | None = None
    gates_SD: torch.Tensor | None = None

    def to(self, device: torch.device, dtype: torch.dtype) -> DepthParameters:
        """Return them on a device, in a dtype."""
        return DepthParameters(*(None if tensor is None else tensor.to(device, dtype) for tensor in self))


class DepthAttention(nn.Module):
    """The parameters of depth attention for the whole model: a pseudo-query w and a key norm γ per site.

    | name in memory and on disk    | shape     | at the start | where                                          |
    |-------------------------------|-----------|--------------|------------------------------------------------|
    | `model.attn_res.query`        | [S, D]    | 0            | queries are learned (the default)              |
    | `model.attn_res.norm`         | [S, D]    | 1            | keys are normalised (the default)              |
    | `model.attn_res.query_up`     | [S, D, R] | 0            | queries are made of the input, by rank R or D  |
    | `model.attn_res.query_down`   | [S, R, D] | random       | … of a rank                                    |
    | `model.attn_res.static`       | [S, N]    | 0, raw: 1    | weights are static; N: the most sources        |
    | `model.attn_res.null`         | [D]       | 0            | form "add": the null source                    |
    | `model.attn_res.gate`         | [S, H]    | 0            | form "add": of the mixture, one per head       |

    All are fp32. One module at the root of the model: a block's queries are needed together, PEFT trains them by one
    name, and small steps of a vector that starts at zero are not rounded away. Zero queries and unit norms read the
    plain mean of the sources. Row 0 has no effect where the first sublayer has one source.

    Attributes:
        sequence_mesh: the ranks that prefill is sharded over (`sequence_shards.py`), or `None`.
    """

    sequence_mesh = None

    def __init__(self, num_sites: int, hidden_size: int, form: DepthForm = DepthForm(), max_sources: int = 1):
        super().__init__()
        self.form = form
        rank = form.query_rank

        def new(*shape: int) -> nn.Parameter:
            return nn.Parameter(torch.empty(shape, dtype=torch.float32))

        if form.weights.startswith("static"):
            self.static = new(num_sites, max_sources)
        elif form.query == "learned":
            self.query = new(num_sites, hidden_size)
        else:
            self.query_up = new(num_sites, hidden_size, rank or hidden_size)
            if rank is not None:
                self.query_down = new(num_sites, rank, hidden_size)
        if form.key_norm and not form.weights.startswith("static"):
            self.norm = new(num_sites, hidden_size)
        if form.additive:
            self.null, self.gate = new(hidden_size), new(num_sites, form.heads)
        self.hidden_size = hidden_size
        self.reset_parameters()

    @classmethod
    def from_config(cls, config) -> DepthAttention:
        """Make that of a model with this config."""
        layout = config.attn_res_layout
        return cls(layout.num_sites, config.hidden_size, config.attn_res_depth_form, layout.max_sources)

    @property
    def moving(self) -> str:
        """The name of the parameter whose start, at every site, makes a port compute what its base does."""
        if self.form.additive:
            return "gate"
        return next(name for name in ("query", "query_up", "static") if name in self._parameters)

    def distance_from_start(self) -> dict[int, float]:
        """Return by site how far its `moving` parameter is from its start; without a first site that has no choice."""
        parameter = getattr(self, self.moving).detach()
        start = 1 if self.form.weights == "static_raw" and not self.form.additive else 0
        distances = torch.linalg.vector_norm((parameter.double() - start).flatten(1), dim=-1).tolist()
        one_source = not self.form.additive and self.form.weights in ("softmax", "static")  # whose weight is 1
        return {site: distance for site, distance in enumerate(distances) if site > 0 or not one_source}

    def reset_parameters(self) -> None:
        """Set each parameter to what it is at the start, unless it was loaded."""
        for name, parameter in self.named_parameters():
            if name == "query_down":
                init.normal_(parameter, std=self.hidden_size**-0.5)
            elif name == "norm" or (name == "static" and self.form.weights == "static_raw"):
                init.ones_(parameter)
            else:
                init.zeros_(parameter)

    def forward(self) -> DepthParameters:
        """Return what a pass reads with.

        The norm's weight only ever appears in the product w · (γ ⊙ x / rms(x)), so it is folded into the query, and so
        is the √D between |x| and rms(x). With heads the queries are `[S, H, E]`.
        """
        # Attributes, for what wraps a module may keep its parameters elsewhere
        names = ("query", "norm", "query_down", "query_up", "static", "null", "gate")
        given = {name: tensor for name in names if (tensor := getattr(self, name, None)) is not None}
        if hasattr(self, "unshard"):  # FSDP2 has made it a module of its own, and frees parameters when this returns
            given = {name: tensor.clone() for name, tensor in given.items()}
        root, heads = self.hidden_size**0.5, self.form.heads
        queries_SD, key_gains_SD, gates_SH = given.get("query"), given.get("norm"), given.get("gate")
        if queries_SD is not None:
            if key_gains_SD is not None:
                queries_SD, key_gains_SD = queries_SD * key_gains_SD * root, None
            if heads > 1:
                queries_SD = queries_SD.unflatten(-1, (heads, -1))
        return DepthParameters(
            queries_SD,
            None if key_gains_SD is None else key_gains_SD * root,
            given.get("query_down"),
            given.get("query_up"),
            given.get("static"),
            given.get("null"),
            None if gates_SH is None else gates_SH.repeat_interleave(self.hidden_size // heads, dim=-1),
        )

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


def split_heads(x_BTD: torch.Tensor, width: torch.Size) -> torch.Tensor:
    """Cut `[B, T, D]` into heads, `[B, T, H, E]`, where `width` is (H, E); leave it where `width` is (D,)."""
    return x_BTD if len(width) == 1 else x_BTD.unflatten(-1, width)


def join_heads(x_BTD: torch.Tensor, width: torch.Size) -> torch.Tensor:
    """Undo `split_heads`."""
    return x_BTD if len(width) == 1 else x_BTD.flatten(-2)


def inverse_size(x_BTD: torch.Tensor, width: torch.Size, scaled_eps: torch.Tensor) -> torch.Tensor:
    """Return 1 / √(|x|² + D · eps), `[B, T, 1]`, where `scaled_eps` is D · eps: the key norm without its √D.

    The effective queries carry the √D. The norm is over the whole width, whatever the heads: then `[B, T, 1, 1]`.
    """
    dims = -1 if len(width) == 1 else (-2, -1)
    norm_BT1 = torch.linalg.vector_norm(x_BTD, dim=dims, keepdim=True, dtype=scaled_eps.dtype)
    return torch.addcmul(scaled_eps, norm_BT1, norm_BT1).rsqrt_()


def query_products(x_BTD: torch.Tensor, queries_SD: torch.Tensor) -> torch.Tensor:
    """Return q · x at S sites, `[B, T, S]` or per head `[B, T, H, S]`, in the queries' dtype, under autocast too."""
    with autocast_off(x_BTD):
        x_BTD = x_BTD.to(queries_SD.dtype)
        if queries_SD.dim() == 2:
            return torch.matmul(x_BTD, queries_SD.t())
        return torch.einsum("bthe,she->bths", x_BTD, queries_SD)


def source_logits(x_BTD: torch.Tensor, queries_SD: torch.Tensor, scaled_eps: torch.Tensor) -> torch.Tensor:
    """Return the logits `[B, T, S]` of one source at S sites: w · RMSNorm(x), the norm applied to the product.

    Unlike attention over tokens it has no 1/√D.
    """
    return query_products(x_BTD, queries_SD) * inverse_size(x_BTD, queries_SD.shape[1:], scaled_eps)


class DepthReader:
    """How depth is read: one object per forward pass, chosen by `attn_res_implementation`.

    A reader implements `blocks`, `append`, `drop_blocks`, `inputs_for` and `read`, and extends `move_to`. A read is
    split in two, so that a decoder layer can be recomputed, wrapped or offloaded: `inputs_for` is called outside of it,
    once; `read` maps tensors to tensors.

    Args:
        parameters: of all sites, from `DepthAttention`.
        eps: the key norm's epsilon.
        layout: which site reads which sources (`BlockLayout`).

    Attributes:
        gives_gradients, gives_weights, exports, transforms, reads_all_forms, intervenes: what this reader can do.
            `gives_weights`: `read` returns depth weights; `exports`: it can be traced with a dynamic number of tokens;
            `transforms`: `torch.func` can map and differentiate it; `reads_all_forms`: those of `DepthForm.unusual`,
            too; `intervenes`: `depth_interventions` can change what a site reads.
        dtype: of the embedding: what sublayers are given and layers return.
    """

    gives_gradients: ClassVar[bool] = True
    gives_weights: ClassVar[bool] = False
    exports: ClassVar[bool] = True
    transforms: ClassVar[bool] = True
    reads_all_forms: ClassVar[bool] = False
    intervenes: ClassVar[bool] = False

    def __init__(self, parameters: DepthParameters, eps: float, layout):
        self.parameters, self.eps, self.layout = parameters, eps, layout
        self.dtype: torch.dtype | None = None

    def start(self, embedding_BTD: torch.Tensor) -> None:
        """Begin a pass: it takes the dtype and device of the embedding."""
        self.dtype = embedding_BTD.dtype
        self.parameters = self.parameters.to(embedding_BTD.device, statistics_dtype(self.dtype))
        width = embedding_BTD.shape[-1]
        self.scaled_eps = embedding_BTD.new_full((), width * self.eps, dtype=statistics_dtype(self.dtype))

    @property
    def queries_SD(self) -> torch.Tensor:
        """The effective queries of all sites."""
        return self.parameters.queries_SD

    # ------------------------------------------------------------------------------- what a reader implements

    @property
    def num_blocks(self) -> int:
        """The number of closed blocks."""
        return len(self.blocks)

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        """The closed blocks `[B, T, D]`, the embedding first (in the form "add" the null source before it)."""
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
            The site's input `[B, T, D]`, not yet rounded to the model's dtype, and its depth weights `[B, T, sources]`
            (with several heads `[B, T, H, sources]`), the running sum's last, or `None` from a reader that does not
            give them.
        """
        raise NotImplementedError

    def move_to(self, device: torch.device) -> None:
        """Move everything held: a model spread over devices continues where its newest hidden state is."""
        self.parameters = self.parameters.to(device, self.scaled_eps.dtype)
        self.scaled_eps = self.scaled_eps.to(device)


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


def choose_depth_reader(
    name: str, gradients: bool, weights: bool, form: DepthForm = DepthForm(), interventions: bool = False
) -> type[DepthReader]:
    """Return the class of the reader for a pass.

    Args:
        name: `"auto"`, which takes the first of `"two_phase"`, `"training"`, `"eager"`, `"general"` that can do what is
            asked, or a registered name, whose reader must be able to.
        gradients: whether a gradient will be asked for.
        weights: whether depth weights are wanted.
        form: what is read.
        interventions: whether what sites read is changed.

    Raises:
        ValueError: there is no reader of this name, or it cannot do what is asked.
    """
    check_depth_reader(name)
    needs = {
        "reads_all_forms": bool(form.unusual),
        "intervenes": interventions,
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
    candidates = ("two_phase", "training", "eager", "general") if name == "auto" else (name,)
    for candidate in candidates:
        if not lacking[candidate]:
            return _DEPTH_READERS[candidate]
    # None can: say what the last candidate lacks, and which readers could
    wanted = {
        "reads_all_forms": form.unusual,
        "intervenes": "interventions",
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

    def __init__(self, parameters: DepthParameters, eps: float, layout):
        super().__init__(parameters, eps, layout)
        self._blocks_BTD: list[torch.Tensor] = []
        self._logits_BT: list[tuple[torch.Tensor, ...]] = []  # a tensor per site, of each block

    @property
    def num_blocks(self) -> int:
        return len(self._blocks_BTD)

    @property
    def blocks(self) -> Sequence[torch.Tensor]:
        return [join_heads(block_BTD, self.queries_SD.shape[1:]) for block_BTD in self._blocks_BTD]

    def append(self, block_BTD: torch.Tensor) -> None:
        block_BTD = split_heads(block_BTD, self.queries_SD.shape[1:])
        self._logits_BT.append(source_logits(block_BTD, self.queries_SD, self.scaled_eps).unbind(-1))
        self._blocks_BTD.append(block_BTD.to(self.dtype))  # a sum is rounded once, when it is complete

    def drop_blocks(self, count: int) -> None:
        del self._blocks_BTD[count:], self._logits_BT[count:]

    def inputs_for(self, site: int) -> EagerInputs:
        visible = self.layout.visible_blocks(site)
        logits_BTN = torch.stack([self._logits_BT[block][site] for block in visible], dim=-1)
        blocks_BTD = tuple(self._blocks_BTD[block] for block in visible)
        return EagerInputs(self.queries_SD[site], self.scaled_eps, logits_BTN, blocks_BTD)

    @staticmethod
    def read(running_sum_BTD: torch.Tensor | None, inputs: EagerInputs) -> tuple[torch.Tensor, torch.Tensor]:
        query_D, scaled_eps, logits_BTN, sources_BTD = inputs
        if running_sum_BTD is not None:
            running_sum_BTD = split_heads(running_sum_BTD, query_D.shape)
            logit_BT1 = source_logits(running_sum_BTD, query_D[None], scaled_eps)
            logits_BTN = torch.cat((logits_BTN, logit_BT1), dim=-1)
            sources_BTD = (*sources_BTD, running_sum_BTD)
        weights_BTN = logits_BTN.softmax(dim=-1)
        return join_heads(mix(weights_BTN, sources_BTD), query_D.shape), weights_BTN

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
