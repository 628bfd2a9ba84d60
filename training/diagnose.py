"""The paper's figures for any checkpoint: what its depth attention reads, and what that does to magnitudes."""

import json
import math
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from transformers import PreTrainedModel

from common.files import complete_or_absent
from common.text import read_text
from modeling_attnres import is_depth_parameter

from .adapter import is_of_standard_residuals, load_adapter, read_adapter
from .depth import mean_depth_weights, mixing_matrix, semiseparable_rank, site_statistics
from .loading import TrainingError, load_attnres_config, load_config, load_tokenizer, load_weights
from .pictures import draw_by_layer, draw_depth_weights, draw_mixing_matrix, draw_sites


def diagnose_model(
    path: str,
    output: Path,
    text: Path | None,
    adapter: Path | None,
    against: str | None,
    tokens: int,
    trust_remote_code: bool = False,
) -> dict:
    """Write `diagnosis.json` and pictures to a folder that appears when they are complete; returns the diagnosis.

    Raises:
        UserError: the model has no depth attention, or no tokenizer; a file cannot be read; or the folder exists.
    """
    content, called = read_text(text)
    if output.exists() and any(output.iterdir()):
        raise TrainingError(f"{output} exists and is not empty.")
    config = load_attnres_config(path)
    if config.attn_res_mode == "none" or (adapter is not None and is_of_standard_residuals(adapter)):
        raise TrainingError(f"{adapter or path} ({config.model_type}) has no depth attention to diagnose.")
    ids = first_tokens(path, content, called, tokens, trust_remote_code)
    second_config = None if against is None else load_config(against)
    for name, vocab_size in ((path, config.vocab_size), (against, getattr(second_config, "vocab_size", math.inf))):
        if ids.max() >= vocab_size:
            raise TrainingError(f"{called}: the token {ids.max()}, but {name} has embeddings for {vocab_size}.")
    settings = None if adapter is None else read_adapter(adapter)
    model = load_weights(path, config, dtype=torch.float32)
    if adapter is not None:
        model = load_adapter(model, adapter, settings).merge_and_unload()

    weights = mean_depth_weights(model.eval(), ids)
    statistics = site_statistics(config, weights)
    matrix_SU = mixing_matrix(config, weights)
    rank, effective = semiseparable_rank(matrix_SU)
    # with standard residuals, weights shared where the second model is this one
    if against is None:
        second_name, second = "standard residuals", standard_residuals(model)
    else:
        second_name, second = against, load_weights(against, second_config, dtype=torch.float32)
    curves = {path: layer_curves(model, ids), second_name: layer_curves(second, ids)}
    quantities = {
        quantity: {name: of_model[quantity] for name, of_model in curves.items()}
        for quantity in ("output magnitude", "gradient norm")
    }
    found = {
        "model": path,
        "adapter": None if adapter is None else str(adapter),
        "text": called,
        "tokens": ids.shape[1],
        "weights": [one.tolist() for one in weights],
        "entropy_of_mean": [one.entropy_of_mean for one in statistics],
        "reach": [one.reach for one in statistics],
        "by layer": quantities,
        "mixing matrix": matrix_SU.tolist(),
        "semiseparable rank": {"exact": rank, "effective": effective},
    }
    caption = f"{path}{'' if adapter is None else f' + {adapter}'}, {ids.shape[1]} tokens of {called}"
    with complete_or_absent(output) as folder:
        (folder / "diagnosis.json").write_text(json.dumps(found, indent=1) + "\n")
        draw_depth_weights(found["weights"], folder / "depth_weights.png", caption)
        draw_by_layer(quantities, folder / "by_layer.png", caption)
        draw_sites(
            {
                "entropy of the mean weights, of the largest possible": found["entropy_of_mean"],
                "reach, in sublayers back": found["reach"],
            },
            folder / "sites.png",
            caption,
        )
        draw_mixing_matrix(
            found["mixing matrix"],
            folder / "mixing_matrix.png",
            f"semiseparable rank {rank}, effective {effective:.1f}",
        )
    entropy, reach = (mean(found[name]) for name in ("entropy_of_mean", "reach"))
    Console().print(
        f"{output}: entropy of the mean weights {entropy:.3f} of the largest possible, reach {reach:.1f} sublayers, "
        f"semiseparable rank {rank} (effective {effective:.1f})"
    )
    return found


def first_tokens(path: str, text: str, called: str, count: int, trust_remote_code: bool) -> torch.Tensor:
    """The first `count` tokens of a text `[1, T]`, at least the two that a loss needs.

    Raises:
        TrainingError: there are fewer.
    """
    ids = load_tokenizer(path, trust_remote_code)(text, return_tensors="pt", verbose=False)["input_ids"][:, :count]
    if ids.shape[1] < 2:
        raise TrainingError(f"{called}: {ids.shape[1]} tokens of it, with --tokens {count}; expected 2 or more.")
    return ids


def standard_residuals(model: PreTrainedModel) -> PreTrainedModel:
    """The same weights with standard residuals."""
    config = type(model.config)(**model.config.to_dict() | {"attn_res_mode": "none"})
    control = type(model)(config)
    shared = {name: tensor for name, tensor in model.state_dict().items() if not is_depth_parameter(name)}
    control.load_state_dict(shared)
    return control


def layer_curves(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, list[float]]:
    """For each decoder layer (paper, figure 5): the size of what it returns, and of the loss's gradient there.

    Magnitude is the root mean square of the layer's output (with Block, its block's running sum; with standard
    residuals, the stream); the gradient's norm is over all tokens.
    """
    outputs = []

    def keep(module, args, output):
        output.retain_grad()
        outputs.append(output)

    model.eval().requires_grad_(True)
    handles = [layer.register_forward_hook(keep) for layer in model.model.layers]
    try:
        model(ids, labels=ids, use_cache=False).loss.backward()
    finally:
        for handle in handles:
            handle.remove()
        model.zero_grad(set_to_none=True)
    return {
        "output magnitude": [hidden.detach().float().square().mean().sqrt().item() for hidden in outputs],
        "gradient norm": [hidden.grad.float().norm().item() for hidden in outputs],
    }
