# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""The configuration of Attention Residuals: four fields, added to the configuration of each base family.

`AttnResFields` holds the fields, their validation and what they imply (which sublayer reads how many sources). Each
family's config is the base family's config plus these fields.
"""

from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import transformers
from huggingface_hub.dataclasses import strict
from packaging.version import Version
from transformers import DeepseekV3Config, KimiLinearConfig, LlamaConfig, MixtralConfig, Qwen3MoeConfig
from transformers.utils import logging


TESTED_TRANSFORMERS = ("5.24.0", "5.25.0")  # from the first, up to but not including the second

if not Version(TESTED_TRANSFORMERS[0]) <= Version(transformers.__version__) < Version(TESTED_TRANSFORMERS[1]):
    logging.get_logger(__name__).warning_once(
        f"Attention Residuals is tested with transformers >= {TESTED_TRANSFORMERS[0]}, < {TESTED_TRANSFORMERS[1]}; "
        f"found {transformers.__version__}. If something breaks, install a version in that range first."
    )


def base_class(cls: type) -> type:
    """The class of the base family, in transformers, that a class of ours extends."""
    return next(base for base in cls.__mro__ if base.__module__.startswith("transformers.models."))


@dataclass(repr=False, eq=False, kw_only=True)
class AttnResFields:
    """What a config with Attention Residuals says beyond its base family.

    Args:
        attn_res_mode: `"block"` reads the embedding and the sums of blocks of decoder layers, `"full"` the embedding
            and every earlier sublayer, `"none"` keeps the standard residual sum (the control).
        attn_res_block_size: decoder layers a block; the last block takes the rest. The paper counts sublayers, so its
            S is twice this. Default: `ceil(num_hidden_layers / 8)`, about 8 blocks. Used by `"block"` only.
        attn_res_block_boundaries: the first decoder layer of each block, for uneven blocks: increasing, starting at 0.
            Excludes `attn_res_block_size`.
        attn_res_scale_norm_eps: a norm that reads the mean of n sources uses eps / n². With zero queries this makes
            the model compute exactly what its base computes (RMSNorm(h / n, eps / n²) = RMSNorm(h, eps)): set for
            ported checkpoints, off for models trained with Attention Residuals from the start.

    Raises:
        StrictDataclassError: a field has the wrong type or value, or the fields contradict each other.
    """

    attn_res_mode: Literal["block", "full", "none"] = "block"
    attn_res_block_size: int | None = None
    attn_res_block_boundaries: list[int] | None = None
    attn_res_scale_norm_eps: bool = False

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict, dict]:
        """Read a `config.json` of this family or of its base family; a base checkpoint is one with zero queries."""
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        found, expected = config_dict.get("model_type", cls.model_type), (cls.model_type, cls.base_model_type())
        if found not in expected:
            raise ValueError(
                f"{pretrained_model_name_or_path}: model_type is {found!r}, but {cls.__name__} reads only "
                f"{expected[0]!r} and {expected[1]!r}."
            )
        return {**config_dict, "model_type": cls.model_type}, kwargs

    @classmethod
    def base_model_type(cls) -> str:
        """The model type of the base family in transformers."""
        return cls.model_type.removeprefix("attnres_")

    def remote_code(self) -> dict[str, str]:
        """The `auto_map` of a checkpoint of this family: which class of the files beside it each Auto class loads."""
        family = type(self).__name__.removesuffix("Config")
        return {
            "AutoConfig": f"configuration_attnres.{family}Config",
            "AutoModel": f"modeling_attnres.{family}Model",
            "AutoModelForCausalLM": f"modeling_attnres.{family}ForCausalLM",
        }

    def validate_attn_res(self) -> None:
        """Check that the fields describe blocks that exist: on construction, on saving and before a model is built."""
        size, boundaries = self.attn_res_block_size, self.attn_res_block_boundaries
        if size is not None and boundaries is not None:
            raise ValueError(
                f"attn_res_block_size ({size}) and attn_res_block_boundaries ({boundaries}) were both given: blocks "
                "are set either by their size or by their first layers. Set one of them to None."
            )
        if size is not None and size < 1:
            raise ValueError(f"attn_res_block_size must be at least 1 decoder layer, got {size}.")
        if boundaries is not None:
            if not boundaries or boundaries[0] != 0:
                raise ValueError(f"attn_res_block_boundaries must start at decoder layer 0, got {boundaries}.")
            if any(second <= first for first, second in pairwise(boundaries)):
                raise ValueError(f"attn_res_block_boundaries must increase, got {boundaries}.")
            if boundaries[-1] >= self.num_hidden_layers:
                raise ValueError(
                    f"attn_res_block_boundaries must lie within the {self.num_hidden_layers} decoder layers "
                    f"(0 to {self.num_hidden_layers - 1}), got {boundaries}."
                )

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # a base config's dict brings its own, which would shadow the class's
        self.attn_res_implementation = kwargs.pop("attn_res_implementation", "two_phase")
        super().__post_init__(**kwargs)

    @property
    def attn_res_implementation(self) -> str:
        """How to read over depth: `"two_phase"` (in training: with a gradient written by hand), or `"eager"`, the plain
        twin of both. Like `attn_implementation` a matter of the process, not of the checkpoint: it can be set at load
        or later, and is not saved."""
        return self._attn_res_implementation

    @attn_res_implementation.setter
    def attn_res_implementation(self, value: str):
        if value not in ("two_phase", "eager"):
            raise ValueError(f"attn_res_implementation must be 'two_phase' or 'eager', got {value!r}.")
        self._attn_res_implementation = value

    def _remove_keys_not_serialized(self, config_dict: dict) -> None:
        super()._remove_keys_not_serialized(config_dict)
        config_dict.pop("_attn_res_implementation", None)

    @property
    def attn_res_block_starts(self) -> tuple[int, ...]:
        """The first decoder layer of each block. In `"full"` mode every layer (whose sublayers are kept apart)."""
        if self.attn_res_mode == "full":
            return tuple(range(self.num_hidden_layers))
        if self.attn_res_block_boundaries is not None:
            return tuple(self.attn_res_block_boundaries)
        size = self.attn_res_block_size or -(-self.num_hidden_layers // 8)
        return tuple(range(0, self.num_hidden_layers, size))

    def attn_res_num_sources(self, site: int) -> int:
        """How many sources a site reads: site 2l is the attention of decoder layer l, 2l + 1 its MLP, 2L the output.

        Every site reads the closed blocks (the embedding is the first) and, unless it opens a block, the running sum.
        """
        if self.attn_res_mode == "none":
            return 1
        if self.attn_res_mode == "full":
            return site + 1
        layer, is_mlp = divmod(site, 2)
        closed = sum(start <= layer for start in self.attn_res_block_starts)
        opens_block = not is_mlp and layer in self.attn_res_block_starts
        return closed if opens_block else closed + 1


@strict
class AttnResLlamaConfig(AttnResFields, LlamaConfig):
    model_type = "attnres_llama"


@strict
class AttnResMixtralConfig(AttnResFields, MixtralConfig):
    model_type = "attnres_mixtral"


@strict
class AttnResQwen3MoeConfig(AttnResFields, Qwen3MoeConfig):
    model_type = "attnres_qwen3_moe"


@strict
class AttnResDeepseekV3Config(AttnResFields, DeepseekV3Config):
    model_type = "attnres_deepseek_v3"


@strict
class AttnResKimiLinearConfig(AttnResFields, KimiLinearConfig):
    model_type = "attnres_kimi_linear"


__all__ = [
    "AttnResDeepseekV3Config",
    "AttnResKimiLinearConfig",
    "AttnResLlamaConfig",
    "AttnResMixtralConfig",
    "AttnResQwen3MoeConfig",
]
