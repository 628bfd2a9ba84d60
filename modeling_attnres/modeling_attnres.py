# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Decoders of transformers with Attention Residuals: the layer, the model and its heads, written once.

The base family's own code runs, untouched: its model's forward makes masks, caches and positions and calls its layers,
and its layer's forward runs its norms, attention and MLP. What changes is how they read the residual stream, and what
is added to it (`residual_stream.py`): in the paper's form a norm reads a mixture over depth, and a sublayer's output
goes not into a sum over all layers but into the running sum of its block.

`AttnResLlamaModel`, `AttnResQwen3MoeForCausalLM`, … are derived from the classes of transformers when they are asked
for (`derive_model`). A base model is built by its own `__init__`; then each of its layers becomes one of ours: the same
parameters, another class. Nothing of depth attention enters the KV cache.

Shapes: B batch, T tokens, D hidden size.
"""

import functools
import inspect
import sys
import threading
from collections.abc import Callable
from dataclasses import make_dataclass

import torch
import transformers
from torch import nn
from torch.utils._pytree import tree_flatten, tree_unflatten
from transformers import GenerationMixin, PreTrainedModel, conversion_mapping, modeling_outputs
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.models.auto import AutoConfig
from transformers.utils import logging
from transformers.utils.output_capturing import _CAN_RECORD_REGISTRY

from . import configuration_attnres
from .configuration_attnres import AUTO_CLASSES, PREFIX, BlockLayout, FamilyError, asked_for, base_of
from .depth_attention import DepthAttention, choose_depth_reader, is_depth_parameter
from .depth_forms import GeneralReader
from .residual_stream import (
    AddPass,
    DepthPass,
    LayerElsewhere,
    LayerStream,
    LayerView,
    ReplacePass,
)


logger = logging.get_logger(__name__)


# ------------------------------------------------------------------------------------------------------- decoder layers


class AttnResDecoderLayerMixin:
    """A decoder layer that reads through depth attention. Mixed into a base family's layer class.

    It is never constructed: `install_depth_attention` gives a built layer this class, and sets what follows.

    Attributes:
        base_layer_class: the layer's class in transformers.
        layer_index: its place in the model.
        reads: by the name of each of the two modules that read the residual stream (norms, or attention and MLP), the
            sublayer (0 or 1) and what the module's input is multiplied by: 1, or the number of sources where the norm's
            eps cannot be divided by its square.
    """

    base_layer_class: type[nn.Module]
    layer_index: int
    reads: dict[str, tuple[int, float]]

    def __init_subclass__(cls, **kwargs):
        forward = cls.__dict__.get("forward", AttnResDecoderLayerMixin.forward)
        super().__init_subclass__(**kwargs)
        # Releases of transformers put checkpointing around `forward` here, or around `__call__`: ours is in `forward`.
        cls.forward = forward

    def __call__(self, hidden_states: torch.Tensor, *args, depth_pass: DepthPass | None = None, **kwargs):
        """Run the layer with its hooks; the last one returns what the final norm reads, made of what hooks left."""
        if depth_pass is None:
            raise TypeError(
                f"Decoder layer {self.layer_index} was called without depth_pass, which its model makes for a pass: "
                "what it reads is in the layers before it. Call the model; a hook sees what its layers are given."
            )
        output = nn.Module.__call__(self, hidden_states, *args, depth_pass=depth_pass, **kwargs)
        if depth_pass.last_layer is not self:
            return output
        if isinstance(output, tuple):
            return depth_pass.read_output(output[0]), *output[1:]
        return depth_pass.read_output(output)

    def forward(self, hidden_states: torch.Tensor, *args, depth_pass: DepthPass, **kwargs):
        """Ask what the two sublayers read, run them, and tell what they added.

        Hooks are outside of this, so what they change counts; recomputation is inside, so depth is asked once.

        Args:
            hidden_states: what the layer before returned `[B, T, D]`: the running sum of its block.
            depth_pass: closes blocks, reads depth.
            args, kwargs: what the base family's layer takes.

        Returns:
            What the base family's layer returns, with the new running sum `[B, T, D]` in the model's dtype (in Full
            mode the MLP's output; in the form "add" the residual stream) for its hidden states.
        """
        num_kept = 1 if depth_pass.layout.full else 0
        num_weights = 0 if depth_pass.depth_weights is None else 2
        # What the two sites read: the running sum [B, T, D], and of closed blocks what the reader makes of them.
        running_sum = depth_pass.enter_layer(self.layer_index, hidden_states)
        inputs = depth_pass.inputs_for(self.layer_index)
        # Run the sublayers.
        new_stream = depth_pass.stream_maker()
        if self.gradient_checkpointing and self.training and torch.is_grad_enabled():
            kwargs = without_cache(kwargs)
            tensors, structure = tree_flatten((running_sum, inputs))  # checkpointing wants them as arguments

            def run(*tensors):
                return self.run_sublayers(new_stream(*tree_unflatten(tensors, structure)), *args, **kwargs)

            running_sum, *results = self._gradient_checkpointing_func(run, *tensors)
        else:
            running_sum, *results = self.run_sublayers(new_stream(running_sum, inputs), *args, **kwargs)
        # Part the results, and hand each to whoever wants it.
        kept_apart, results = results[:num_kept], results[num_kept:]
        weights, rest = results[:num_weights], results[num_weights:]
        if num_weights > 0:
            depth_pass.depth_weights += weights
        hidden_states = depth_pass.leave_layer(running_sum, kept_apart)
        return (hidden_states, *rest) if rest else hidden_states

    def run_sublayers(self, stream: LayerStream, *args, **kwargs) -> tuple:
        """Run the base layer's own forward, which reads depth through a stream.

        Returns:
            The new running sum; in Full mode what closed after attention; the depth weights of both sites, if they are
            kept; and whatever the base layer returns beside hidden states.
        """
        result = self.base_layer_class.forward(LayerView(self, stream), stream.hidden_states, *args, **kwargs)
        result, *rest = result if isinstance(result, tuple) else (result,)
        running_sum = stream.finish(result, self.base_layer_class)
        return running_sum, *stream.kept_apart, *stream.weights, *rest


MADE_WITH = ("layers and blocks", "the form", "attn_res_scale_norm_eps")


def made_with(config) -> tuple:
    """Return what of a config a model cannot change any more once it is made; `MADE_WITH` names it."""
    if config.attn_res_mode == "none":
        return "standard residuals", None, False
    return describe_layout(config.attn_res_layout), config.attn_res_depth_form, config.attn_res_scale_norm_eps


def describe_layout(layout: BlockLayout) -> str:
    """Describe the layers and blocks of a layout in a few words."""
    blocks = "in Full mode" if layout.full else f"in blocks that start at {list(layout.starts)}"
    form = ', form "add"' if layout.additive else ""
    window = "" if layout.window is None else f", window {layout.window}"
    return f"{layout.num_layers} decoder layers {blocks}{form}{window}"


def without_cache(kwargs: dict) -> dict:
    """Return a layer's arguments without its cache, which recomputation would write twice."""
    names = [name for name in ("use_cache", "cache", "past_key_values") if kwargs.get(name) not in (None, False)]
    if names:
        logger.warning_once(f"Caching is incompatible with gradient checkpointing: {', '.join(names)} not used.")
    return {name: value for name, value in kwargs.items() if name not in names}


# ------------------------------------------------------------------------------------------------------ model and heads


class AttnResPreTrainedModelMixin:
    """What models and heads of every family share. Mixed into the base family's classes."""

    base_model_class: type[PreTrainedModel]  # the class in transformers that this one extends
    _pp_plan = None  # stages would have to exchange blocks, too

    def __init__(self, config, *args, **kwargs):
        if not hasattr(config, "attn_res_mode"):
            raise TypeError(
                f"{type(self).__name__}: expected a config of {self.config_class.__name__}, got "
                f"{type(config).__name__}. {self.config_class.__name__}.from_pretrained reads a base family's, too."
            )
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        """Finish as the base does, at the end of its `__init__`; keep only the modules not to split that are there."""
        super().post_init()
        self._no_split_modules &= {type(module).__name__ for module in self.modules()}

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DepthAttention):
            module.reset_parameters()

    @classmethod
    def _can_set_attn_implementation(cls) -> bool:
        """Answer as the base family does: transformers asks the source code of the module that defines the class."""
        return cls.base_model_class._can_set_attn_implementation()

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        return cls.base_model_class._can_set_experts_implementation()

    @classmethod
    def _finalize_model_loading(cls, model, load_config, loading_info):
        """Finish as the base does, or explain depth parameters of another number of layers, if all else fits."""
        mismatches = [] if load_config.ignore_mismatched_sizes else sorted(loading_info.mismatched_keys)
        if mismatches and all(is_depth_parameter(name) and old[1:] == new[1:] for name, old, new in mismatches):
            layers = model.config.num_hidden_layers
            name, old, new = mismatches[-1]
            raise RuntimeError(
                f"{name} of the checkpoint has {old[0]} rows, expected {new[0]}: two for each of the "
                f"{layers} decoder layers of num_hidden_layers and one for the output. To leave layers out, load "
                f"them all and cut the model (model.model.layers = model.model.layers[:{layers}]), or start depth "
                "attention anew (ignore_mismatched_sizes=True), which in a port that was not trained is the same."
            )
        return super()._finalize_model_loading(model, load_config, loading_info)

    @classmethod
    def maybe_distribute_model(cls, model, distributed_config, mesh_manager):
        """Distribute as the base does; transformers' own pipelines send one tensor between stages, and no blocks."""
        if (getattr(distributed_config, "pp_size", None) or 1) > 1 and model.config.attn_res_mode != "none":
            raise ValueError(
                f"pp_size={distributed_config.pp_size}: transformers' pipelines hand on one tensor, but later layers "
                "read closed blocks, too; expected 1. Pipelines that hand them on: `python -m training`, --pipeline."
            )
        return super().maybe_distribute_model(model, distributed_config, mesh_manager)

    def wants_depth_attentions(self, asked: bool | None) -> bool:
        """Say whether depth weights are wanted: by the call or, where it is silent, by the config."""
        if asked is None:
            asked = getattr(self.config, "output_depth_attentions", False)
        return bool(asked)

    def with_depth_attentions(self, forward: Callable, weights: list, args: tuple, kwargs: dict):
        """Run a forward that puts depth weights in a list, and return its outputs with them."""
        return_dict = kwargs.pop("return_dict", None)
        if return_dict is None:
            return_dict = self.config.return_dict
        outputs = forward(*args, return_dict=True, **kwargs)
        # The same outputs in a class with one field more; those that are no field of the base's class are set as items.
        fields = {name: value for name, value in outputs.items() if name in outputs.__dataclass_fields__}
        result = output_with_depth_attentions(type(outputs))(**fields, depth_attentions=tuple(weights))
        for name in outputs.keys() - fields.keys():
            result[name] = outputs[name]
        return result if return_dict else result.to_tuple()

    def save_pretrained(self, save_directory, *args, **kwargs) -> None:
        """Save as the base does; the config names the remote code of every Auto class, whichever class is saved.

        Raises:
            ValueError: the config describes other layers or blocks than the model has been made with.
        """
        decoder = getattr(self, self.base_model_prefix, self)  # of a head, or this model itself
        made = getattr(decoder, "attn_res_made", None)
        if made is not None and made_with(self.config) != made:
            pairs = zip(MADE_WITH, made, made_with(self.config))
            changed = ", ".join(f"{name} from {before} to {now}" for name, before, now in pairs if before != now)
            raise ValueError(
                f"The config was changed since this model was made ({changed}): loaded again it would compute "
                "something else. Set it back, or make a model anew."
            )
        self.config.auto_map = self.config.remote_code()
        super().save_pretrained(save_directory, *args, **kwargs)


class AttnResModelMixin(AttnResPreTrainedModelMixin):
    """The decoder without its head.

    Attributes:
        depth_interventions: what `depth_interventions` changes of what sites read, by site.
    """

    depth_interventions: dict[int, torch.Tensor] = {}  # noqa: RUF012 (replaced, never changed)

    def post_init(self) -> None:
        if self.config.attn_res_mode != "none" and not hasattr(self, "attn_res"):
            install_depth_attention(self)
        self.attn_res_made = made_with(self.config)
        super().post_init()

    def forward(self, *args, output_depth_attentions: bool | None = None, depth_attentions_to=None, **kwargs):
        """Run the base model's forward, whose layers read through depth attention.

        Args:
            output_depth_attentions: add `depth_attentions`, the depth weights of every site in order, the output site
                last, each `[B, T, sources]`, with several heads `[B, T, H, sources]`. Those of a softmax sum to 1.
            depth_attentions_to: a list to put them in, for a head whose base passes on only the outputs it knows.
            args, kwargs: what the base family's model takes.

        With `output_hidden_states=True` entry i > 0 is what decoder layer i - 1 returned, the running sum of its block
        (in Full mode its MLP's output; in the form "add" the residual stream), the last one the final norm's.
        """
        wanted = self.wants_depth_attentions(output_depth_attentions)
        weights = [] if depth_attentions_to is None else depth_attentions_to
        if hasattr(self, "attn_res"):
            kwargs["depth_pass"] = self.new_depth_pass(weights if wanted else None)
        if wanted and depth_attentions_to is None:
            return self.with_depth_attentions(super().forward, weights, args, kwargs)
        return super().forward(*args, **kwargs)

    def new_depth_pass(self, weights: list | None) -> DepthPass:
        """Begin one pass, which puts the depth weights in a list if it is given one."""
        # The layers are ours, or modules that a user put in their place.
        layers = list(self.layers)[: self.config.num_hidden_layers]  # a slice of a ModuleList is a new module
        for index, layer in enumerate(layers):
            if isinstance(layer, GradientCheckpointingLayer) and not isinstance(layer, AttnResDecoderLayerMixin):
                raise TypeError(f"Decoder layer {index} is a {type(layer).__name__}, without Attention Residuals.")
        # The last one is ours, perhaps wrapped (by torch.compile, for checkpointing), or lies in another stage.
        last, ours = layers[-1].modules() if layers else (), (AttnResDecoderLayerMixin, LayerElsewhere)
        last_layer = next((module for module in last if isinstance(module, ours)), None)
        if last_layer is None:
            found = type(layers[-1]).__name__ if layers else "none"
            raise TypeError(
                f"{type(self).__name__}: the last decoder layer, which reads the output site, must be a {PREFIX} "
                f"layer; found {found}. Cut the model after one of its own layers."
            )
        parameters = self.attn_res()  # the one place where depth parameters are read
        _, form, _ = self.attn_res_made
        reader_class = choose_depth_reader(
            self.config.attn_res_implementation,
            gradients=torch.is_grad_enabled(),
            weights=weights is not None,
            form=form,
            interventions=bool(self.depth_interventions),
        )
        reader = reader_class(parameters, self.attn_res_eps, self.attn_res_layout)
        if isinstance(reader, GeneralReader):
            reader.form, reader.interventions = form, self.depth_interventions
        depth_pass = AddPass(reader) if form.additive else ReplacePass(reader)
        depth_pass.last_layer, depth_pass.output_gain, depth_pass.depth_weights = (
            last_layer,
            self.attn_res_output_gain,
            weights,
        )
        depth_pass.sequence_mesh = self.attn_res.sequence_mesh
        if depth_pass.sequence_mesh is not None and (self.depth_interventions or form.additive):
            found = "depth_interventions do" if self.depth_interventions else 'attn_res_form="add" does'
            raise ValueError(f"{found} not go with a sequence that is sharded over ranks.")
        return depth_pass


class AttnResHeadMixin(AttnResPreTrainedModelMixin):
    """The decoder with a head."""

    def __init__(self, config, *args, **kwargs):
        # Some heads of transformers make their decoder with AutoModel. Of remote code in a local folder there are two
        # copies, by AutoConfig and by AutoModelFor…, and the config may be of the other copy's class.
        if hasattr(config, "attn_res_mode"):
            decoder = getattr(sys.modules[__name__], config.class_names()["AutoModel"])
            transformers.AutoModel.register(type(config), decoder, exist_ok=True)
        super().__init__(config, *args, **kwargs)

    def post_init(self) -> None:
        """Finish as the base does, at the end of its `__init__`; by then the decoder it built has depth attention."""
        decoders = [child for child in self.children() if isinstance(child, PreTrainedModel)]
        if len(decoders) != 1:
            raise TypeError(
                f"{type(self).__name__} holds {len(decoders)} models of transformers, expected one decoder."
            )
        (decoder,) = decoders
        if not isinstance(decoder, AttnResModelMixin):
            decoder.__class__ = derived_class(type(decoder))
            decoder.post_init()
        super().post_init()

    def forward(self, *args, output_depth_attentions: bool | None = None, **kwargs):
        """Run the base family's forward; `output_depth_attentions=True` adds `depth_attentions`, as the model does."""
        wanted = self.wants_depth_attentions(output_depth_attentions)
        if wanted:
            weights: list[torch.Tensor] = []
            kwargs |= {"output_depth_attentions": True, "depth_attentions_to": weights}
            return self.with_depth_attentions(super().forward, weights, args, kwargs)
        if self.wants_depth_attentions(None):  # the config does, the call does not
            kwargs["output_depth_attentions"] = False
        return super().forward(*args, **kwargs)


class AttnResForCausalLMMixin(AttnResHeadMixin):
    """The decoder with its language-model head."""

    def generate(self, *args, output_depth_attentions: bool | None = None, **kwargs):
        """Generate as the base does. With `output_depth_attentions=True` and `return_dict_in_generate=True` the result
        has `depth_attentions`: what the model returns, of each forward pass in turn."""
        if not self.wants_depth_attentions(output_depth_attentions):
            if self.wants_depth_attentions(None):  # the config does, the call does not
                kwargs["output_depth_attentions"] = False
            return super().generate(*args, **kwargs)
        passes, thread = [], threading.get_ident()

        def keep(model, args, outputs):
            # Not those of passes that were not asked for them: of other threads, of a processor of logits
            weights = outputs.get("depth_attentions")
            if weights is not None and threading.get_ident() == thread:
                passes.append(weights)

        handle = self.register_forward_hook(keep)
        try:
            outputs = super().generate(*args, output_depth_attentions=True, **kwargs)
        finally:
            handle.remove()
        if isinstance(outputs, torch.Tensor):  # return_dict_in_generate is off
            return outputs
        outputs["depth_attentions"] = tuple(passes)
        return outputs


@functools.cache
def output_with_depth_attentions(output_class: type) -> type:
    """Make of an output class of transformers one with a field for depth weights: FSDP drops what is no field."""
    name, fields = PREFIX + output_class.__name__, [("depth_attentions", tuple[torch.Tensor, ...] | None, None)]
    globals()[name] = derived = make_dataclass(name, fields, bases=(output_class,), namespace={"__module__": __name__})
    return derived


# ----------------------------------------------------------------------------------- a built model's layers become ours

# By model type, for families that name their parts otherwise (`register_family_parts`).
_FAMILY_PARTS: dict[str, dict] = {}


def register_family_parts(
    model_type: str,
    attention_norm: str | None = None,
    mlp_norm: str | None = None,
    final_norm: str | None = None,
    final_norm_reads_more: bool = False,
) -> None:
    """Name the norms of a family whose parts are not found by the names in `PART_NAMES`.

    Args:
        model_type: of the base family in transformers.
        attention_norm, mlp_norm: the norms that read the residual stream, in a decoder layer.
        final_norm: the norm after the last layer, in the model.
        final_norm_reads_more: the model uses its final norm for something else as well, so its eps must stay.

    Example:
        from modeling_attnres import register_family_parts

        register_family_parts("apertus", attention_norm="attention_layernorm", mlp_norm="feedforward_layernorm")
        from modeling_attnres import AttnResApertusForCausalLM
    """
    _FAMILY_PARTS[model_type] = {
        "attention_norm": attention_norm,
        "mlp_norm": mlp_norm,
        "final_norm": final_norm,
        "final_norm_reads_more": final_norm_reads_more,
    }


register_family_parts("nanochat", final_norm_reads_more=True)  # it normalises the embedding with it

PART_NAMES = {
    "attention_norm": ("input_layernorm",),
    # a layer that has a norm before its MLP by another name uses post_attention_layernorm for a post-norm
    "mlp_norm": ("pre_feedforward_layernorm", "pre_ff_layernorm", "pre_mlp_layernorm", "post_attention_layernorm"),
    "final_norm": ("norm", "final_layernorm"),
}
EPS_NAMES = ("variance_epsilon", "eps", "epsilon")


# A layer with these norms and none before attention is a post-norm layer: attention and MLP read the stream themselves.
POST_NORMS = {"post_attention_layernorm", "post_feedforward_layernorm"}
SUBLAYER_NAMES = (("self_attn", "linear_attn"), ("mlp",))


def find_part(model_type: str, part: str, names: set[str]) -> str | None:
    """Return the name of a part among the names that a module has, or `None`."""
    given = _FAMILY_PARTS.get(model_type, {}).get(part)
    candidates = PART_NAMES[part] if given is None else (given,)
    return next((name for name in candidates if name in names), None)


def find_reads(model_type: str, additive: bool, names: set[str]) -> list[str | None]:
    """Return the names of the two modules that read the residual stream, of those that a layer has.

    They are the norms before attention and MLP or, in the form "add", these themselves in a post-norm layer.
    """
    norms = [find_part(model_type, part, names) for part in ("attention_norm", "mlp_norm")]
    if additive and norms[0] is None and names >= POST_NORMS:
        return [next((name for name in candidates if name in names), None) for candidates in SUBLAYER_NAMES]
    return norms


def install_depth_attention(model: PreTrainedModel) -> None:
    """Give a model just built by its base family's `__init__` depth parameters, and its layers our class.

    Raises:
        TypeError: the layers or norms are not those that depth attention needs.
    """
    # Check that the layers and the final norm are where the config and `PART_NAMES` say.
    config = model.config
    config.validate_attn_res()  # fields may have been set since the config was made
    layout, form, base_type = config.attn_res_layout, config.attn_res_depth_form, config.base_model_type()
    if len(model.layers) != layout.num_layers:
        raise TypeError(f"{type(model).__name__} has {len(model.layers)} layers, config says {layout.num_layers}.")
    final_norm = find_part(base_type, "final_norm", {name for name, _ in model.named_children()})
    if final_norm is None:
        raise TypeError(f"{type(model).__name__} has no final norm by a known name; see register_family_parts.")

    def gain_of(norm: nn.Module | None, site: int) -> float:
        share = form.share_at_start(layout.num_sources(site))
        return scaled_gain(norm, share) if config.attn_res_scale_norm_eps and not form.additive else 1

    # Make each layer one of ours; a norm that reads a part of the sum of its sources is scaled for it.
    for index, layer in enumerate(model.layers):
        layer.__class__ = derived_class(type(layer))
        layer.layer_index = index
        names = {name for name, module in layer.named_children() if module is not None}
        reads = find_reads(base_type, form.additive, names)
        if None in reads:
            raise TypeError(
                f"{type(layer).__name__}: of the norms before attention and MLP found {reads}; depth attention needs "
                f"both. Other names are given to register_family_parts.{advise_add(base_type, form.additive, names)}"
            )
        layer.reads = {
            name: (sublayer, gain_of(getattr(layer, name), 2 * index + sublayer)) for sublayer, name in enumerate(reads)
        }

    # Add what the model itself needs: the output site's norm, the layout, the depth parameters.
    norm = getattr(model, final_norm)
    model.attn_res_eps = next((getattr(norm, name) for name in EPS_NAMES if hasattr(norm, name)), 1e-6)
    shared = _FAMILY_PARTS.get(base_type, {}).get("final_norm_reads_more", False)
    model.attn_res_output_gain = gain_of(None if shared else norm, layout.num_sites - 1)
    model.attn_res_layout = layout
    model.attn_res = DepthAttention.from_config(config)

    # Depth parameters are a unit of their own: of one dtype, as FSDP wants, and on one device.
    layer_names = {type(layer).__name__ for layer in model.layers}
    model._no_split_modules = {*(model._no_split_modules or ()), *layer_names, DepthAttention.__name__}
    model._keep_in_fp32_modules_strict = {*(model._keep_in_fp32_modules_strict or ()), "attn_res"}


def advise_add(model_type: str, additive: bool, names: set[str]) -> str:
    """Say that the form "add" can take a layer, where it can."""
    if additive or None in find_reads(model_type, True, names):
        return ""
    return ' attn_res_form="add" takes this layer as it is.'


def scaled_gain(norm: nn.Module | None, share: int) -> float:
    """Make a norm of the n-th part of a sum equal the base's norm of the sum: norm(h / n, eps / n²) = norm(h, eps).

    Returns:
        What its input is still to be multiplied by: 1, or n for a norm whose eps cannot be set, or (`None`) must stay.
    """
    name = next((name for name in EPS_NAMES if isinstance(getattr(norm, name, None), float)), None)
    if name is None:
        return share
    setattr(norm, name, getattr(norm, name) / share**2)
    return 1


# ---------------------------------------------------------------------------------------------- families are derived


def derived_class(base: type) -> type:
    """Return our class of a class of transformers."""
    return getattr(sys.modules[__name__], PREFIX + base.__name__)


def derive_model(name: str) -> type:
    """Make the class `AttnRes{Base}Model`, `AttnRes{Base}ForCausalLM` or another head.

    Raises:
        FamilyError: transformers has no such class, or depth attention cannot take its residual stream's place.
    """
    # Of a class of transformers, of a family whose layers have the parts
    base = base_of(name)
    if not issubclass(base, PreTrainedModel) or base.config_class is None:
        raise FamilyError(name, f"{base.__name__} is no model of transformers.")
    config_class = getattr(configuration_attnres, PREFIX + base.config_class.__name__)
    if name not in config_class.class_names().values():
        derived = ", ".join(config_class.class_names().values())
        raise FamilyError(name, f"{base.__name__} is not among the classes of its family that are derived: {derived}.")
    check_family(base, config_class)
    # Choose the mixin by the Auto class that loads such models
    auto_class = next(auto for auto, known in config_class.class_names().items() if known == name)
    mixins = {"AutoModel": AttnResModelMixin, "AutoModelForCausalLM": AttnResForCausalLMMixin}
    mixin = mixins.get(auto_class, AttnResHeadMixin)
    body = {
        "__module__": __name__,
        "__doc__": f"`{base.__name__}` with Attention Residuals.",
        "__annotations__": {"config": config_class},
        "config_class": config_class,
        "base_model_class": base,
        "forward": with_signature_of(mixin.forward, base.forward),
    }
    # Named among the bases: AutoModel gives remote code whose bases do not name it another class, which no pickle finds
    generation = (GenerationMixin,) if issubclass(base, GenerationMixin) else ()
    model_class = type(name, (mixin, base, *generation), body)
    # What a forward can record (hidden states, attentions) transformers keeps by class
    dict.__setitem__(_CAN_RECORD_REGISTRY, str(model_class), model_class._can_record_outputs)
    return model_class


def with_signature_of(function: Callable, base: Callable) -> Callable:
    """Give a function the signature of its base, which engines and `generate` inspect, with our argument.

    The signature is that of what `forward` wraps, as with transformers' own decorators: where torch compiles ahead of
    time it takes a `__signature__` for that of the code.
    """

    @functools.wraps(function)
    def forward(self, *args, **kwargs):
        return function(self, *args, **kwargs)

    forward.__wrapped__ = functools.partial(function)
    parameters = list(inspect.signature(base).parameters.values())
    ours = inspect.Parameter("output_depth_attentions", inspect.Parameter.KEYWORD_ONLY, default=None)
    named = [parameter for parameter in parameters if parameter.kind is not inspect.Parameter.VAR_KEYWORD]
    rest = [parameter for parameter in parameters if parameter.kind is inspect.Parameter.VAR_KEYWORD]
    forward.__wrapped__.__signature__ = inspect.Signature([*named, ours, *rest])
    return forward


def check_family(base: type[PreTrainedModel], config_class: type) -> None:
    """Raise a FamilyError unless the family's model runs decoder layers whose forward uses what reads depth.

    That is two norms or, for the form "add", attention and MLP of a post-norm layer. What only a run can tell (a
    sublayer that reads no norm, parallel blocks), the `ResidualStream` finds.
    """
    decoder = getattr(transformers, config_class.class_names()["AutoModel"].removeprefix(PREFIX))
    classes = [value for value in vars(sys.modules[base.__module__]).values() if isinstance(value, type)]
    layers = [layer for layer in classes if issubclass(layer, GradientCheckpointingLayer)]
    uses = {layer.__name__: names_used(layer.forward) for layer in layers if layer is not GradientCheckpointingLayer}
    model_type = config_class.base_model_type()
    qualifying = [names for names in uses.values() if None not in find_reads(model_type, True, names)]
    if not qualifying or "layers" not in names_used(decoder.forward):
        attention_norms, mlp_norms = (" or ".join(PART_NAMES[part]) for part in ("attention_norm", "mlp_norm"))
        raise FamilyError(
            config_class.__name__,
            f"the family {model_type!r} does not qualify: depth attention needs `layers` that read their residual "
            f"stream through a norm before attention ({attention_norms}) and one before the MLP ({mlp_norms}), and "
            f"{', '.join(sorted(uses)) or 'its model'} does not. For other names see register_family_parts.",
        )


def names_used(function: Callable) -> set[str]:
    """Return the attributes and globals that a function's own code names."""
    return set(inspect.unwrap(function).__code__.co_names)


def derive_layer(name: str) -> type:
    """Make the class `AttnRes{Layer}` of a decoder layer of transformers, found beside its family's model."""
    base_name = name.removeprefix(PREFIX)
    for end in range(len(base_name), 0, -1):  # LlamaDecoderLayer lies beside LlamaModel
        model = getattr(transformers, base_name[:end] + "Model", None)
        base = getattr(sys.modules[model.__module__], base_name, None) if isinstance(model, type) else None
        if isinstance(base, type) and issubclass(base, GradientCheckpointingLayer):
            body = {"__module__": __name__, "base_layer_class": base}
            return type(name, (AttnResDecoderLayerMixin, base), body)
    raise FamilyError(name, f"transformers {transformers.__version__} has no decoder layer {base_name}.")


def register_with_auto_classes(config_class: type) -> None:
    """Let transformers' Auto classes, and tables of other libraries, know a family by its model type."""
    model_classes = {auto: getattr(sys.modules[__name__], name) for auto, name in config_class.class_names().items()}
    for model_class in model_classes.values():
        if model_class.config_class is not config_class:
            raise FamilyError(
                config_class.__name__,
                f"transformers runs {config_class.base_model_type()!r} with {model_class.base_model_class.__name__}, "
                f"so the config of its family is {model_class.config_class.__name__}.",
            )
    AutoConfig.register(config_class.model_type, config_class, exist_ok=True)
    config_class.register_for_auto_class()
    for auto_class, model_class in model_classes.items():
        getattr(transformers, auto_class).register(config_class, model_class, exist_ok=True)
        model_class.register_for_auto_class(auto_class)  # saved models carry their code
    register_in_transformers_tables(config_class)


def register_in_transformers_tables(config_class: type) -> None:
    """Enter the derived family wherever transformers keys a table by the base's model type or class names.

    Tokenizers, and tables of other libraries, are registered with the config (`configuration_attnres`).
    """
    base_type, model_type = config_class.base_model_type(), config_class.model_type
    # weight conversion rules: by model type, and by class name where a class has its own
    names = {base_type: model_type} | {name.removeprefix(PREFIX): name for name in config_class.class_names().values()}
    for base_name, name in names.items():
        rules = get_checkpoint_conversion_mapping(base_name)
        if rules is not None:
            register_checkpoint_conversion_mapping(name, rules, overwrite=True)
    # Trainer asks the static table of causal LMs whether labels are to be shifted; servers ask for a class by its name
    for auto_class, name in config_class.class_names().items():
        AUTO_CLASSES[auto_class][model_type] = name
        configuration_attnres.set_in_transformers(name, getattr(sys.modules[__name__], name))
    # PEFT finds its rules for experts by whose conversion rules a family shares; those of Mixtral are Mixtral's own
    patterns = conversion_mapping._MODEL_TO_CONVERSION_PATTERN
    if base_type in patterns or base_type == "mixtral":
        patterns[model_type] = patterns.get(base_type, base_type)


def __getattr__(name: str) -> type:
    if not name.startswith(PREFIX):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    if "Output" in name:  # unpickled where no model has returned one yet
        return output_with_depth_attentions(getattr(modeling_outputs, name.removeprefix(PREFIX)))
    with asked_for(name):
        if name.endswith("Layer"):
            globals()[name] = derived = derive_layer(name)
            return derived
        globals()[name] = derived = derive_model(name)
        register_with_auto_classes(derived.config_class)
        return derived
