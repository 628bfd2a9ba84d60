"""The blocks of a config, in words and as a line."""

from transformers import PreTrainedConfig


def describe_blocks(config: PreTrainedConfig) -> str:
    """Return the blocks in words, as ranges of decoder layers."""
    if config.attn_res_mode == "none":
        return "none: standard residuals"
    if config.attn_res_mode == "full":
        return f"{2 * config.num_hidden_layers} sublayers, each a source of its own"
    blocks = config.attn_res_layout.blocks
    layers = ", ".join(f"{block[0]}-{block[-1]}" if len(block) > 1 else f"{block[0]}" for block in blocks)
    return f"{len(blocks)} (decoder layers {layers})"


def draw_blocks(config: PreTrainedConfig) -> str:
    """Return the sources as a line of decoder layers: `E` is the embedding, brackets hold a block."""
    layers = range(config.num_hidden_layers)
    if config.attn_res_mode == "none":
        return "E " + " ".join(map(str, layers)) + " → output"
    if config.attn_res_mode == "full":
        return "[E] " + " ".join(f"[{layer}a] [{layer}m]" for layer in layers) + " → output (a: attention, m: MLP)"
    blocks = ["[" + " ".join(map(str, block)) + "]" for block in config.attn_res_layout.blocks]
    return "[E] " + " ".join(blocks) + " → output"
