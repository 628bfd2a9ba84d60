"""The blocks and the form of a config's depth attention, in words, and the blocks as a line."""

from transformers import PreTrainedConfig

from modeling_attnres.configuration_attnres import AttnResConfigMixin


def describe_blocks(config: PreTrainedConfig) -> str:
    """Return the blocks in words, as ranges of decoder layers."""
    if config.attn_res_mode == "none":
        return "none: standard residuals"
    if config.attn_res_mode == "full":
        return f"{2 * config.num_hidden_layers} sublayers, each a source of its own"
    blocks = config.attn_res_layout.blocks
    layers = ", ".join(f"{block[0]}-{block[-1]}" if len(block) > 1 else f"{block[0]}" for block in blocks)
    return f"{len(blocks)} (decoder layers {layers})"


def describe_form(config: PreTrainedConfig) -> str:
    """Return the form in words: the fields that are not the paper's."""
    names = ("form", "heads", "query", "query_rank", "weights", "key_norm", "window")
    defaults = {name: AttnResConfigMixin.__dataclass_fields__[f"attn_res_{name}"].default for name in names}
    given = {name: getattr(config, f"attn_res_{name}") for name in names}
    return ", ".join(f"{name} {value}" for name, value in given.items() if value != defaults[name]) or "the paper's"


def draw_blocks(config: PreTrainedConfig) -> str:
    """Return the sources as a line of decoder layers: `E` is the embedding, brackets hold a block."""
    layers = range(config.num_hidden_layers)
    if config.attn_res_mode == "none":
        return "E " + " ".join(map(str, layers)) + " → output"
    if config.attn_res_mode == "full":
        return "[E] " + " ".join(f"[{layer}a] [{layer}m]" for layer in layers) + " → output (a: attention, m: MLP)"
    blocks = ["[" + " ".join(map(str, block)) + "]" for block in config.attn_res_layout.blocks]
    return "[E] " + " ".join(blocks) + " → output"
