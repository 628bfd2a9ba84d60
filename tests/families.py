"""Tiny models of every family, and the block layouts the tests go through."""

import inspect
from dataclasses import dataclass

import torch
import transformers
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, MODEL_MAPPING_NAMES

import modeling_attnres


_SHARED = {
    "vocab_size": 99,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
    "initializer_range": 0.1,  # large enough for layers to matter
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


@dataclass(frozen=True)
class Family:
    """A family by its name in transformers, with a tiny configuration."""

    name: str
    tiny: dict

    def base(self, kind: str):
        """`Config`, `Model`, `ForCausalLM` or another head of the base family."""
        if kind == "Config":  # Qwen3_5ForCausalLM's is Qwen3_5TextConfig
            return self.base("ForCausalLM").config_class
        if kind == "Model":
            return getattr(transformers, MODEL_MAPPING_NAMES[self.base("Config").model_type])
        return getattr(transformers, f"{self.name}{kind}")

    def ours(self, kind: str):
        """The same with Attention Residuals."""
        return getattr(modeling_attnres, f"AttnRes{self.base(kind).__name__}")

    def config(self, **fields):
        return self.ours("Config")(**self.tiny | fields)

    def causal_lm(self, seed: int = 0, dtype: torch.dtype = torch.float32, **fields):
        """A model in eval mode with random weights, queries and key norms included."""
        torch.manual_seed(seed)
        model = self.ours("ForCausalLM")(self.config(**fields)).eval()
        randomise_depth(model)
        model.to(dtype)
        if hasattr(model.model, "attn_res"):
            model.model.attn_res.float()
        return model

    def base_causal_lm(self, seed: int = 0, **fields):
        torch.manual_seed(seed)
        return self.base("ForCausalLM")(self.base("Config")(**self.tiny | fields)).eval()


def randomise_depth(model, seed: int = 1, scale: float = 0.5) -> None:
    """Give the depth parameters the values of a trained model: queries away from zero, norms around one."""
    generator = torch.Generator().manual_seed(seed)
    for name, parameter in model.named_parameters():
        if ".attn_res." in f".{name}":
            parameter.data.add_(torch.randn(parameter.shape, generator=generator) * scale)


_GROUPED = _SHARED | {"num_key_value_heads": 2}
_EXPERTS = {"moe_intermediate_size": 16, "num_experts_per_tok": 2}
_LATENT = _EXPERTS | {
    "num_key_value_heads": 4,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 8,
    "v_head_dim": 8,
}

_FIVE = [
    Family("Llama", _GROUPED),
    Family("Mixtral", _GROUPED | {"num_local_experts": 4, "num_experts_per_tok": 2}),
    Family("Qwen3Moe", _GROUPED | _EXPERTS | {"num_experts": 8, "head_dim": 8, "mlp_only_layers": [1]}),
    Family(
        "DeepseekV3",
        _SHARED
        | _LATENT
        | {"n_routed_experts": 8, "n_group": 2, "topk_group": 1, "q_lora_rank": 16}
        | {"first_k_dense_replace": 1},
    ),
    Family("KimiLinear", _SHARED | _LATENT | {"num_local_experts": 8, "linear_head_dim": 8, "linear_num_heads": 4}),
]
FAMILIES = [family for family in _FIVE if hasattr(transformers, f"{family.name}ForCausalLM")]
BY_NAME = {family.name: family for family in FAMILIES}

# Every family of LOSSLESS_FAMILIES, by its model type in transformers: what its tiny config says beyond `_TINY`.
_TINY = _GROUPED | {"num_hidden_layers": 4, "head_dim": 8}
_MOE = _EXPERTS | {
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts"), 4),
    **dict.fromkeys(("moe_k", "moe_topk"), 2),
    **dict.fromkeys(("n_group", "topk_group", "first_k_dense_replace", "n_shared_experts"), 1),
    "shared_expert_intermediate_size": 16,
}
_MLA = _LATENT | {"q_lora_rank": 16, "head_dim": 8}
_HYBRID = {"layer_types": ["linear_attention", "full_attention"] * 2}
_DELTA = _HYBRID | {
    "linear_num_value_heads": 4,
    "linear_num_key_heads": 2,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
}
_MAMBA = {"mamba_d_state": 8, "mamba_expand": 2}
_MIXTURES = (
    *("afmoe", "aria_text", "dots1", "ernie4_5_moe", "exaone_moe", "glm4_moe", "gpt_oss", "granitemoe"),
    *("hunyuan_v1_moe", "hy_v3", "laguna", "mellum", "minimax_m2", "mixtral", "olmoe", "phimoe", "qwen2_moe"),
    *("qwen3_moe", "solar_open"),
    *("beam", "flex_olmo", "granitemoe_swa", "granitemoeshared", "jetmoe", "kolibri1", "llama4_text", "minimax"),
)

_FIELDS = {
    **{model_type: {} for model_type in modeling_attnres.ADDITIVE_FAMILIES},
    **dict.fromkeys(_MIXTURES, _MOE),
    **dict.fromkeys(("axk1", "axk2", "deepseek_v2", "deepseek_v3", "glm4_moe_lite"), _MOE | _MLA),
    "bamba": _MAMBA
    | {
        "mamba_n_heads": 8,
        "mamba_d_head": 8,
        "mamba_n_groups": 1,
        "mamba_chunk_size": 256,
        "attn_layer_indices": [1, 3],
    },
    "deepseek_v32": _MOE | _MLA | {"index_n_heads": 2, "index_head_dim": 16, "index_topk": 64},
    "granite": {"residual_multiplier": 0.3, "embedding_multiplier": 3.0},
    "jamba": _MAMBA
    | {
        "mamba_dt_rank": 8,
        "num_experts": 4,
        "attn_layer_period": 2,
        "attn_layer_offset": 1,
        "use_mamba_kernels": False,
    },
    "kimi_linear": _MOE | _MLA | _HYBRID | {"linear_head_dim": 8, "linear_num_heads": 4},
    "mimo_v2_flash": _MOE | {"v_head_dim": 8},
    "qwen3_5_moe_text": _MOE | _DELTA,
    "qwen3_5_text": _DELTA,
    "qwen3_next": _MOE | _DELTA,
    "youtu": _MLA,
}
ADDITIVE_TABLE = {
    model_type: Family(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES[model_type].removesuffix("ForCausalLM"), _TINY | fields)
    for model_type, fields in sorted(_FIELDS.items())
    if model_type in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES  # else this release of transformers lacks it
}
TABLE = {name: family for name, family in ADDITIVE_TABLE.items() if name in modeling_attnres.LOSSLESS_FAMILIES}

LAYOUTS = {
    "block": {},
    "full": {"attn_res_mode": "full"},
    "blocks of 4, not dividing": {"attn_res_block_size": 4},
    "uneven blocks": {"attn_res_block_boundaries": [0, 1, 4]},
    "one block": {"attn_res_block_boundaries": [0]},
    "more than fit": {"attn_res_block_size": 100},
}


# The argument that takes the KV cache was renamed in the course of transformers 5.
CACHE = "cache" if "cache" in inspect.signature(transformers.LlamaModel.forward).parameters else "past_key_values"


def cache_of(outputs):
    """The KV cache among a model's outputs."""
    return getattr(outputs, CACHE)


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Random tokens without special ones."""
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(seed))
