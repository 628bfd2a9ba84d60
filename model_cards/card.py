"""Write a model card from what lies beside the weights: config, provenance, results, the record of a training run."""

import json
import math
import shlex
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import EvalResult, ModelCard, ModelCardData
from huggingface_hub.constants import REPOCARD_NAME
from huggingface_hub.dataclasses import strict
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, PreTrainedConfig

from common.errors import UserError, describe, reading
from common.files import check_file, whole_file
from common.markdown import code, link, plain, python_string, table
from modeling_attnres import is_depth_parameter  # the import lets the Auto classes find the families, too

from .blocks import describe_blocks, describe_form, draw_blocks
from .provenance import Provenance, is_hub_id, read


TEMPLATE = Path(__file__).with_name("template.md")


class CardError(UserError):
    """A card that cannot be written; the message names the file, what was found and what was expected."""


@strict
@dataclass
class Score:
    """A benchmark's figure for this model, in a table of `python -m eval run`."""

    title: str
    dataset: str
    metric: str
    shots: int
    value: int | float
    stderr: int | float | None
    items: int

    def validate_stderr(self) -> None:
        if not math.isfinite(self.stderr or 0):
            raise ValueError(f"stderr must be finite or null, got {self.stderr}.")


@strict
@dataclass
class Training:
    """What the `result.json` of `python -m training finetune` or `pretrain` says of a run."""

    steps: int
    before: int | float
    after: int | float
    data: list[str]
    length: int
    lora: str | None = None  # and what follows: of fine-tuning only
    rank: int = 0
    alpha: int = 0
    depth: bool | None = None
    control: bool = False

    def validate_losses(self) -> None:
        if not math.isfinite(self.before) or not math.isfinite(self.after):
            raise ValueError(f"held_out_loss must be finite, got {self.before} and {self.after}.")


@dataclass(frozen=True)
class Facts:
    """All that a card is written from."""

    name: str
    config: PreTrainedConfig
    has_weights: bool
    provenance: Provenance | None
    results: list[Score]
    training: Training | None

    @property
    def auto_class(self) -> type:
        """The Auto class that loads it: of causal LMs, or of models without a head."""
        is_causal_lm = all(name.endswith("ForCausalLM") for name in self.config.architectures or [])
        return AutoModelForCausalLM if is_causal_lm else AutoModel


def write_card(
    path: Path,
    results: Path | None = None,
    training: Path | None = None,
    output: Path | None = None,
    name: str | None = None,
) -> Path:
    """Write the card of a folder that holds a checkpoint or a configuration.

    Args:
        path: the folder.
        results: a `table.json` of `python -m eval run` with a column for this model.
        training: the output folder of `python -m training finetune` or `pretrain`.
        output: the file to write. Default: `README.md` in the folder.
        name: the model's name. Default: the folder's.

    Raises:
        UserError: a file is missing or malformed, or the table has no column for this model.

    Example:
        from pathlib import Path
        from model_cards.card import write_card

        print(write_card(Path("ported")))
    """
    if not path.is_dir():
        raise CardError(f"{path} is no folder.")
    name = name or path.resolve().name
    # Read everything before anything is written.
    facts = Facts(
        name=name,
        config=_config(path),
        has_weights=any(path.glob("*.safetensors")),
        provenance=read(path),
        results=[] if results is None else _scores(results, path, name),
        training=None if training is None else _training(training / "result.json"),
    )
    output = output or path / REPOCARD_NAME
    card = ModelCard.from_template(_card_data(facts), template_path=str(TEMPLATE), **_text(facts))
    with whole_file(output) as file:
        file.write_text(card.content.rstrip() + "\n", encoding="utf-8")
    return output


def _config(path: Path) -> PreTrainedConfig:
    """Read the config of a folder, which must be one of ours."""
    with reading(f"{path / 'config.json'} as a config of transformers"):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    if not hasattr(config, "attn_res_mode"):
        raise CardError(f"{path}: {config.model_type!r} is no Attention Residuals family; port it first.")
    return config


def _json(file: Path) -> Any:
    check_file(file)
    with reading(file):
        return json.loads(file.read_text(encoding="utf-8"))


def _scores(file: Path, path: Path, name: str) -> list[Score]:
    """Read the column of a results table that is of this model: by its folder, or else by its name."""
    table = _json(file)
    with reading(f"{file} as a table of `python -m eval run`"):
        models = [(model["name"], Path(model["model"]).resolve(), model["adapter"]) for model in table["models"]]
        same_path = [i for i, (_, place, adapter) in enumerate(models) if place == path.resolve() and not adapter]
        columns = same_path or [i for i, (column, _, _) in enumerate(models) if column == name]
        if not columns:
            named = ", ".join(str(column) for column, _, _ in models)
            raise CardError(f"{file} has no column for {name}; it has {named}.")
        rows = [(row, row["scores"][columns[0]]) for row in table["rows"]]
        scores = [
            Score(
                **{field: row[field] for field in ("title", "dataset", "metric", "shots")},
                **{field: score[field] for field in ("value", "stderr", "items")},
            )
            for row, score in rows
            if not isinstance(score, str)
        ]
        return [score for score in scores if math.isfinite(score.value)]  # a benchmark that failed has no figure


def _training(file: Path) -> Training:
    """Read the record of a training run."""
    result = _json(file)
    with reading(f"{file} as the result of `python -m training finetune` or `pretrain`"):
        loss, recipe = result["held_out_loss"], result["recipe"]
        pretrained = "config" in recipe
        fields = ("data", "length", *(() if pretrained else ("lora", "rank", "alpha", "depth", "control")))
        return Training(result["steps"], loss["before"], loss["after"], **{field: recipe[field] for field in fields})


def _card_data(facts: Facts) -> ModelCardData:
    """Make the metadata at the head of a card, which the hub reads."""
    # The results in the hub's form, which goes with the model's name
    evaluations = [
        EvalResult(
            task_type="text-generation",
            task_name="Text generation",
            dataset_type=score.dataset,
            dataset_name=score.title,
            dataset_args={"num_few_shot": score.shots},
            metric_type=score.metric,
            metric_name=score.metric,
            metric_value=round(score.value, 4),
        )
        for score in facts.results
    ]
    origin = {} if facts.provenance is None else _origin_data(facts.provenance)
    return ModelCardData(
        **origin,
        library_name="transformers",
        pipeline_tag="text-generation" if facts.auto_class is AutoModelForCausalLM else "feature-extraction",
        tags=["attention-residuals", "custom_code"],
        model_name=facts.name if evaluations else None,
        eval_results=evaluations or None,
        ignore_metadata_errors=True,
    )


def _origin_data(provenance: Provenance) -> dict[str, Any]:
    """Return what it was made from as metadata: the source if the hub has it, else what that was made from, and how."""
    bases, relation = _hub_ids(provenance), None
    if bases and bases != [provenance.source]:
        relation = provenance.base_model_relation
        if relation not in ("finetune", "merge", "quantized"):  # of the hub's words, those for a whole model
            relation = "finetune" if len(bases) == 1 else "merge"
    return {
        "base_model": bases[0] if len(bases) == 1 else bases or None,
        "base_model_relation": relation,
        "language": provenance.languages or None,
        "license": provenance.license,
        "license_name": provenance.license_name,
        "license_link": provenance.license_link,
    }


def _text(facts: Facts) -> dict[str, Any]:
    """Return what the template's names stand for, as text that Markdown shows as it is."""
    config, provenance = facts.config, facts.provenance
    settings = {
        "`attn_res_mode`": f"`{config.attn_res_mode}`",
        "sources": describe_blocks(config),
        "`attn_res_scale_norm_eps`": f"`{str(config.attn_res_scale_norm_eps).lower()}`",
        "family": f"`{config.model_type}`",
        "parameters": _parameters(facts),
    }
    if (form := describe_form(config)) != "the paper's":
        settings["form"] = form
    # A name is no argument of lm-eval with a comma, which parts them, nor in a line of a shell with a line break.
    is_argument = facts.name.isprintable() and "," not in facts.name
    return {
        "name": plain(facts.name),
        "place": python_string(facts.name if facts.has_weights else f"configuration/{facts.name}"),
        "model_args": shlex.quote(f"pretrained={facts.name},trust_remote_code=True") if is_argument else None,
        "auto_class": facts.auto_class.__name__,
        "has_weights": facts.has_weights,
        "summary": _summary(facts),
        "made": _made(facts),
        "shards": _shards(provenance.shards) if provenance else "",
        "mechanism": _mechanism(config),
        "settings": table(("setting", "value"), settings.items()),
        "picture": draw_blocks(config),
        "lossless": _lossless(facts),
        "has_depth": config.attn_res_mode != "none",
        "results": _results(facts),
        "limits": _limits(facts),
    }


def _mechanism(config) -> str:
    """Say what every sublayer reads."""
    if config.attn_res_mode == "none":
        return "Every attention and MLP reads the sum of all that came before, as in its base family: a control."
    kind, chosen = {
        "softmax": ("a softmax-weighted mean", ", chosen token by\ntoken,"),
        "static": ("a softmax-weighted mean", ", with weights that no token changes,"),
        "sigmoid": ("a weighted sum", ", chosen token by\ntoken,"),
        "static_raw": ("a weighted sum", ", with weights that no token changes,"),
    }[config.attn_res_weights]
    sources = "sublayers" if config.attn_res_mode == "full" else "blocks of layers"
    place = {
        "replace": "in place of the sum of all that came before",
        "add": "times a learned gate, beside the sum of all that came before",
    }[config.attn_res_form]
    paper = "([Kimi Team, 2026](https://arxiv.org/abs/2603.15031))"
    return f"Every attention and MLP reads {kind} of the embedding and of earlier {sources}{chosen} {place} {paper}."


def _parameters(facts: Facts) -> str:
    """Count the parameters of a model without storage."""
    try:
        with torch.device("meta"):
            model = facts.auto_class.from_config(facts.config)
    except Exception as error:  # what is wrong with a field, a family may say by any exception
        raise CardError(f"{facts.name}: its config describes no model: {describe(error)}") from error
    depth = sum(p.numel() for name, p in model.named_parameters() if is_depth_parameter(name))
    return f"{sum(p.numel() for p in model.parameters()):,}, {depth:,} of them for depth attention"


def _hub_ids(provenance: Provenance) -> list[str]:
    """Return the source if it is on the hub, else the models on the hub that it was made from."""
    bases = provenance.base_model
    return [base for base in (bases if isinstance(bases, list) else [bases]) if base and is_hub_id(base)]


def _source(provenance: Provenance) -> str:
    return link(provenance.source) if _hub_ids(provenance) == [provenance.source] else code(provenance.source)


def _summary(facts: Facts) -> str:
    kind = "standard residuals" if facts.config.attn_res_mode == "none" else "Attention Residuals"
    if not facts.has_weights:
        return f"A configuration with {kind}, without weights."
    if facts.provenance is None:
        return f"A model with {kind}."
    source = _source(facts.provenance)
    if facts.training or facts.provenance.made_by == "merge":
        return f"{source} with {kind}, fine-tuned."
    if facts.provenance.made_by == "upcycle":
        return f"{source} as a mixture of experts with {kind}: a start for further training."
    return f"{source} with {kind}, ported without changing what it computes: a start for further training."


def _made(facts: Facts) -> str:
    lines = []
    if (provenance := facts.provenance) is not None:
        verb = {"port": "Ported", "upcycle": "Upcycled", "merge": "Merged"}[provenance.made_by]
        bases = [base for base in _hub_ids(provenance) if base != provenance.source]
        origin = f", which was made from {' and '.join(map(link, bases))}" if bases else ""
        details = "".join(f", {plain(name)} {code(value)}" for name, value in provenance.details.items())
        versions = ", ".join(f"{plain(name)} {plain(number)}" for name, number in provenance.versions.items())
        lines.append(f"{verb} from {_source(provenance)}{origin}{details}. Made with {versions}.")
    if facts.training:
        lines.append(_trained(facts.training))
    if not facts.has_weights:
        lines.append("`configuration/README.md` says where its numbers come from, and what was chosen.")
    return "\n\n".join(lines) or "Not recorded."


def _trained(run: Training) -> str:
    data = ", ".join(code(Path(file).name) for file in run.data)
    change = f"The loss on held-out text went from {run.before:.4f} to {run.after:.4f} nats a token (`result.json`)."
    if run.lora is None:
        return f"Trained from random weights for {run.steps} steps on {data}, rows of {run.length} tokens. {change}"
    learned = []
    if run.lora == "full":
        learned.append("all weights of the base family")
    elif run.lora != "none":
        learned.append(f"LoRA on {plain(run.lora)} (rank {run.rank}, alpha {run.alpha})")
    if run.depth is not False and not run.control:
        learned.append("the depth parameters in full")
    return f"Fine-tuned for {run.steps} steps on {data}, rows of {run.length} tokens: {' and '.join(learned)}. {change}"


def _shards(hashes: dict[str, str]) -> str:
    """List the source's files, where any are recorded."""
    rows = [(plain(file), f"`{plain(digest)}`") for file, digest in hashes.items()]
    return table(("file of the source", "SHA-256"), rows) if rows else ""


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
            "It computes what its source does: the relative error of its logits in fp32 is "
            f"{verified.relative_error:.1e} over {verified.tokens} tokens of {plain(verified.text)} "
            "(`provenance.json`)."
        )
    return (
        "Whether it computes what its source does was not checked when it was made: `python -m conversion verify` does."
    )


def _results(facts: Facts) -> str:
    if not facts.results:
        return "This model has not been measured."
    rows = []
    for score in facts.results:
        error = f" ± {score.stderr:.2f}" if score.stderr is not None else ""
        figure = f"{score.value:.4g}{error}"
        rows.append((plain(score.title), str(score.shots), plain(score.metric), figure, str(score.items)))
    measured = table(("benchmark", "shots", "metric", "score", "items"), rows)
    source = "± is the standard error. Measured by `python -m eval run`; each answer is kept beside its `table.json`."
    return f"{measured}\n\n{source}"


def _limits(facts: Facts) -> str:
    if not facts.has_weights:
        return "- It has yet to be trained, or given the weights of a checkpoint (`python -m conversion port`)."
    limits = [
        "The code of the model lies beside its weights and runs with `trust_remote_code=True`; it says so when the "
        "installed transformers is outside the tested range."
    ]
    if facts.provenance is not None:
        source = _source(facts.provenance)
        limits.insert(
            0, f"It knows what {source} knows, and shares its biases and risks; see there for its intended use."
        )
        if not facts.training and facts.provenance.made_by == "port":
            limits.insert(
                0, "It is no better than its source until it is trained: what the paper gains comes with training."
            )
    return "\n".join(f"- {limit}" for limit in limits)
