# Copyright 2026 The attention-residuals authors. Licensed under the Apache License, Version 2.0.
"""Decoders of transformers with Attention Residuals.

What differs from a base family is written once: `AttnResDecoderLayer` (a layer reads its two sublayers' inputs through
depth attention and returns a running sum), `AttnResModel` (the loop over layers, which closes the blocks) and
`AttnResForCausalLM`. A family, at the end of the file, names its base classes and its masks.

State is functional: a layer takes the closed blocks and the running sum as tensors and returns a new running sum; it
changes nothing it received. So gradient checkpointing recomputes what the first pass computed, and nothing of depth
attention enters the KV cache.

Shapes: B batch, T tokens, D hidden size, L decoder layers, S = 2L + 1 sites, N closed blocks.
"""

from dataclasses import dataclass

import torch
from torch import nn
from transformers import (
    DeepseekV3ForCausalLM,
    DeepseekV3Model,
    GenerationMixin,
    KimiLinearForCausalLM,
    KimiLinearModel,
    LlamaForCausalLM,
    LlamaModel,
    MixtralForCausalLM,
    MixtralModel,
    PreTrainedModel,
    Qwen3MoeForCausalLM,
    Qwen3MoeModel,
)
from transformers.cache_utils import Cache, DynamicCache
from transformers.conversion_mapping import (
    get_checkpoint_conversion_mapping,
    register_checkpoint_conversion_mapping,
)
from transformers.masking_utils import (
    create_causal_mask,
    create_recurrent_attention_mask,
    create_sliding_window_causal_mask,
)
from transformers.modeling_outputs import MoeCausalLMOutputWithPast, MoeModelOutputWithPast
from transformers.models.deepseek_v3.modeling_deepseek_v3 import (
    DeepseekV3DecoderLayer,
    DeepseekV3RMSNorm,
    DeepseekV3RotaryEmbedding,
)
from transformers.models.kimi_linear.modeling_kimi_linear import KimiLinearDecoderLayer, KimiLinearRMSNorm
from transformers.models.llama.modeling_llama import LlamaDecoderLayer, LlamaRMSNorm, LlamaRotaryEmbedding
from transformers.models.mixtral.modeling_mixtral import MixtralDecoderLayer, MixtralRMSNorm, MixtralRotaryEmbedding
from transformers.models.qwen3_moe.modeling_qwen3_moe import (
    Qwen3MoeDecoderLayer,
    Qwen3MoeRMSNorm,
    Qwen3MoeRotaryEmbedding,
)
from transformers.utils import can_return_tuple
from transformers.utils.deprecation import deprecate_kwarg
from transformers.utils.generic import merge_with_config_defaults
from transformers.utils.output_capturing import OutputRecorder, capture_outputs

from .attention_residuals import (
    DepthAttention,
    DepthRead,
    EagerSources,
    TwoPhaseSources,
    add_output,
    depth_attention_mapping,
    with_literal_dots,
)
from .configuration_attnres import (
    AttnResDeepseekV3Config,
    AttnResKimiLinearConfig,
    AttnResLlamaConfig,
    AttnResMixtralConfig,
    AttnResQwen3MoeConfig,
    base_class,
)


@dataclass
class AttnResModelOutput(MoeModelOutputWithPast):
    """What a model returns: its base family's outputs and, if asked for, the depth weights of every site."""

    depth_attentions: tuple[torch.Tensor, ...] | None = None


@dataclass
class AttnResCausalLMOutput(MoeCausalLMOutputWithPast):
    """What a causal LM returns that is asked for depth weights: they are a field, since FSDP drops what is none."""

    depth_attentions: tuple[torch.Tensor, ...] | None = None


class AttnResDecoderLayer:
    """A decoder layer whose attention and MLP read through depth attention. Mixed into a base family's layer."""

    def __init__(self, config, layer_idx: int):
        super().__init__(config, layer_idx)
        self.is_full = config.attn_res_mode == "full"
        self.starts_block = layer_idx in config.attn_res_block_starts
        self.attention_read, self.mlp_read = DepthRead(), DepthRead()
        scale_norm_eps(self.input_layernorm, config, site=2 * layer_idx)
        scale_norm_eps(self.post_attention_layernorm, config, site=2 * layer_idx + 1)

    def forward(
        self,
        hidden_states: torch.Tensor,
        *site_inputs: torch.Tensor,
        stream_dtype: torch.dtype,
        way: str = "plain",
        **kwargs,
    ) -> tuple[torch.Tensor, ...]:
        """Run both sublayers.

        Args:
            hidden_states: the running sum `[B, T, D]` that the layer before returned, in the statistics dtype. A layer
                that starts a block finds it among the closed blocks and does not read it here.
            site_inputs: what the attention's read takes beside the running sum, then what the MLP's takes, as many:
                tensors, one by one, for checkpointing to find.
            stream_dtype: what the sublayers are given, the dtype of the embedding.
            way: how `DepthRead` reads.
            kwargs: what the base family's attention takes (mask, cache, position embeddings, …).

        Returns:
            The new running sum; in Full mode the MLP's output, and the attention's output as a source to close.
        """
        half = len(site_inputs) // 2

        running_sum = None if self.starts_block else hidden_states
        inputs, _ = self.attention_read(running_sum, *site_inputs[:half], way=way)
        attention_output = self.attend(self.input_layernorm(inputs.to(stream_dtype)), **kwargs)

        running_sum = add_output(running_sum, attention_output)
        inputs, _ = self.mlp_read(running_sum, *site_inputs[half:], way=way)
        mlp_output = self.mlp(self.post_attention_layernorm(inputs.to(stream_dtype)))

        if self.is_full:
            return mlp_output, attention_output
        return (add_output(running_sum, mlp_output),)

    def attend(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        attention_output, _ = self.self_attn(hidden_states=hidden_states, **kwargs)
        return attention_output


def scale_norm_eps(norm: nn.Module, config, site: int) -> None:
    """Let a norm that reads the mean of n sources use eps / n²: then it equals the base's norm of their sum."""
    if config.attn_res_scale_norm_eps:
        norm.variance_epsilon = config.rms_norm_eps / config.attn_res_num_sources(site) ** 2


class AttnResPreTrainedModel:
    """What models and causal LMs of every family share. Mixed into the base family's classes."""

    def _init_weights(self, module: nn.Module) -> None:
        super()._init_weights(module)
        if isinstance(module, DepthAttention):
            module.reset_parameters()

    def post_init(self) -> None:
        """As the base; of the modules not to split it names those there are, since FSDP refuses any other."""
        super().post_init()
        self._no_split_modules &= {type(module).__name__ for module in self.modules()}

    @classmethod
    def _can_set_experts_implementation(cls) -> bool:
        """As the base family can: transformers tells from the source code of the module that defines the class."""
        return base_class(cls)._can_set_experts_implementation()

    def wants_depth_attentions(self, asked: bool | None) -> bool:
        """What the call asked for, or else the config."""
        return bool(getattr(self.config, "output_depth_attentions", False) if asked is None else asked)

    def save_pretrained(self, save_directory, **kwargs) -> None:
        """Save as the base does; the config names the remote code of every Auto class, whichever class is saved."""
        self.config.auto_map = self.config.remote_code()
        super().save_pretrained(save_directory, **kwargs)


class AttnResModel(AttnResPreTrainedModel):
    """The decoder without its head. Mixed into a base family's model; a family names the parts below."""

    decoder_layer_class: type[nn.Module]
    base_decoder_layer_class: type[nn.Module]  # used as it is in mode "none"
    norm_class: type[nn.Module]
    rotary_class: type[nn.Module] | None = None

    def __init__(self, config):
        config.validate_attn_res()  # fields may have been set since the config was made
        PreTrainedModel.__init__(self, config)
        self.padding_idx = config.pad_token_id
        self.vocab_size = config.vocab_size

        has_depth_attention = config.attn_res_mode != "none"
        layer_class = self.decoder_layer_class if has_depth_attention else self.base_decoder_layer_class
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size, self.padding_idx)
        self.layers = nn.ModuleList([layer_class(config, layer_idx) for layer_idx in range(config.num_hidden_layers)])
        self.norm = self.norm_class(config.hidden_size, eps=config.rms_norm_eps)
        if self.rotary_class is not None:
            self.rotary_emb = self.rotary_class(config=config)
        if has_depth_attention:
            self.attn_res = DepthAttention(config.num_hidden_layers, config.hidden_size)
            self.output_read = DepthRead()
            scale_norm_eps(self.norm, config, site=2 * config.num_hidden_layers)
        self.gradient_checkpointing = False
        self.post_init()

    def attention_masks(self, attention_mask, **mask_kwargs) -> list:
        """The attention mask of each decoder layer."""
        mask = create_causal_mask(attention_mask=attention_mask, **mask_kwargs)
        return [mask] * self.config.num_hidden_layers

    @deprecate_kwarg("past_key_values", "5.40.0", new_name="cache")
    @merge_with_config_defaults
    @capture_outputs
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        use_cache: bool | None = None,
        output_depth_attentions: bool | None = None,
        **kwargs,
    ) -> AttnResModelOutput:
        """The base model's forward, with depth attention in the loop over layers.

        `output_depth_attentions=True` adds `depth_attentions`: the depth weights of every site in order, the output
        site last, each `[B, T, sources]` with rows summing to 1. With `output_hidden_states=True` entry i > 0 is the
        running sum that decoder layer i - 1 returned, in fp32 (in Full mode its MLP's output), the last one the final
        norm's.
        """
        if (input_ids is None) ^ (inputs_embeds is not None):
            raise ValueError("You must specify exactly one of input_ids or inputs_embeds")
        if inputs_embeds is None:
            inputs_embeds = self.embed_tokens(input_ids)
        if use_cache and cache is None:
            cache = DynamicCache(config=self.config)
        if position_ids is None:
            past_seen_tokens = cache.get_seq_length() if cache is not None else 0
            position_ids = torch.arange(inputs_embeds.shape[1], device=inputs_embeds.device) + past_seen_tokens
            position_ids = position_ids.unsqueeze(0)
        masks = self.attention_masks(
            attention_mask,
            config=self.config,
            inputs_embeds=inputs_embeds,
            cache=cache,
            position_ids=position_ids,
        )
        output_depth_attentions = self.wants_depth_attentions(output_depth_attentions)
        kwargs.update(position_ids=position_ids, cache=cache, use_cache=use_cache)
        if self.rotary_class is not None:
            kwargs["position_embeddings"] = self.rotary_emb(inputs_embeds, position_ids=position_ids)

        if self.config.attn_res_mode == "none":
            hidden_states = inputs_embeds
            for layer, mask in zip(self.layers, masks):
                hidden_states = layer(hidden_states, attention_mask=mask, **kwargs)
        else:
            hidden_states = self.attend_over_depth(inputs_embeds, masks, output_depth_attentions, **kwargs)
        return AttnResModelOutput(last_hidden_state=self.norm(hidden_states), cache=cache)

    def attend_over_depth(
        self, hidden_states: torch.Tensor, masks: list, output_depth_attentions: bool, **kwargs
    ) -> torch.Tensor:
        """The loop over layers: from the embedding to what the output site reads, both `[B, T, D]`."""
        stream_dtype = hidden_states.dtype
        way = self.way_to_read(output_depth_attentions)
        sources = self.new_sources(way, self.attn_res(hidden_states))
        for index, (layer, mask) in enumerate(zip(self.layers, masks)):
            if layer.starts_block:
                sources.close(hidden_states)
            hidden_states, *outputs_to_close = layer(
                hidden_states,
                *sources.at(2 * index),
                *sources.at(2 * index + 1),
                stream_dtype=stream_dtype,
                way=way,
                attention_mask=mask,
                **kwargs,
            )
            for output in outputs_to_close:
                sources.close(output)

        sources.move_to(hidden_states.device)
        output_inputs = sources.at(2 * len(self.layers))
        inputs, _ = self.output_read(hidden_states, *output_inputs, way=way)
        return inputs.to(stream_dtype)

    def way_to_read(self, output_depth_attentions: bool) -> str:
        """Depth weights need plain reads (a hook records them), gradients need blocks one by one."""
        if output_depth_attentions or self.config.attn_res_implementation == "eager":
            return "plain"
        return "lean" if torch.is_grad_enabled() else "two_phase"

    def new_sources(self, way: str, queries_SD: torch.Tensor) -> EagerSources | TwoPhaseSources:
        """What holds the closed blocks of one pass."""
        config, eps = self.config, self.config.rms_norm_eps
        if way != "two_phase":
            return EagerSources(queries_SD, eps)
        num_sources = config.attn_res_num_sources(2 * config.num_hidden_layers) - 1
        return TwoPhaseSources(queries_SD, eps, config.attn_res_block_starts, num_sources)


class AttnResForCausalLM(AttnResPreTrainedModel):
    """The decoder with its language-model head. Mixed into a base family's causal LM."""

    model_class: type[PreTrainedModel]

    def __init__(self, config):
        PreTrainedModel.__init__(self, config)
        self.model = self.model_class(config)
        self.vocab_size = config.vocab_size
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.post_init()

    @can_return_tuple
    def forward(
        self,
        input_ids: torch.LongTensor | None = None,
        attention_mask: torch.Tensor | None = None,
        position_ids: torch.LongTensor | None = None,
        cache: Cache | None = None,
        inputs_embeds: torch.Tensor | None = None,
        labels: torch.LongTensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | torch.Tensor = 0,
        output_depth_attentions: bool | None = None,
        **kwargs,
    ):
        """The base family's forward; `output_depth_attentions=True` adds `depth_attentions`, as the model does."""
        kwargs.update(
            input_ids=input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            inputs_embeds=inputs_embeds,
            labels=labels,
            use_cache=use_cache,
            logits_to_keep=logits_to_keep,
            output_depth_attentions=self.wants_depth_attentions(output_depth_attentions),
        )
        if cache is not None:  # else leave room for `past_key_values`, which the base still accepts
            kwargs["cache"] = cache
        if not kwargs["output_depth_attentions"]:
            return super().forward(**kwargs)

        # The base passes on only the outputs it knows, so the model's own output is kept on its way through.
        model_outputs = []
        handle = self.model.register_forward_hook(lambda module, args, output: model_outputs.append(output))
        try:
            outputs = super().forward(**kwargs)
        finally:
            handle.remove()
        return AttnResCausalLMOutput(**outputs, depth_attentions=model_outputs[0].depth_attentions)


# ------------------------------------------------------------------------------------------------------------ families


class AttnResLlamaDecoderLayer(AttnResDecoderLayer, LlamaDecoderLayer):
    pass


class AttnResLlamaModel(AttnResModel, LlamaModel):
    config: AttnResLlamaConfig
    decoder_layer_class = AttnResLlamaDecoderLayer
    base_decoder_layer_class = LlamaDecoderLayer
    norm_class = LlamaRMSNorm
    rotary_class = LlamaRotaryEmbedding


class AttnResLlamaForCausalLM(AttnResForCausalLM, LlamaForCausalLM, GenerationMixin):
    config: AttnResLlamaConfig
    model_class = AttnResLlamaModel


class SlidingWindowModel(AttnResModel):
    """A model whose attention may look back over a window only."""

    def attention_masks(self, attention_mask, **mask_kwargs) -> list:
        windowed = self.config.sliding_window is not None
        create_mask = create_sliding_window_causal_mask if windowed else create_causal_mask
        return [create_mask(attention_mask=attention_mask, **mask_kwargs)] * self.config.num_hidden_layers


class AuxiliaryLossForCausalLM(AttnResForCausalLM):
    """A causal LM whose base adds a load-balancing loss over its routers."""

    def __init__(self, config):
        super().__init__(config)
        self.router_aux_loss_coef = config.router_aux_loss_coef
        self.num_experts = config.num_experts
        self.num_experts_per_tok = config.num_experts_per_tok


class AttnResMixtralDecoderLayer(AttnResDecoderLayer, MixtralDecoderLayer):
    pass


class AttnResMixtralModel(SlidingWindowModel, MixtralModel):
    config: AttnResMixtralConfig
    decoder_layer_class = AttnResMixtralDecoderLayer
    base_decoder_layer_class = MixtralDecoderLayer
    norm_class = MixtralRMSNorm
    rotary_class = MixtralRotaryEmbedding


class AttnResMixtralForCausalLM(AuxiliaryLossForCausalLM, MixtralForCausalLM, GenerationMixin):
    config: AttnResMixtralConfig
    model_class = AttnResMixtralModel


class AttnResQwen3MoeDecoderLayer(AttnResDecoderLayer, Qwen3MoeDecoderLayer):
    pass


class AttnResQwen3MoeModel(SlidingWindowModel, Qwen3MoeModel):
    config: AttnResQwen3MoeConfig
    decoder_layer_class = AttnResQwen3MoeDecoderLayer
    base_decoder_layer_class = Qwen3MoeDecoderLayer
    norm_class = Qwen3MoeRMSNorm
    rotary_class = Qwen3MoeRotaryEmbedding


class AttnResQwen3MoeForCausalLM(AuxiliaryLossForCausalLM, Qwen3MoeForCausalLM, GenerationMixin):
    config: AttnResQwen3MoeConfig
    model_class = AttnResQwen3MoeModel


class AttnResDeepseekV3DecoderLayer(AttnResDecoderLayer, DeepseekV3DecoderLayer):
    pass


class AttnResDeepseekV3Model(AttnResModel, DeepseekV3Model):
    config: AttnResDeepseekV3Config
    decoder_layer_class = AttnResDeepseekV3DecoderLayer
    base_decoder_layer_class = DeepseekV3DecoderLayer
    norm_class = DeepseekV3RMSNorm
    rotary_class = DeepseekV3RotaryEmbedding


class AttnResDeepseekV3ForCausalLM(AttnResForCausalLM, DeepseekV3ForCausalLM, GenerationMixin):
    config: AttnResDeepseekV3Config
    model_class = AttnResDeepseekV3Model


class AttnResKimiLinearDecoderLayer(AttnResDecoderLayer, KimiLinearDecoderLayer):
    def attend(self, hidden_states: torch.Tensor, **kwargs) -> torch.Tensor:
        if self.block_type != "linear_attention":
            return super().attend(hidden_states, **kwargs)
        for name in ("position_ids", "use_cache"):  # the base's layer withholds them from KDA
            kwargs.pop(name, None)
        return self.self_attn(hidden_states=hidden_states, **kwargs)


class AttnResKimiLinearModel(AttnResModel, KimiLinearModel):
    config: AttnResKimiLinearConfig
    decoder_layer_class = AttnResKimiLinearDecoderLayer
    base_decoder_layer_class = KimiLinearDecoderLayer
    norm_class = KimiLinearRMSNorm

    def attention_masks(self, attention_mask, **mask_kwargs) -> list:
        masks = attention_mask
        if not isinstance(attention_mask, dict):  # generation may have made them already
            masks = {
                "full_attention": create_causal_mask(attention_mask=attention_mask, **mask_kwargs),
                "linear_attention": create_recurrent_attention_mask(attention_mask=attention_mask, **mask_kwargs),
            }
        return [masks[layer_type] for layer_type in self.config.layer_types]


class AttnResKimiLinearForCausalLM(AttnResForCausalLM, KimiLinearForCausalLM, GenerationMixin):
    config: AttnResKimiLinearConfig
    model_class = AttnResKimiLinearModel


FAMILIES = {
    AttnResLlamaConfig: (AttnResLlamaModel, AttnResLlamaForCausalLM),
    AttnResMixtralConfig: (AttnResMixtralModel, AttnResMixtralForCausalLM),
    AttnResQwen3MoeConfig: (AttnResQwen3MoeModel, AttnResQwen3MoeForCausalLM),
    AttnResDeepseekV3Config: (AttnResDeepseekV3Model, AttnResDeepseekV3ForCausalLM),
    AttnResKimiLinearConfig: (AttnResKimiLinearModel, AttnResKimiLinearForCausalLM),
}

for _config_class, _model_classes in FAMILIES.items():
    _layer_class = _model_classes[0].decoder_layer_class
    for _class in _model_classes:
        # the depth parameters are a unit of their own: of one dtype, as FSDP wants, and on one device
        _class._no_split_modules = [*_class._no_split_modules, _layer_class.__name__, DepthAttention.__name__]
        _class._can_record_outputs = {
            **_class._can_record_outputs,
            "depth_attentions": OutputRecorder(DepthRead, index=1),
        }
        _class._keep_in_fp32_modules_strict = [*(_class._keep_in_fp32_modules_strict or []), "attn_res"]
    # A custom class gets no rules of its base family, so they are registered with ours.
    _base_rules = get_checkpoint_conversion_mapping(_config_class.base_model_type()) or []
    register_checkpoint_conversion_mapping(
        _config_class.model_type,
        [*depth_attention_mapping(), *map(with_literal_dots, _base_rules)],
        overwrite=True,  # the same code may be loaded both as this package and as remote code
    )


__all__ = [_class.__name__ for _classes in FAMILIES.values() for _class in _classes]
