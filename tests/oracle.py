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
    """The input and the depth weights of every site, in float64, in order, the output site last."""
    layers = config.num_hidden_layers
    query = attn_res.query * attn_res.norm  # one row a site

    opening, blocks, running = first_sublayers(config), [], [record.embedding]
    inputs, weights = [], []
    for site in range(2 * layers + 1):
        if site in opening:
            blocks.append(sum(running))
            running = []
        sources = torch.stack(blocks + ([sum(running)] if running else []))
        rms = (sources**2).mean(-1, keepdim=True).add(config.rms_norm_eps).sqrt()
        logits = ((sources / rms) * query[site].detach().double()).sum(-1)
        weight = torch.exp(logits - logits.max(0).values)
        weight = weight / weight.sum(0)
        inputs.append((weight[..., None] * sources).sum(0))
        weights.append(weight.movedim(0, -1))
        if site < 2 * layers:
            running.append(record.outputs[site])
    return inputs, weights


def relative_error(found: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm-wise, in float64."""
    return ((found.double() - expected.double()).norm() / expected.double().norm()).item()
