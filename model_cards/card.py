"""Write a model card from what lies beside the weights: config, provenance, results, the record of a training run."""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from common.errors import UserError
from modeling_attnres import is_depth_parameter  # the import lets the Auto classes find the families, too

from .blocks import describe_blocks, draw_blocks
from .provenance import Provenance, read


TEMPLATE = Path(__file__).with_name("template.md")


class CardError(UserError):
    """A card that cannot be written; the message names the file, what was found and what was expected."""


@dataclass(frozen=True)
class Facts:
    """All that a card says, as it was read."""

    name: str
    config: PreTrainedConfig
    has_weights: bool
    provenance: Provenance | None
    results: list[dict[str, Any]]  # rows of this model in a table of `python -m eval run`
    training: dict[str, Any] | None  # result.json of `python -m training finetune`

    @property
    def auto_class(self) -> type:
        """What loads it: a causal LM, or a model without a head."""
        is_causal_lm = all(name.endswith("ForCausalLM") for name in self.config.architectures or [])
        return AutoModelForCausalLM if is_causal_lm else AutoModel


def write_card(
    path: Path,
    results: Path | None = None,
    training: Path | None = None,
    output: Path | None = None,
    name: str | None = None,
) -> Path:
    """Write the card of a checkpoint, or of a configuration, a folder each.

    Args:
        path: the folder.
        results: a `table.json` of `python -m eval run` with a column for this model.
        training: the output folder of `python -m training finetune`.
        output: the file to write. Default: `README.md` in the folder.
        name: the model's name. Default: the folder's.

    Raises:
        CardError: a file is missing or malformed, or the table has no column for this model.
    """
    name = name or path.resolve().name
    facts = Facts(
        name=name,
        config=_config(path),
        has_weights=any(path.glob("*.safetensors")),
        provenance=_provenance(path),
        results=_rows(results, path, name) if results else [],
        training=_json(training / "result.json", "held_out_loss", "steps", "recipe") if training else None,
    )
    output = output or path / REPOCARD_NAME
    card = ModelCard.from_template(_card_data(facts), template_path=str(TEMPLATE), **_text(facts))
    output.parent.mkdir(parents=True, exist_ok=True)
    partial = output.with_name(f".{output.name}.incomplete")
    partial.write_text(card.content.rstrip() + "\n", encoding="utf-8")
    partial.replace(output)
    return output


def _config(path: Path) -> PreTrainedConfig:
    try:
        config = AutoConfig.from_pretrained(path)
    except (OSError, ValueError) as error:
        raise CardError(f"{path}: no config of transformers can be read: {error}") from error
    if not hasattr(config, "attn_res_mode"):
        raise CardError(f"{path}: {config.model_type!r} is no Attention Residuals family; port it first.")
    return config


def _provenance(path: Path) -> Provenance | None:
    try:
        return read(path)
    except ValueError as error:
        raise CardError(str(error)) from error


def _json(file: Path, *keys: str) -> dict[str, Any]:
    try:
        content = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise CardError(f"{file} cannot be read: {error}.") from error
    if not isinstance(content, dict) or (missing := [key for key in keys if key not in content]):
        raise CardError(f"{file}: expected an object with {', '.join(keys)}; missing: {', '.join(missing)}.")
    return content


def _rows(file: Path, path: Path, name: str) -> list[dict[str, Any]]:
    table = _json(file, "models", "rows")
    models = [(model["name"], Path(model["model"]).resolve(), model["adapter"]) for model in table["models"]]
    same_path = [i for i, (_, place, adapter) in enumerate(models) if place == path.resolve() and not adapter]
    columns = same_path or [i for i, (column, _, _) in enumerate(models) if column == name]
    if not columns:
        raise CardError(f"{file} has no column for {name}; it has {', '.join(column for column, _, _ in models)}.")
    rows = [row | {"score": row["scores"][columns[0]]} for row in table["rows"]]
    return [row for row in rows if not isinstance(row["score"], str)]  # one that failed has no figure


def _card_data(facts: Facts) -> ModelCardData:
    provenance = facts.provenance or Provenance(made_by="", source="", versions={})
    evaluations = [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=row["dataset"],
            dataset_name=row["title"],
            dataset_args={"num_few_shot": row["shots"]},
            metric_type=row["metric"],
            metric_name=row["metric"],
            metric_value=round(row["score"]["value"], 4),
        )
        for row in facts.results
    ]
    return ModelCardData(
        base_model=provenance.base_model,
        language=provenance.languages or None,
        library_name="transformers",
        license=provenance.license,
        license_name=provenance.license_name,
        license_link=provenance.license_link,
        pipeline_tag="text-generation" if facts.auto_class is AutoModelForCausalLM else "feature-extraction",
        tags=["attention-residuals", "custom_code"],
        model_name=facts.name if evaluations else None,
        eval_results=evaluations or None,
        ignore_metadata_errors=True,
    )


def _text(facts: Facts) -> dict[str, Any]:
    config, provenance = facts.config, facts.provenance
    settings = {
        "`attn_res_mode`": f"`{config.attn_res_mode}`",
        "sources": describe_blocks(config),
        "`attn_res_scale_norm_eps`": f"`{str(config.attn_res_scale_norm_eps).lower()}`",
        "family": f"`{config.model_type}`",
        "parameters": _parameters(facts),
    }
    return {
        "name": facts.name,
        "auto_class": facts.auto_class.__name__,
        "has_weights": facts.has_weights,
        "summary": _summary(facts),
        "made": _made(facts),
        "shards": provenance.shards if provenance else {},
        "sources": "sublayers" if config.attn_res_mode == "full" else "blocks of layers",
        "settings": settings,
        "picture": draw_blocks(config),
        "lossless": _lossless(facts),
        "results": _results(facts),
        "limits": _limits(facts),
    }


def _parameters(facts: Facts) -> str:
    with torch.device("meta"):
        model = facts.auto_class.from_config(facts.config)
    depth = sum(p.numel() for name, p in model.named_parameters() if is_depth_parameter(name))
    return f"{sum(p.numel() for p in model.parameters()):,}, {depth:,} of them for depth attention"


def _link(provenance: Provenance) -> str:
    hub = provenance.base_model
    return f"[{hub}](https://huggingface.co/{hub})" if hub else f"`{provenance.source}`"


def _summary(facts: Facts) -> str:
    if not facts.has_weights:
        return "A configuration with Attention Residuals, without weights."
    if facts.provenance is None:
        return "A model with Attention Residuals."
    link = _link(facts.provenance)
    if facts.training or facts.provenance.made_by == "merge":
        return f"{link} with Attention Residuals, fine-tuned."
    if facts.provenance.made_by == "upcycle":
        return f"{link} as a mixture of experts with Attention Residuals: a start for further training."
    return f"{link} with Attention Residuals, ported without changing what it computes: a start for further training."


def _made(facts: Facts) -> str:
    lines = []
    if (provenance := facts.provenance) is not None:
        verb = {"port": "Ported", "upcycle": "Upcycled", "merge": "Merged"}[provenance.made_by]
        origin = f"`{provenance.source}`"
        if provenance.base_model:
            origin = (
                _link(provenance) if provenance.base_model == provenance.source else f"{origin} ({_link(provenance)})"
            )
        details = "".join(f", {name} {value}" for name, value in provenance.details.items())
        versions = ", ".join(f"{name} {number}" for name, number in provenance.versions.items())
        lines.append(f"{verb} from {origin}{details}. Made with {versions}.")
    if facts.training:
        lines.append(_trained(facts.training))
    if not facts.has_weights:
        lines.append("`configuration/README.md` says where its numbers come from, and what was chosen.")
    return "\n\n".join(lines) or "Not recorded."


def _trained(training: dict[str, Any]) -> str:
    recipe, loss = training["recipe"], training["held_out_loss"]
    learned = (
        [f"LoRA on {recipe['lora']} (rank {recipe['rank']}, alpha {recipe['alpha']})"]
        if recipe["lora"] != "none"
        else []
    )
    learned += ["the depth parameters in full"] if recipe["depth"] is not False and not recipe["control"] else []
    data = ", ".join(f"`{Path(file).name}`" for file in recipe["data"])
    return (
        f"Fine-tuned for {training['steps']} steps on {data}, rows of {recipe['length']} tokens: "
        f"{' and '.join(learned)}. The loss on held-out text went from {loss['before']:.4f} to {loss['after']:.4f} "
        "nats a token (`result.json`)."
    )


def _lossless(facts: Facts) -> str:
    provenance = facts.provenance
    if provenance is None or not facts.has_weights:
        return ""
    if facts.training or provenance.made_by == "merge":
        return "It has been trained since it was ported: it does not compute what its source does."
    if provenance.made_by == "upcycle":
        return "Its routers are new, so it computes nearly, but not exactly, what its source does."
    if (verified := provenance.verified) is not None:
        return (
            f"It computes what its source does: the relative error of its logits in fp32 is "
            f"{verified.relative_error:.1e} over {verified.tokens} tokens of {verified.text} (`provenance.json`)."
        )
    return (
        "Whether it computes what its source does was not checked when it was made: `python -m conversion verify` does."
    )


def _results(facts: Facts) -> str:
    if not facts.results:
        return "None of this model were measured."
    lines = ["| benchmark | shots | metric | score | items |", "|---|---|---|---|---|"]
    for row in facts.results:
        score = row["score"]
        error = f" ± {score['stderr']:.2f}" if score["stderr"] is not None else ""
        lines.append(
            f"| {row['title']} | {row['shots']} | {row['metric']} | {score['value']:.4g}{error} | {score['items']} |"
        )
    lines += [
        "",
        "± is the standard error. Measured by `python -m eval run`; each answer is kept beside its `table.json`.",
    ]
    return "\n".join(lines)


def _limits(facts: Facts) -> str:
    if not facts.has_weights:
        return "- It has yet to be trained, or given the weights of a checkpoint (`python -m conversion port`)."
    limits = [
        "The code of the model lies beside its weights and runs with `trust_remote_code=True`; it says so when the "
        "installed transformers is outside the tested range."
    ]
    if facts.provenance is not None:
        source = _link(facts.provenance)
        limits.insert(
            0, f"It knows what {source} knows, and shares its biases and risks; see there for its intended use."
        )
        if not facts.training and facts.provenance.made_by == "port":
            limits.insert(
                0, "It is no better than its source until it is trained: what the paper gains comes with training."
            )
    return "\n".join(f"- {limit}" for limit in limits)
