"""An independent float64 computation of what every sublayer reads, fed each sublayer's real output.

It knows the paper's definition and a model's config fields, and shares no code with the implementation.
"""

import torch


class Recorder:
    """Collects the embedding, every sublayer's output and what every norm received, through forward hooks."""

    def __init__(self, model):
        self.embedding, self.outputs, self.inputs = None, {}, {}
        self.handles = [model.embed_tokens.register_forward_hook(self._keep_embedding)]
        for index, layer in enumerate(model.layers):
            for site, sublayer, norm in (
                (2 * index, layer.self_attn, layer.input_layernorm),
                (2 * index + 1, layer.mlp, layer.post_attention_layernorm),
            ):
                self.handles += [
                    sublayer.register_forward_hook(self._keep_output(site)),
                    norm.register_forward_pre_hook(self._keep_input(site)),
                ]
        self.handles.append(model.norm.register_forward_pre_hook(self._keep_input(2 * len(model.layers))))

    def _keep_embedding(self, module, args, output):
        self.embedding = output.detach().double()

    def _keep_output(self, site):
        def hook(module, args, output):
            self.outputs[site] = (output[0] if isinstance(output, tuple) else output).detach().double()

        return hook

    def _keep_input(self, site):
        def hook(module, args):
            self.inputs[site] = args[0].detach().double()

        return hook

    def __enter__(self):
        return self

    def __exit__(self, *_):
        for handle in self.handles:
            handle.remove()


def first_sublayers(config) -> set[int]:
    """The sublayers that open a block, from the config fields alone."""
    if config.attn_res_mode == "full":
        return set(range(2 * config.num_hidden_layers))
    if config.attn_res_block_boundaries is not None:
        return {2 * layer for layer in config.attn_res_block_boundaries}
    size = config.attn_res_block_size
    if size is None:
        size = (config.num_hidden_layers + 7) // 8
    return set(range(0, 2 * config.num_hidden_layers, 2 * size))


def expected_inputs(record: Recorder, attn_res, config) -> tuple[list[torch.Tensor], list[torch.Tensor]]:
    """The input and the depth weights of every site, in float64, in order, the output site last; of every form."""
    layers, additive = config.num_hidden_layers, config.attn_res_form == "add"
    given = {name: parameter.detach().double() for name, parameter in attn_res.named_parameters()}
    opening, blocks, running = first_sublayers(config), [], [record.embedding]
    stream = record.embedding
    inputs, weights = [], []
    for site in range(2 * layers + 1):
        if site in opening:
            blocks.append(sum(running))
            running = []
        sources = list(blocks)
        if additive:
            sources.insert(0, given["null"].expand_as(record.embedding))
        if running and not (additive and config.attn_res_mode == "block"):
            sources.append(sum(running))
        if config.attn_res_window is not None:
            first = 2 if additive else 1
            sources = sources[:first] + sources[first:][-config.attn_res_window :]
        mixture, weight = expected_mixture(torch.stack(sources), given, site, config)
        if additive:
            gate = given["gate"][site].repeat_interleave(config.hidden_size // config.attn_res_heads)
            inputs.append(stream + gate * mixture)
        else:
            inputs.append(mixture)
        weights.append(weight.movedim(0, -1))
        if site < 2 * layers:
            running.append(record.outputs[site])
            stream = stream + record.outputs[site]
    return inputs, weights


def expected_mixture(sources_NBTD, given, site, config) -> tuple[torch.Tensor, torch.Tensor]:
    """The weighted sum of a site's sources, head by head, and its weights `[N, B, T]`, or per head `[N, B, T, H]`."""
    if config.attn_res_weights.startswith("static"):
        logits = given["static"][site, : len(sources_NBTD)].view(-1, 1, 1).expand(sources_NBTD.shape[:3])
        weight = logits if config.attn_res_weights == "static_raw" else torch.softmax(logits, 0)
        return (weight[..., None] * sources_NBTD).sum(0), weight
    eps = config.rms_norm_eps
    keys = sources_NBTD
    if config.attn_res_key_norm:
        keys = keys / (keys**2).mean(-1, keepdim=True).add(eps).sqrt() * given["norm"][site]
    if config.attn_res_query == "learned":
        query = given["query"][site].expand_as(sources_NBTD[0])
    else:
        newest = sources_NBTD[-1]
        query = newest / (newest**2).mean(-1, keepdim=True).add(eps).sqrt()
        if "query_down" in given:
            query = torch.einsum("btd,rd->btr", query, given["query_down"][site])
        query = torch.einsum("btr,dr->btd", query, given["query_up"][site])
    parts, weights = [], []
    for part in torch.arange(config.hidden_size).chunk(config.attn_res_heads):
        logits = (keys[..., part] * query[..., part]).sum(-1)
        weight = torch.sigmoid(logits) if config.attn_res_weights == "sigmoid" else torch.softmax(logits, 0)
        parts.append((weight[..., None] * sources_NBTD[..., part]).sum(0))
        weights.append(weight)
    return torch.cat(parts, -1), weights[0] if len(weights) == 1 else torch.stack(weights, -1)


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm-wise, in float64."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
