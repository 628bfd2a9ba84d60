"""Opening what a user names: the config, weights and tokenizer of a model. Each is refused in one line."""

import difflib
import math
from pathlib import Path

from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, PreTrainedConfig, PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME

from common.errors import UserError, reading
from conversion.checkpoint import CONFIG_NAME
from modeling_attnres import is_attnres_type  # the import registers the families with the Auto classes, too
from modeling_attnres.configuration_attnres import TYPE_PREFIX


class TrainingError(UserError):
    """What cannot work; the message says which setting or file, what was found and what was expected."""


def load_config(path: str | Path) -> PreTrainedConfig:
    """Load the config of a model.

    Raises:
        UserError: it cannot be read, is that of an adapter, or has a number that is not finite.
    """
    if (Path(path) / ADAPTER_CONFIG_NAME).exists() and not (Path(path) / CONFIG_NAME).exists():
        raise TrainingError(
            f"{path} is an adapter, expected a model. Merge it first: python -m training merge {path} TARGET"
        )
    with reading(path):
        config = AutoConfig.from_pretrained(path, trust_remote_code=False)
    for field, value in vars(config).items():
        if isinstance(value, float) and not math.isfinite(value):
            raise TrainingError(f"{path}: {field} is {value} in {CONFIG_NAME}, expected a finite number.")
    return config


def load_attnres_config(path: str | Path) -> PreTrainedConfig:
    """Load the config of a model with Attention Residuals.

    Raises:
        UserError: as `load_config`, or the model has none.
    """
    config = load_config(path)
    if not hasattr(config, "attn_res_mode"):
        raise TrainingError(
            f"{path} is a {config.model_type!r}, without Attention Residuals. Port it first: "
            f"python -m conversion port {path} TARGET"
        )
    return config


def make_config(path: str | Path, fields: dict[str, object]) -> PreTrainedConfig:
    """Make the config of a new model with Attention Residuals, that of a folder or hub id with other fields.

    Args:
        path: of a model with Attention Residuals, or of a base family: then a model begins as its baseline.
        fields: in place of those that it has. What they imply for others (such as the layers' types) is derived anew.

    Raises:
        UserError: it cannot be read, a field is unknown, or the fields do not go together.
    """
    with reading(path):
        given, _ = PreTrainedConfig.get_config_dict(path)
        model_type = given.pop("model_type")
        model_type = model_type if is_attnres_type(model_type) else TYPE_PREFIX + model_type
        config = AutoConfig.for_model(model_type, **given)
        given, _ = type(config).get_config_dict(path)  # which knows what goes with the config of a base family
        del given["model_type"]
        known = config.to_dict()
    for name in fields.keys() - known.keys():
        near = difflib.get_close_matches(name, known, n=3)
        raise TrainingError(f"--set {name}: no field of {path} ({model_type}). Near names: {', '.join(near)}.")
    with reading(f"{path} with {fields}"):
        return AutoConfig.for_model(model_type, **given | fields)


def load_weights(path: str | Path, config: PreTrainedConfig, **kwargs) -> PreTrainedModel:
    """Load the model at a path, as a config describes it.

    Raises:
        UserError: its weights cannot be read, or some are missing or of another shape: transformers would make them up.
    """
    kwargs |= {"output_loading_info": True, "ignore_mismatched_sizes": True, "trust_remote_code": False}
    with reading(path):
        model, info = AutoModelForCausalLM.from_pretrained(path, config=config, **kwargs)
    for name, shape, expected in sorted(info["mismatched_keys"]):
        raise TrainingError(f"{path}: {name} has shape {list(shape)}, but {CONFIG_NAME} implies {list(expected)}.")
    if missing := sorted(info["missing_keys"]):
        raise TrainingError(f"{path}: {missing[0]} is missing, one of {len(missing)}, which {CONFIG_NAME} implies.")
    return model


def load_tokenizer(path: str | Path, trust_remote_code: bool):
    """Load the tokenizer of a checkpoint.

    Raises:
        UserError: there is none, or it is code that was not allowed to run.
    """
    hint = "" if trust_remote_code else " (if it is code that you trust: --trust-remote-code)"
    with reading(f"{path}: its tokenizer{hint}"):
        return AutoTokenizer.from_pretrained(path, trust_remote_code=trust_remote_code)
