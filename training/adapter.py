"""Adapters as PEFT writes them: checked and loaded whole, and merged into their base."""

import contextlib
import re
from pathlib import Path

from peft import LoraConfig, PeftConfig, PeftModel, get_peft_model_state_dict
from transformers import PreTrainedModel
from transformers.utils import ADAPTER_CONFIG_NAME, ADAPTER_SAFE_WEIGHTS_NAME

from common.errors import UserError, reading
from common.files import check_target, complete_or_absent
from conversion.checkpoint import Checkpoint, layer_of, open_shard, open_source, read_json
from conversion.writing import add_card, copy_other_files

from .checkpoints import RECIPE, writing
from .loading import TrainingError, load_attnres_config, load_weights


NAMES = ("target_modules", "exclude_modules", "modules_to_save", "layers_pattern", "rank_pattern", "alpha_pattern")


def read_adapter(path: Path) -> LoraConfig:
    """Read the config of an adapter.

    Raises:
        UserError: there is none, it is no LoRA of a named model, or a name in it is a pattern. PEFT matches those with
            every module's name, and there are patterns for which that does not end.
    """
    file = path / ADAPTER_CONFIG_NAME
    if path.is_dir() and not file.exists():
        raise TrainingError(f"{path} is no adapter: {ADAPTER_CONFIG_NAME} is missing.")
    settings = read_json(file)
    for field, expected in (("peft_type", "'LORA'"), ("base_model_name_or_path", "a folder or hub id")):
        value = settings.get(field)
        if not isinstance(value, str) or not value or (field == "peft_type" and value != "LORA"):
            raise TrainingError(f"{file}: {field} is {value!r}, expected {expected}.")
    for field in NAMES:
        names = settings.get(field) or []
        for name in [names] if isinstance(names, str) else names:
            if not re.fullmatch(r"(\.\*\\.)?[\w.-]+", str(name)):  # PEFT puts .*\. before the names of experts
                raise TrainingError(f"{file}: {field} has {name!r:.60}, expected plain names of modules, no patterns.")
    with reading(file):
        return PeftConfig.from_pretrained(path)


def is_of_standard_residuals(path: Path) -> bool:
    """Tell whether an adapter was trained with `--control`."""
    recipe = path / RECIPE
    return recipe.exists() and bool(read_json(recipe).get("control"))


def load_adapter(model: PreTrainedModel, path: Path, settings: LoraConfig) -> PeftModel:
    """Load an adapter onto a model.

    Raises:
        UserError: the adapter is that of another model, not whole, or not finite.
    """
    file = path / ADAPTER_SAFE_WEIGHTS_NAME
    with open_shard(file) as shard:
        stored = set(shard.keys())
        for name in stored:
            if not shard.get_tensor(name).isfinite().all():
                raise TrainingError(f"{file}: {name} holds values that are not finite.")
    with reading(f"{path} as an adapter of {model.name_or_path}"):
        adapted = PeftModel.from_pretrained(model, path, config=settings)
    expected = set(get_peft_model_state_dict(adapted))
    for names, fault in ((expected - stored, "is missing"), (stored - expected, "has no place in this model")):
        if names:
            raise TrainingError(
                f"{file}: {min(names)} {fault}, one of {len(names)}; {ADAPTER_CONFIG_NAME} implies others."
            )
    return adapted


def merge_adapter(adapter: Path, target: Path) -> None:
    """Merge an adapter into its base: a model that needs no PEFT, complete or absent.

    Example:
        ```python
        from pathlib import Path

        from training.adapter import merge_adapter

        merge_adapter(Path("tuned/adapter"), Path("merged"))
        ```

    Raises:
        UserError: the adapter or its base cannot be read, or they do not fit; nothing is written.
    """
    settings = read_adapter(adapter)
    base = settings.base_model_name_or_path
    check_target(target, base)
    with contextlib.ExitStack() as stack:
        try:
            checkpoint = stack.enter_context(open_source(base))
        except UserError as error:
            hint = "" if Path(base).is_absolute() else f" Relative paths start at {Path.cwd()}."
            raise TrainingError(f"{adapter / ADAPTER_CONFIG_NAME}: base_model_name_or_path: {error}{hint}") from error

        # The merged model, in the dtype of its base
        config = load_attnres_config(checkpoint.folder)
        if is_of_standard_residuals(adapter):
            config.attn_res_mode = "none"
        model = load_weights(checkpoint.folder, config, dtype="auto")
        merged = load_adapter(model, adapter, settings).merge_and_unload()

        # Its files, with all that the base holds besides
        details = {"with the adapter": f"{adapter.resolve().parent.name}/{adapter.name}", "of rank": str(settings.r)}
        state, unread = merged.state_dict(), unread_tensors(checkpoint, merged)
        with complete_or_absent(target) as folder, writing(target):
            copy_other_files(checkpoint, folder)
            with checkpoint.open_tensors() as read:
                merged.save_pretrained(folder, state_dict=state | {name: read(name) for name in unread})
            add_card(folder, target, checkpoint, base, "merge", **details)
    if unread:
        print(f"{target}: kept {len(unread)} tensors that no model of transformers reads, as multi-token prediction's")


def unread_tensors(base: Checkpoint, model: PreTrainedModel) -> list[str]:
    """List what a checkpoint holds for other programs: layers after the model's last, and what its class ignores."""
    own, ignored = model.state_dict().keys(), model._keys_to_ignore_on_load_unexpected or ()

    def is_unread(name: str) -> bool:
        layer = layer_of(name)
        is_after = layer is not None and layer >= model.config.num_hidden_layers
        return is_after or any(re.search(key, name) for key in ignored)

    return [name for name in base.weight_map if name not in own and is_unread(name)]
