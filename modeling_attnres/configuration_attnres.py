# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""The configuration of Attention Residuals: fields added to the configuration of any base family.

`AttnResConfigMixin` holds the fields and their validation; `BlockLayout` what they imply (which site reads which
sources). The config class of a family is derived when it is asked for: `AttnResLlamaConfig` is `LlamaConfig` with the
mixin, and so for every config of transformers that has a causal language model.
"""

import contextlib
import difflib
import math
import sys
from dataclasses import dataclass
from itertools import pairwise
from typing import Literal

import transformers
from huggingface_hub.dataclasses import strict
from packaging.version import Version
from transformers.models.auto import modeling_auto, tokenization_auto
from transformers.models.auto.configuration_auto import CONFIG_MAPPING_NAMES
from transformers.utils import logging

from .depth_attention import DepthForm, check_depth_reader
from .depth_forms import GeneralReader  # noqa: F401 (its file registers a reader that a config may name)
from .depth_readers import TwoPhaseReader  # noqa: F401 (its file registers the readers that a config may name)


NORM_EPS_ENDINGS = ("norm_eps", "norm_epsilon")  # of the fields for it, in any family
TESTED_TRANSFORMERS = ("5.16.0", "5.25.0")  # from the first, up to but not including the second
PREFIX, TYPE_PREFIX = "AttnRes", "attnres_"

# The model of each kind that a base family may have: Auto class -> model type -> class name
AUTO_CLASSES = {
    "AutoModel": modeling_auto.MODEL_MAPPING_NAMES,
    "AutoModelForCausalLM": modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    "AutoModelForSequenceClassification": modeling_auto.MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForTokenClassification": modeling_auto.MODEL_FOR_TOKEN_CLASSIFICATION_MAPPING_NAMES,
    "AutoModelForQuestionAnswering": modeling_auto.MODEL_FOR_QUESTION_ANSWERING_MAPPING_NAMES,
}

# The model types that tests/modeling_attnres/test_families.py proves lossless. Any other is verified when it is ported.
LOSSLESS_FAMILIES = frozenset(
    """
    afmoe arcee aria_text axk1 axk2 bamba bitnet cwm deepseek_v2 deepseek_v3 deepseek_v32 diffllama dots1 ernie4_5
    ernie4_5_moe exaone_moe flint gemma gemma2 gemma3_text glm glm4 glm4_moe glm4_moe_lite gpt_oss granite granite_swa
    granitemoe helium hunyuan_v1_dense hunyuan_v1_moe hy_v3 jais2 jamba kimi_linear laguna llama mellum mimo_v2_flash
    minimax_m2 ministral ministral3 mistral mixtral nanochat nemotron olmo olmoe phi3 phimoe qwen2 qwen2_moe qwen3
    qwen3_5_moe_text qwen3_5_text qwen3_moe qwen3_next seed_oss smollm3 solar_open stablelm starcoder2 vaultgemma youtu
    """.split()  # noqa: SIM905 (a list would be a line per family)
)

# Those that the same tests prove exact in the form "add", which leaves the residual stream as it is.
ADDITIVE_FAMILIES = LOSSLESS_FAMILIES | frozenset(
    """
    beam doge exaone exaone4 flex_olmo granitemoe_swa granitemoeshared hyperclovax internlm3 iquestcoder jetmoe kolibri1
    llama4_text minimax olmo2 olmo3 olmo_hybrid persimmon
    """.split()  # noqa: SIM905
)

if not Version(TESTED_TRANSFORMERS[0]) <= Version(transformers.__version__) < Version(TESTED_TRANSFORMERS[1]):
    logging.get_logger(__name__).warning_once(
        f"Attention Residuals is tested with transformers >= {TESTED_TRANSFORMERS[0]}, < {TESTED_TRANSFORMERS[1]}; "
        f"found {transformers.__version__}. If something breaks, install a version in that range first."
    )


@dataclass(frozen=True)
class BlockLayout:
    """Which sources each site reads. Site 2l is the attention of decoder layer l, 2l + 1 its MLP, 2L the output.

    A site reads the closed blocks (the embedding is the first) and, unless it opens a block, the running sum. In the
    form "add" the null source is the first block, the embedding the second, and the running sum is read in Full mode
    only: elsewhere the residual stream, which holds it, goes beside the mixture.

    Args:
        num_layers: L, decoder layers.
        starts: the first decoder layer of each block.
        full: every sublayer's output is a block of its own, and `starts` is every layer.
        additive: of the form "add".
        window: sites read the embedding (and the null source) and this many newest sources only; `None`: all.
    """

    num_layers: int
    starts: tuple[int, ...]
    full: bool = False
    additive: bool = False
    window: int | None = None

    @property
    def num_sites(self) -> int:
        return 2 * self.num_layers + 1

    @property
    def blocks(self) -> list[range]:
        """The decoder layers of each block."""
        return [range(start, end) for start, end in pairwise((*self.starts, self.num_layers))]

    def opens_block(self, layer: int) -> bool:
        """Say whether the layer's attention reads closed blocks only."""
        return layer in self.starts

    def reads_running_sum(self, site: int) -> bool:
        """Say whether the running sum is among the site's sources."""
        opens = site % 2 == 0 and self.opens_block(site // 2)
        return not opens and (self.full or not self.additive)

    def closed_blocks(self, site: int) -> int:
        """Return how many blocks have closed once the site's layer has started (at the output: all layers have run)."""
        layer = site // 2
        null = 1 if self.additive else 0
        if self.full:
            return null + min(2 * layer + 1, 2 * self.num_layers)
        return null + sum(start <= layer for start in self.starts)

    def visible_blocks(self, site: int) -> list[int]:
        """Return which of the closed blocks the site reads, oldest first."""
        closed = self.closed_blocks(site)
        if self.window is None:
            return list(range(closed))
        always = 2 if self.additive else 1
        newest = self.window - 1 if self.reads_running_sum(site) else self.window
        return [*range(min(always, closed)), *range(max(always, closed - newest), closed)]

    def num_sources(self, site: int) -> int:
        """Return how many sources the site reads."""
        blocks = len(self.visible_blocks(site))
        return blocks + 1 if self.reads_running_sum(site) else blocks

    @property
    def max_sources(self) -> int:
        """The most sources that a site reads."""
        return max(self.num_sources(site) for site in range(self.num_sites))

    def end_of_block(self, site: int) -> int:
        """Return the first site after the block of the site's layer."""
        later = [2 * start for start in self.starts if 2 * start > site]
        return later[0] if later else self.num_sites

    def sources_of(self, site: int) -> list[range]:
        """Return, for each source of a site, what it sums: 0 is the embedding, u > 0 the output of site u - 1.

        The null source sums nothing.
        """
        blocks = [range(u, u + 1) for u in range(2 * self.num_layers)]
        if not self.full:  # the embedding alone, then the outputs of each block
            ends = [0, *(2 * layer + 1 for layer in self.starts), self.num_sites]
            blocks = [range(begin, end) for begin, end in pairwise(ends)]
        if self.additive:
            blocks = [range(0), *blocks]
        sources = [blocks[block] for block in self.visible_blocks(site)]
        if self.reads_running_sum(site):  # what has not closed before the site
            closed = self.closed_blocks(site)
            sources.append(range(max((block.stop for block in blocks[:closed]), default=0), site + 1))
        return sources


@dataclass(repr=False, eq=False, kw_only=True)
class AttnResConfigMixin:
    """What a config with Attention Residuals says beyond its base family.

    Args:
        attn_res_mode: `"block"` reads the embedding and the sums of blocks of decoder layers, `"full"` the embedding
            and every earlier sublayer, `"none"` keeps the standard residual sum (the control).
        attn_res_block_size: decoder layers per block; the last block takes the rest. The paper counts sublayers, so its
            S is twice this. Default: `ceil(num_hidden_layers / 8)`, about 8 blocks. Used by `"block"` only.
        attn_res_block_boundaries: the first decoder layer of each block, for uneven blocks: increasing, starting at 0.
            Excludes `attn_res_block_size`.
        attn_res_scale_norm_eps: a norm that reads the mean of n sources uses eps / n². With zero queries this makes
            the model compute exactly what its base computes (RMSNorm(h / n, eps / n²) = RMSNorm(h, eps)): set for
            ported checkpoints (on where the config of a base checkpoint is read), and for new models that are to begin
            as their baseline, for eps outweighs their small embeddings where many sources are read. Off in Kimi K3.
        attn_res_form: `"replace"` (the paper): a sublayer reads the mixture in place of the residual stream. `"add"`:
            it reads the stream plus gate × mixture, a gate per site and head that starts at 0, so any base family is
            computed exactly, post-norms and multipliers included. The mixture is of a learned null source, the
            embedding and the closed blocks.
        attn_res_heads: the width is cut into this many equal parts, each with a softmax over depth of its own.
        attn_res_query: `"learned"`, a pseudo-query per site, or `"input"`: projected from the newest source.
        attn_res_query_rank: of that projection; default: the whole width.
        attn_res_weights: `"softmax"`, `"sigmoid"` (divided by nothing), `"static"` (softmax of learned numbers that no
            activation changes), or `"static_raw"` (those numbers themselves, 1 at the start: DenseFormer).
        attn_res_key_norm: normalise the keys.
        attn_res_window: read the embedding and this many newest sources only.

    Raises:
        StrictDataclassError: a field has the wrong type or value, or the fields contradict each other.
    """

    attn_res_mode: Literal["block", "full", "none"] = "block"
    attn_res_block_size: int | None = None
    attn_res_block_boundaries: list[int] | None = None
    attn_res_scale_norm_eps: bool = False
    attn_res_form: Literal["replace", "add"] = "replace"
    attn_res_heads: int = 1
    attn_res_query: Literal["learned", "input"] = "learned"
    attn_res_query_rank: int | None = None
    attn_res_weights: Literal["softmax", "sigmoid", "static", "static_raw"] = "softmax"
    attn_res_key_norm: bool = True
    attn_res_window: int | None = None

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path, **kwargs) -> tuple[dict, dict]:
        """Read a `config.json` of this family or of its base family.

        A base checkpoint is one with zero queries: it is loaded without changing what it computes, so
        `attn_res_scale_norm_eps` is on unless the call says otherwise.
        """
        config_dict, kwargs = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        model_type = config_dict.get("model_type", cls.model_type)
        if model_type not in (cls.model_type, cls.base_model_type()):
            raise ValueError(
                f"{pretrained_model_name_or_path}: model_type is {model_type!r}, but {cls.__name__} reads only "
                f"{cls.model_type!r} and {cls.base_model_type()!r}."
            )
        if model_type != cls.model_type:
            config_dict = {"attn_res_scale_norm_eps": True} | config_dict
        return {**config_dict, "model_type": cls.model_type}, kwargs

    @classmethod
    def base_model_type(cls) -> str:
        """Return the model type of the base family in transformers."""
        return cls.model_type.removeprefix(TYPE_PREFIX)

    @classmethod
    def class_names(cls) -> dict[str, str]:
        """Return the name of this family's class for each Auto class, as far as the base family has one."""
        named = {auto_class: names.get(cls.base_model_type()) for auto_class, names in AUTO_CLASSES.items()}
        return {auto_class: PREFIX + name for auto_class, name in named.items() if isinstance(name, str)}

    def remote_code(self) -> dict[str, str]:
        """Return the `auto_map` of a checkpoint of this family: the class in its code files for each Auto class."""
        config = {"AutoConfig": f"configuration_attnres.{type(self).__name__}"}
        return config | {auto: f"modeling_attnres.{name}" for auto, name in self.class_names().items()}

    def validate_attn_res(self) -> None:
        """Check that the fields describe blocks that exist, and a norm's eps that can be scaled.

        It runs on construction, on saving and before a model is built.
        """
        # Fields of the base, and misspelt ones
        for name, value in vars(self).items():
            if name.endswith(NORM_EPS_ENDINGS) and isinstance(value, float) and not 0 <= value < math.inf:
                raise ValueError(f"{name} must be finite and not negative, got {value}.")
        known = set(AttnResConfigMixin.__dataclass_fields__)
        for name in vars(self).keys() - known:
            if name.startswith("attn_res_"):
                raise ValueError(f"{name} is no field of {type(self).__name__}; it has {', '.join(sorted(known))}.")
        if self.num_hidden_layers < 1 and self.attn_res_mode != "none":
            raise ValueError(f"num_hidden_layers must be at least 1, got {self.num_hidden_layers}.")
        # Blocks: a size or boundaries, within the layers
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

        if self.attn_res_mode != "none":
            self._validate_form()

    def _validate_form(self) -> None:
        """Check the fields of the form, and that they go together."""
        # Each by itself
        heads, rank, width = self.attn_res_heads, self.attn_res_query_rank, self.hidden_size
        if heads < 1 or width % heads != 0:
            raise ValueError(f"attn_res_heads must divide hidden_size ({width}) into equal parts, got {heads}.")
        if self.attn_res_window is not None and self.attn_res_window < 1:
            raise ValueError(f"attn_res_window must be at least 1 source, got {self.attn_res_window}.")
        if rank is not None and not 1 <= rank <= width:
            raise ValueError(f"attn_res_query_rank must be from 1 to hidden_size ({width}), got {rank}.")
        # Together
        weights, static = self.attn_res_weights, self.attn_res_weights.startswith("static")
        if rank is not None and self.attn_res_query != "input":
            raise ValueError(f"attn_res_query_rank={rank} needs attn_res_query='input'; a learned query has no rank.")
        of_static = "static weights are one number per site and source, made of no query, key or head"
        of_null = "the null source takes part in a softmax, which these weights are not"
        for field, refused, reason in (
            ("attn_res_query='input'", static and self.attn_res_query == "input", of_static),
            ("attn_res_key_norm=False", static and not self.attn_res_key_norm, of_static),
            (f"attn_res_heads={heads}", static and heads > 1, of_static),
            ("attn_res_form='add'", weights in ("sigmoid", "static_raw") and self.attn_res_form == "add", of_null),
        ):
            if refused:
                raise ValueError(f"{field} does not go with attn_res_weights={weights!r}: {reason}.")

    def __post_init__(self, **kwargs):
        kwargs.pop("model_type", None)  # a base config's dict brings its own, which would shadow the class's
        self.attn_res_implementation = kwargs.pop("attn_res_implementation", "auto")
        register_in_other_libraries(type(self))
        super().__post_init__(**kwargs)

    def to_dict(self) -> dict:
        register_in_other_libraries(type(self))  # PEFT, which may be imported last, asks for the dict first
        return super().to_dict()

    @property
    def attn_res_implementation(self) -> str:
        """How to read over depth: `"auto"`, or the name of a reader (`"eager"`, `"training"`, `"two_phase"`,
        `"general"`, or one that `register_depth_reader` was given). Like `attn_implementation` a matter of the process,
        not of the checkpoint: it can be set at load or later, and is not saved."""
        return self._attn_res_implementation

    @attn_res_implementation.setter
    def attn_res_implementation(self, value: str):
        check_depth_reader(value)
        self._attn_res_implementation = value

    def _remove_keys_not_serialized(self, config_dict: dict) -> None:
        super()._remove_keys_not_serialized(config_dict)
        config_dict.pop("_attn_res_implementation", None)

    @property
    def attn_res_layout(self) -> BlockLayout:
        """Which site reads which sources; the mode is not `"none"`."""
        layers, full = self.num_hidden_layers, self.attn_res_mode == "full"
        if full:
            starts = range(layers)
        elif self.attn_res_block_boundaries is not None:
            starts = self.attn_res_block_boundaries
        else:
            starts = range(0, layers, self.attn_res_block_size or -(-layers // 8))
        return BlockLayout(layers, tuple(starts), full, self.attn_res_form == "add", self.attn_res_window)

    @property
    def attn_res_depth_form(self) -> DepthForm:
        """The form of depth attention."""
        return DepthForm(
            additive=self.attn_res_form == "add",
            heads=self.attn_res_heads,
            query=self.attn_res_query,
            query_rank=self.attn_res_query_rank,
            weights=self.attn_res_weights,
            key_norm=self.attn_res_key_norm,
        )


# ----------------------------------------------------------------------------------------------- families are derived


class FamilyError(AttributeError):
    """A class that cannot be derived; the message says why, and names similar ones."""

    def __init__(self, name: str, reason: str):
        self.reason = reason
        known = {PREFIX + names[t] for names in AUTO_CLASSES.values() for t in LOSSLESS_FAMILIES if t in names}
        known |= {config_name(t) for t in LOSSLESS_FAMILIES if t in CONFIG_MAPPING_NAMES}
        near = difflib.get_close_matches(name, sorted(known), n=3)
        super().__init__(f"{name}: {reason}" + (f" Near names: {', '.join(near)}." if near else ""))


@contextlib.contextmanager
def asked_for(name: str):
    """Have a FamilyError that is raised within name the class that was asked for."""
    try:
        yield
    except FamilyError as error:
        raise FamilyError(name, error.reason) from None


def base_of(name: str) -> type:
    """Return the class of transformers that `AttnRes…` extends.

    Raises:
        FamilyError: there is none.
    """
    base_name = name.removeprefix(PREFIX)
    base = getattr(transformers, base_name, None) if base_name else None
    if not isinstance(base, type):
        raise FamilyError(
            name, f"transformers {transformers.__version__} has no {base_name or 'class without a name'}."
        )
    return base


def derive_config(name: str) -> type:
    """Make the config class `AttnRes{Base}Config`.

    Raises:
        FamilyError: transformers has no such config, or its family has no causal language model.
    """
    base = base_of(name)
    model_type = getattr(base, "model_type", None)
    if "text_config" in getattr(base, "sub_configs", {}):
        text = type(base().text_config).__name__
        raise FamilyError(name, f"{base.__name__} is composite; the config of its text model is {PREFIX}{text}.")
    if model_type not in AUTO_CLASSES["AutoModelForCausalLM"]:
        raise FamilyError(name, f"{base.__name__} has no causal language model in transformers.")
    body = {
        "__module__": __name__,
        "__doc__": f"`{base.__name__}` with the fields of `AttnResConfigMixin`.",
        "model_type": TYPE_PREFIX + model_type,
        "base_class": base,
        "base_model_pp_plan": None,  # stages would have to exchange blocks, too
    }
    return strict(type(name, (AttnResConfigMixin, base), body))


def register_tokenizer(config_class: type) -> None:
    """Let AutoTokenizer choose for the derived family what it chooses for its base."""
    base_type, model_type = config_class.base_model_type(), config_class.model_type
    names = tokenization_auto.TOKENIZER_MAPPING_NAMES
    if base_type in names:
        names[model_type] = names[base_type]
        tokenizer_class = tokenization_auto.TOKENIZER_MAPPING.get(config_class.base_class, None)
        if tokenizer_class is not None:
            tokenization_auto.TOKENIZER_MAPPING.register(config_class, tokenizer_class, exist_ok=True)
    # model types whose published tokenizer_config.json names the wrong class
    corrected = tokenization_auto.MODELS_WITH_INCORRECT_HUB_TOKENIZER_CLASS
    if base_type in corrected:
        corrected.add(model_type)


def register_class_names(config_class: type) -> None:
    """Let programs that look a config's `architectures` up in transformers find something that loads the checkpoint.

    `transformers serve` does, when of the checkpoint's code only the config's is loaded: until the model's is, the Auto
    class that loads it stands for each of its classes.
    """
    for auto_class, name in config_class.class_names().items():
        set_in_transformers(name, getattr(transformers, auto_class))


def set_in_transformers(name: str, value: type) -> None:
    """Make `transformers.<name>` a class.

    It is set on the class of the module: transformers executes its own `__init__` twice where it loads processors, and
    what was imported before keeps the first of the two modules.
    """
    setattr(type(transformers), name, value)


def config_name(model_type: str) -> str:
    """Return the name of the config class of `attnres_…`, or of a base family's model type."""
    return PREFIX + CONFIG_MAPPING_NAMES[model_type.removeprefix(TYPE_PREFIX)]


def is_attnres_type(model_type: object) -> bool:
    """Say whether a model type is one of ours, of a base family that this release of transformers has."""
    return (
        isinstance(model_type, str)
        and model_type.startswith(TYPE_PREFIX)
        and model_type.removeprefix(TYPE_PREFIX) in AUTO_CLASSES["AutoModelForCausalLM"]
    )


# Module -> how the names of its tables by model type begin
OTHER_TABLES = {
    "peft.utils.constants": "TRANSFORMERS_MODELS_TO_",  # what is adapted by default
    "peft.utils.transformers_weight_conversion": "_MODEL_TO_CONVERSION_PATTERN",  # its copy: rules for experts
    "peft.tuners.adaption_prompt.config": "TRANSFORMERS_MODEL_CONFIG",
    "liger_kernel.transformers.monkey_patch": "MODEL_TYPE_TO_APPLY_LIGER_FN",
}


def register_in_other_libraries(config_class: type) -> None:
    """Let the libraries that are loaded now do for the derived model type what they do for its base."""
    base_type, model_type = config_class.base_model_type(), config_class.model_type
    for module, beginning in OTHER_TABLES.items():
        if module not in sys.modules:
            continue
        for name, table in vars(sys.modules[module]).items():
            if name.startswith(beginning) and isinstance(table, dict) and base_type in table:
                table.setdefault(model_type, table[base_type])


def __getattr__(name: str) -> type:
    if not (name.startswith(PREFIX) and name.endswith("Config")):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    with asked_for(name):
        globals()[name] = config_class = derive_config(name)
        register_tokenizer(config_class)
        models = sys.modules.get(f"{__package__}.modeling_attnres")
        if models is None:  # only configs are wanted so far
            register_class_names(config_class)
        else:
            try:
                models.register_with_auto_classes(config_class)
            except BaseException:
                del globals()[name]  # the family does not qualify, and says so each time it is asked for
                raise
    return config_class
