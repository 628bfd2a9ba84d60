# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Attention Residuals for decoders of transformers.

Importing this package lets the Auto classes of transformers find its models, and gives the classes of any base family
by name: `from modeling_attnres import AttnResQwen3ForCausalLM`. Nothing of a family is imported before it is asked for.
A checkpoint that carries this package's files as remote code loads without it, with `trust_remote_code=True`.
"""

import sys

from transformers.models.auto.configuration_auto import CONFIG_MAPPING

from . import configuration_attnres, modeling_attnres
from .configuration_attnres import ADDITIVE_FAMILIES, LOSSLESS_FAMILIES, BlockLayout, config_name, is_attnres_type
from .depth_attention import DepthAttention, DepthReader, depth_read, is_depth_parameter, register_depth_reader
from .depth_forms import depth_interventions
from .modeling_attnres import register_family_parts
from .sequence_shards import sequence_sharded_plan


__all__ = [
    "ADDITIVE_FAMILIES",
    "LOSSLESS_FAMILIES",
    "BlockLayout",
    "DepthAttention",
    "DepthReader",
    "depth_interventions",
    "depth_read",
    "is_depth_parameter",
    "register_depth_reader",
    "register_family_parts",
    "sequence_sharded_plan",
]


class _ConfigsByModelType(dict):
    """What was registered with AutoConfig, and `attnres_…`: a family's classes are derived when it is looked up."""

    def __contains__(self, model_type) -> bool:
        return super().__contains__(model_type) or is_attnres_type(model_type)

    def __missing__(self, model_type):
        if not is_attnres_type(model_type):
            raise KeyError(model_type)
        return getattr(configuration_attnres, config_name(model_type))


CONFIG_MAPPING._extra_content = _ConfigsByModelType(CONFIG_MAPPING._extra_content)


def __getattr__(name: str) -> type:
    if name.startswith("AttnRes"):
        try:
            return getattr(configuration_attnres if name.endswith("Config") else modeling_attnres, name)
        except AttributeError as error:
            if sys._getframe(1).f_code.co_name == "_handle_fromlist":  # `from … import` would pass over the reason
                raise ImportError(str(error), name=__name__) from None
            raise
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
