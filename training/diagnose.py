"""The paper's figures for any checkpoint: what its depth attention reads, and what that does to magnitudes."""

import json
import math
from dataclasses import asdict
from pathlib import Path
from statistics import mean

import torch
from rich.console import Console
from transformers import PreTrainedConfig, PreTrainedModel

from common.files import complete_or_absent
from common.text import read_text
from modeling_attnres import is_depth_parameter

from .ablate import ablate_sources, ablation_table
from .adapter import is_of_standard_residuals, load_adapter, read_adapter
from .depth import mean_depth_weights, mixing_matrix, semiseparable_rank, site_statistics
from .loading import TrainingError, load_attnres_config, load_config, load_tokenizer, load_weights
from .pictures import draw_ablation, draw_by_layer, draw_depth_weights, draw_mixing_matrix, draw_sites


# What is drawn of every site, and its caption
SITES = {"entropy_of_mean": "entropy of the mean weights, of the largest possible", "reach": "reach, in sublayers back"}


def diagnose_model(
    path: str,
    output: Path,
    *,
    text: Path | None = None,
    adapter: Path | None = None,
    against: str | None = None,
    tokens: int = 512,
    ablate: bool = False,
    trust_remote_code: bool = False,
) -> dict:
    """Write `diagnosis.json` and pictures to a folder that appears when they are complete; returns the diagnosis.

    Example:
        ```python
        from pathlib import Path

        from training.diagnose import diagnose_model

        diagnosis = diagnose_model("merged", Path("pictures"), tokens=128)
        print(diagnosis["reach"])
        ```

    Args:
        path: a model with Attention Residuals.
        output: the folder to write.
        text: a UTF-8 text file; `None`: the built-in sample.
        adapter: an adapter to merge into the model first.
        against: a second model; `None`: the same weights with standard residuals.
        tokens: the number of tokens of the text, at most.
        ablate: hide each source from each site, and each block from all, and measure how the loss rises.
        trust_remote_code: run the code of a tokenizer that lies beside the checkpoint.

    Raises:
        UserError: the model has no depth attention, or no tokenizer; a file cannot be read; or the folder exists.
    """
    # The data, and all that can be refused before a model is loaded
    content, source = read_text(text)
    if output.exists() and any(output.iterdir()):
        raise TrainingError(f"{output} exists and is not empty.")
    config = load_attnres_config(path)
    if config.attn_res_mode == "none" or (adapter is not None and is_of_standard_residuals(adapter)):
        raise TrainingError(f"{adapter or path} ({config.model_type}) has no depth attention to diagnose.")
    ids = first_tokens(path, content, source, tokens, trust_remote_code)
    check_embeddings(ids, source, path, config)
    second_config = None
    if against == path and adapter is None:
        raise TrainingError(f"--against {against} is the model itself.")
    if against is not None:
        second_config = load_config(against)
        check_embeddings(ids, source, against, second_config)

    # The models
    model = load_whole_model(path, config, adapter)
    if against is None:
        models = {path: model, "standard residuals": standard_residuals(model)}
    else:
        first = path if adapter is None else f"{path} with {adapter}"
        models = {first: model, against: load_weights(against, second_config, dtype=torch.float32)}

    # The result
    diagnosis = {
        "model": path,
        "adapter": None if adapter is None else str(adapter),
        "text": source,
        "tokens": ids.shape[1],
        **describe_weights(config, mean_depth_weights(model, ids)),
        "by layer": compare_layers(models, ids),
    }
    if ablate:
        ablation = ablate_sources(model, ids)
        diagnosis["ablation"] = asdict(ablation)
        Console().print(ablation_table(ablation, diagnosis["weights"], config.attn_res_layout))
    write_diagnosis(diagnosis, output)
    print_summary(diagnosis, output)
    return diagnosis


def first_tokens(path: str, text: str, source: str, count: int, trust_remote_code: bool) -> torch.Tensor:
    """Tokenise the first `count` tokens of a text `[1, T]`, at least the two that a loss needs.

    Raises:
        TrainingError: there are fewer.
    """
    ids = load_tokenizer(path, trust_remote_code)(text, return_tensors="pt", verbose=False)["input_ids"][:, :count]
    if ids.shape[1] < 2:
        raise TrainingError(f"{source}: {ids.shape[1]} tokens of it, with --tokens {count}; expected 2 or more.")
    return ids


def check_embeddings(ids: torch.Tensor, source: str, path: str, config: PreTrainedConfig) -> None:
    """Refuse tokens that a model has no embedding for.

    Raises:
        TrainingError: names the text, the token and the model.
    """
    vocab_size = getattr(config, "vocab_size", math.inf)
    if ids.max() >= vocab_size:
        raise TrainingError(f"{source}: the token {ids.max()}, but {path} has embeddings for {vocab_size}.")


def load_whole_model(path: str, config: PreTrainedConfig, adapter: Path | None) -> PreTrainedModel:
    """Load the model at a path for inference, with an adapter merged into it if there is one."""
    settings = None if adapter is None else read_adapter(adapter)
    model = load_weights(path, config, dtype=torch.float32)
    if adapter is not None:
        model = load_adapter(model, adapter, settings).merge_and_unload()
    return model.eval()


def standard_residuals(model: PreTrainedModel) -> PreTrainedModel:
    """Give the same weights standard residuals."""
    config = type(model.config)(**model.config.to_dict() | {"attn_res_mode": "none"})
    control = type(model)(config)
    shared = {name: tensor for name, tensor in model.state_dict().items() if not is_depth_parameter(name)}
    control.load_state_dict(shared)
    return control


def describe_weights(config: PreTrainedConfig, weights: list[torch.Tensor]) -> dict:
    """Describe mean depth weights: site by site, and as the matrix by which they mix outputs."""
    statistics = site_statistics(config, weights)
    matrix_SU = mixing_matrix(config, weights)
    rank, effective = semiseparable_rank(matrix_SU)
    return {
        "weights": [weights_N.tolist() for weights_N in weights],
        "entropy_of_mean": [of_site.entropy_of_mean for of_site in statistics],
        "reach": [of_site.reach for of_site in statistics],
        "mixing matrix": matrix_SU.tolist(),
        "semiseparable rank": {"exact": rank, "effective": effective},
    }


def compare_layers(models: dict[str, PreTrainedModel], ids: torch.Tensor) -> dict[str, dict[str, list[float]]]:
    """Compute the curves of several models, by quantity and then by model."""
    curves = {name: layer_curves(model, ids) for name, model in models.items()}
    return {
        quantity: {name: of_model[quantity] for name, of_model in curves.items()}
        for quantity in ("output magnitude", "gradient norm")
    }


def layer_curves(model: PreTrainedModel, ids: torch.Tensor) -> dict[str, list[float]]:
    """Compute for each decoder layer (paper, figure 5) the size of what it returns, and of the loss's gradient there.

    Magnitude is the root mean square of the layer's output (with Block, its block's running sum; with standard
    residuals, the stream); the gradient's norm is over all tokens.
    """
    outputs = []

    def keep(module, args, output):
        output.retain_grad()
        outputs.append(output)

    # One pass with gradients, which are removed again
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


def write_diagnosis(diagnosis: dict, output: Path) -> None:
    """Write a diagnosis and its pictures to a folder, complete or absent."""
    model, adapter, rank = diagnosis["model"], diagnosis["adapter"], diagnosis["semiseparable rank"]
    subject = model if adapter is None else f"{model} + {adapter}"
    caption = f"{subject}, {diagnosis['tokens']} tokens of {diagnosis['text']}"
    mixing_caption = f"semiseparable rank {rank['exact']}, effective {rank['effective']:.1f}"
    sites = {label: diagnosis[name] for name, label in SITES.items()}
    with complete_or_absent(output) as folder:
        (folder / "diagnosis.json").write_text(json.dumps(diagnosis, indent=1) + "\n")
        draw_depth_weights(diagnosis["weights"], folder / "depth_weights.png", caption)
        draw_by_layer(diagnosis["by layer"], folder / "by_layer.png", caption)
        draw_sites(sites, folder / "sites.png", caption)
        draw_mixing_matrix(diagnosis["mixing matrix"], folder / "mixing_matrix.png", mixing_caption)
        if "ablation" in diagnosis:
            draw_ablation(diagnosis["weights"], diagnosis["ablation"]["by_site"], folder / "ablation.png", caption)


def print_summary(diagnosis: dict, output: Path) -> None:
    """Print a diagnosis in one sentence."""
    entropy, reach, rank = mean(diagnosis["entropy_of_mean"]), mean(diagnosis["reach"]), diagnosis["semiseparable rank"]
    Console().print(
        f"{output}: entropy of the mean weights {entropy:.3f} of the largest possible, reach {reach:.1f} sublayers, "
        f"semiseparable rank {rank['exact']} (effective {rank['effective']:.1f})"
    )
