"""Tiny models of every family, and the block layouts the tests go through."""

from dataclasses import dataclass

import torch
import transformers

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
        """`Config`, `Model` or `ForCausalLM` of the base family."""
        return getattr(transformers, f"{self.name}{kind}")

    def ours(self, kind: str):
        """`Config`, `Model` or `ForCausalLM` with Attention Residuals."""
        return getattr(modeling_attnres, f"AttnRes{self.name}{kind}")

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

FAMILIES = [
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
BY_NAME = {family.name: family for family in FAMILIES}

LAYOUTS = {
    "block": {},
    "full": {"attn_res_mode": "full"},
    "blocks of 4, not dividing": {"attn_res_block_size": 4},
    "uneven blocks": {"attn_res_block_boundaries": [0, 1, 4]},
    "one block": {"attn_res_block_boundaries": [0]},
    "more than fit": {"attn_res_block_size": 100},
}


def tokens(batch: int = 2, length: int = 24, seed: int = 0) -> torch.Tensor:
    """Random tokens without special ones."""
    return torch.randint(3, 99, (batch, length), generator=torch.Generator().manual_seed(seed))
