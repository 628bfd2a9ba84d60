"""A checkpoint on disk: where it comes from, which tensors lie in which shard, and whether they fit its config.

Weights are read only where they are asked for (`open_tensors`). A shard is opened through safetensors, which reads and
checks its header only, and the fit is checked by letting transformers load tensors without storage, by its own naming
and merging rules.

A checkpoint may come from anywhere. Whatever its files hold, what cannot be used ends in one line that names the file
(`UserError`), not in a traceback, an endless wait or a full memory. So files are checked to be files before they are
opened, and sizes in the config are checked before a model is built of them.
"""

import contextlib
import copy
import json
import math
import re
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from types import NoneType, UnionType
from typing import get_args

import torch
import transformers
from huggingface_hub import snapshot_download
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalEntryNotFoundError,
    StrictDataclassFieldValidationError,
)
from safetensors import safe_open
from transformers.utils import ADAPTER_CONFIG_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

import modeling_attnres
from common.errors import UserError, describe, one_line, reading
from common.files import check_file, expand_user, files_below
from common.quiet import quiet_transformers
from modeling_attnres import DepthAttention, config_name, is_attnres_type, is_depth_parameter

from .gguf import dequantise


CONFIG_NAME = "config.json"
PICKLE_SUFFIXES = (".bin", ".pt", ".pth", ".ckpt")
OTHER_WEIGHTS = (  # and what else a training leaves in a folder: patterns of `fnmatch`, for paths
    *("*.bin", "*.pt", "*.pth", "*.ckpt", "*.gguf", "*.h5", "*.msgpack", "*.onnx", "*.ot", "consolidated*.safetensors"),
    *("*.npz", "*.npy", "*.pth.tar", "*.pkl", "*.pickle"),
    *("original/*", "*/original/*", "checkpoint-*/*", "*/checkpoint-*/*"),
)
SIZE = re.compile(r"size|dim|rank|state|num|n_|layers|experts|heads|labels")  # fields that make a model large
COUNT = re.compile(r"(size|dim|rank|heads|layers|experts)$")  # those of them that are positive integers, as a rule
LARGEST = 2**20  # the largest size believed: more would fill the memory before any tensor is compared

# By quantisation, the names of the tensors that it adds beside a weight. Others are not known to work.
QUANTISATION_TENSORS = {
    "fp8": re.compile(r"_scale_inv$|\.activation_scale$"),
    "bitsandbytes": re.compile(
        r"\.weight\.(absmax|quant_map|nested_absmax|nested_quant_map|quant_state\.\w+)$|\.(SCB|weight_format)$"
    ),
}


class CheckpointError(UserError):
    """A checkpoint that cannot be used; the message names the file or field, what was found and what was expected."""


@dataclass
class Checkpoint:
    """A folder with a `config.json` and safetensors shards.

    Args:
        folder: the folder.

    Raises:
        UserError: the folder is no readable safetensors checkpoint, or holds what cannot be read as files.
    """

    folder: Path
    config: dict = field(init=False)
    weight_map: dict[str, str] = field(init=False)  # tensor name -> shard file name

    def __post_init__(self):
        # No pipe or device in the folder, which would keep whoever opens it waiting; a link to a folder is left alone.
        for path in files_below(self.folder):
            if not path.is_dir():
                check_file(path)
        # No adapter, which transformers would load on top of the weights.
        if (self.folder / ADAPTER_CONFIG_NAME).exists():
            raise CheckpointError(
                f"{self.folder} holds an adapter ({ADAPTER_CONFIG_NAME}), which transformers loads on top of a model's "
                "weights: merge it (python -m training merge), or move it elsewhere."
            )
        self.config = read_json(self.folder / CONFIG_NAME)
        if not isinstance(self.config.get("model_type"), str):
            raise CheckpointError(f"{self.folder / CONFIG_NAME}: no model_type; expected a config of transformers.")
        self.weight_map = self._read_weight_map()
        if not self.weight_map:
            raise CheckpointError(f"{self.folder}: its shards hold no tensors.")

    def _read_weight_map(self) -> dict[str, str]:
        """Return the shard of each tensor, as the shards' own headers have it; an index must say the same."""
        single, index = self.folder / SAFE_WEIGHTS_NAME, self.folder / SAFE_WEIGHTS_INDEX_NAME
        if single.exists():  # transformers prefers it to an index
            with open_shard(single) as shard:
                return dict.fromkeys(shard.keys(), SAFE_WEIGHTS_NAME)
        if not index.exists():
            raise CheckpointError(_no_weights(self.folder))

        weight_map = read_json(index, unique_keys=True).get("weight_map")
        if not isinstance(weight_map, dict) or not all(isinstance(name, str) for name in weight_map.values()):
            raise CheckpointError(f"{index}: no weight_map; expected one from tensor names to shard files.")
        # Open each shard that the index names, and note what lies in it.
        shard_of: dict[str, str] = {}
        for name in sorted(set(weight_map.values())):
            if Path(name).name != name:  # it would lead out of the folder
                raise CheckpointError(f"{index}: shard {name!r} is not a plain file name in the same folder.")
            if not (self.folder / name).exists():
                raise CheckpointError(f"{index} names the shard {name}, which is missing from {self.folder}.")
            with open_shard(self.folder / name) as shard:
                for tensor in shard.keys():
                    if tensor in shard_of:
                        raise CheckpointError(f"Tensor {tensor} lies in two shards: {shard_of[tensor]} and {name}.")
                    shard_of[tensor] = name
        # Compare the index with that.
        for tensor, name in weight_map.items():
            if shard_of.get(tensor) != name:
                where = f"it lies in {shard_of[tensor]}" if tensor in shard_of else "no shard holds it"
                raise CheckpointError(f"{index}: {tensor} should lie in {name}, but {where}.")
        return shard_of

    @property
    def has_head(self) -> bool:
        """Whether this is a causal LM's checkpoint; a base model's tensors have no `model.` prefix."""
        return any(name.startswith("model.") for name in self.weight_map)

    @property
    def shards(self) -> list[str]:
        """The shard file names, in order."""
        return sorted(set(self.weight_map.values()))

    def describe(self) -> dict[str, tuple[tuple[int, ...], str]]:
        """Return shape and dtype (as safetensors names it) of every tensor, from the headers."""
        described = {}
        for name in self.shards:
            with open_shard(self.folder / name) as shard, reading(self.folder / name):
                for tensor in shard.keys():
                    view = shard.get_slice(tensor)
                    described[tensor] = (tuple(view.get_shape()), view.get_dtype())
        return described

    @contextlib.contextmanager
    def open_tensors(self) -> Iterator[Callable[[str], torch.Tensor]]:
        """Give a function that reads a tensor by its name. Every shard is opened once."""
        with contextlib.ExitStack() as stack:
            shards = {name: stack.enter_context(open_shard(self.folder / name)) for name in self.shards}

            def read(name: str) -> torch.Tensor:
                shard = self.weight_map[name]
                with reading(f"{self.folder / shard}: {name}"):
                    return shards[shard].get_tensor(name)

            yield read

    @property
    def is_attnres(self) -> bool:
        """Whether this is an Attention Residuals checkpoint."""
        return is_attnres_type(self.config["model_type"])

    @property
    def depth_names(self) -> list[str]:
        """The names of the depth tensors that are there, sorted."""
        return sorted(filter(is_depth_parameter, self.weight_map))

    @property
    def depth_prefix(self) -> str:
        """How the names of depth tensors begin in a checkpoint of this kind."""
        return "model.attn_res." if self.has_head else "attn_res."

    def expected_depth_names(self, config: transformers.PreTrainedConfig) -> list[str]:
        """Return the names of the depth tensors that an Attention Residuals checkpoint of its kind has, sorted."""
        if config.attn_res_mode == "none":
            return []
        with torch.device("meta"):
            depth = DepthAttention.from_config(config)
        return sorted(f"{self.depth_prefix}{name}" for name, _ in depth.named_parameters())

    @cached_property
    def config_class(self) -> type[transformers.PreTrainedConfig]:
        """The config class of this checkpoint's family with Attention Residuals, whose models it can be loaded in.

        Raises:
            CheckpointError: no such family can be derived; says why.
        """
        model_type = self.config["model_type"]
        try:
            config_class = getattr(modeling_attnres, config_name(model_type))
            model_class(config_class, self.has_head)
        except KeyError:
            raise CheckpointError(
                f"{self.folder}: transformers {transformers.__version__} has no family {model_type!r}."
            ) from None
        except (AttributeError, ValueError) as error:
            raise self.not_portable(error) from error
        return config_class

    def read_config(self) -> transformers.PreTrainedConfig:
        """Return the config, as one of this checkpoint's family with Attention Residuals.

        Raises:
            CheckpointError: it cannot be one, or would be larger than what its tensors allow.
        """
        config_class, file = self.config_class, self.folder / CONFIG_NAME
        # No more layers than the tensors' names have; some families call their number otherwise.
        layers = 1 + max((layer for layer in map(layer_of, self.weight_map) if layer is not None), default=-1)
        for name in {"num_hidden_layers", getattr(config_class, "attribute_map", {}).get("num_hidden_layers")}:
            if isinstance(count := self.config.get(name), int) and count > layers:
                raise CheckpointError(f"{file}: {name} is {count}, but the tensors' names have {layers} layers.")
        # No size that fills the memory, and an epsilon that a norm can use.
        for name, value in _fields(self.config):
            if isinstance(value, int) and value > LARGEST and SIZE.search(name):
                raise CheckpointError(f"{file}: {name} is {value}, expected at most {LARGEST}.")
            if name.endswith(("eps", "epsilon")) and isinstance(value, int | float) and not 0 <= value < math.inf:
                raise CheckpointError(f"{file}: {name} is {value}, expected a finite number that is not negative.")
        # No dtype but a name: others fail where they are used.
        for name in ("dtype", "torch_dtype"):
            if not isinstance(value := self.config.get(name), str | None):
                raise CheckpointError(f'{file}: {name} is {_as_json(value)}, expected a name such as "bfloat16".')
        with reading(f"{file}{self._odd_sizes}"):
            try:
                return config_class.from_pretrained(self.folder)
            except StrictDataclassFieldValidationError as error:
                raise CheckpointError(f"{file}: {self._describe_field(error)}") from error

    def _describe_field(self, error: StrictDataclassFieldValidationError) -> str:
        """Say which field of the config has which value, and what its family expects."""
        name, cause = re.search(r"'(\w+)'", str(error))[1], error.__cause__
        field = self.config_class.__dataclass_fields__.get(name)
        if not isinstance(cause, TypeError) or name not in self.config or field is None:
            return f"{name}: {describe(cause or error)}"
        kinds = get_args(field.type) if isinstance(field.type, UnionType) else [field.type]
        names = ["null" if kind is NoneType else getattr(kind, "__name__", str(kind)) for kind in kinds]
        return f"{name} is {_as_json(self.config[name])}, expected {' or '.join(names)}."

    @property
    def _odd_sizes(self) -> str:
        """The sizes in the config that are no positive integers, which may be why it fails, in brackets."""
        sizes = [(name, value) for name, value in _fields(self.config) if COUNT.search(name)]
        odd = [pair for pair in sizes if isinstance(pair[1], str | float) or (type(pair[1]) is int and pair[1] < 1)]
        return f" ({', '.join(f'{name} is {_as_json(value)}' for name, value in odd)})" if odd else ""

    def not_portable(self, reason: object) -> CheckpointError:
        """Return the error that says why the family cannot be ported."""
        return CheckpointError(f"{self.folder}: the family {self.config['model_type']!r} cannot be ported: {reason}")

    @property
    def quantisation(self) -> re.Pattern | None:
        """The pattern of the names of tensors that quantisation added, or `None` for a plain checkpoint."""
        settings = self.config.get("quantization_config")
        if settings is None:
            return None
        if not isinstance(settings, dict):
            raise CheckpointError(
                f"{self.folder / CONFIG_NAME}: quantization_config is {settings!r}; expected an object."
            )
        method = str(settings.get("quant_method"))
        if method not in QUANTISATION_TENSORS:
            raise CheckpointError(
                f"{self.folder}: quantised with {method!r}, which is not known to work with depth attention. Known: "
                f"{', '.join(QUANTISATION_TENSORS)}. Port the checkpoint it was made from and quantise the port."
            )
        return QUANTISATION_TENSORS[method]

    def read_depth(self, config: transformers.PreTrainedConfig) -> DepthAttention:
        """Read the parameters of depth attention.

        Raises:
            CheckpointError: one is missing, of another shape than the config implies, or not finite.
        """
        names, expected = self.depth_names, self.expected_depth_names(config)
        if names != expected:
            raise CheckpointError(
                f"{self.folder}: expected the depth tensors {' and '.join(expected)}, found "
                f"{' and '.join(names) or 'none'}."
            )
        depth = DepthAttention.from_config(config)
        with self.open_tensors() as read:
            tensors = {name: read(name).float() for name in names}
        for name, parameter in depth.named_parameters():
            name = f"{self.depth_prefix}{name}"
            tensor, shape = tensors[name], list(parameter.shape)
            if list(tensor.shape) != shape:
                raise CheckpointError(
                    f"{self.folder}: {name} has shape {list(tensor.shape)}, but {CONFIG_NAME} implies {shape}."
                )
            if not tensor.isfinite().all():
                raise CheckpointError(f"{self.folder}: {name} holds values that are not finite.")
            parameter.data = tensor
        return depth

    def check_fit(self, config: transformers.PreTrainedConfig) -> None:
        """Check that the tensors are those that the config's model expects; depth parameters may yet be missing.

        Transformers loads tensors that have a shape but no storage, so names, merging rules and shapes are its own.
        Layers after the last one that predict further tokens (DeepSeek's MTP) may be there: transformers has none.

        Raises:
            CheckpointError: tensors are missing, unexpected or of another shape, or the model cannot be built.
        """
        # Tensors without storage, of the shapes in the headers; those that quantisation added are in no plain model.
        quantisation, config = self.quantisation, copy.deepcopy(config)
        tensors, packed = {}, set()
        for name, (shape, dtype) in self.describe().items():
            if quantisation is not None and dtype in ("U8", "I8"):
                packed.add(name)  # several values to a byte: the shape says nothing
            if quantisation is None or not quantisation.search(name):
                with reading(f"{self.folder}: {name}"):
                    tensors[name] = torch.empty(shape, device="meta")
        if quantisation is not None:
            del config.quantization_config  # the weights' own shapes are checked, not how a kernel wants them
        # Load them.
        with quiet_transformers():
            try:
                _, loading = model_class(type(config), self.has_head).from_pretrained(
                    None,
                    config=config,
                    state_dict=tensors,
                    device_map={"": "meta"},
                    output_loading_info=True,
                    ignore_mismatched_sizes=True,
                )
            except (AttributeError, TypeError) as error:  # what depth attention needs is not there
                raise self.not_portable(f"{describe(error)}{self._odd_sizes}") from error
            except Exception as error:  # what is wrong with a field, a family may say by any exception
                raise CheckpointError(
                    f"{self.folder}: tensors do not fit {CONFIG_NAME}{self._odd_sizes}: {describe(error)}"
                ) from error
        # Shapes are those that the model has.
        for name, shape, expected in sorted(loading["mismatched_keys"]):
            if name in packed:
                continue
            raise CheckpointError(
                f"{self.folder}: {name} has shape {list(shape)}, but {CONFIG_NAME} implies {list(expected)}."
            )
        # Nothing is missing but the depth parameters that no shard holds yet.
        depth = sorted(filter(is_depth_parameter, loading["missing_keys"]))
        expected = [name for name in self.expected_depth_names(config) if name not in self.weight_map]
        if depth != expected:
            raise self.not_portable(f"its depth parameters are {depth}, expected {expected}.")
        missing = sorted(set(loading["missing_keys"]).difference(depth))
        if missing:
            raise CheckpointError(f"{self.folder}: no shard holds {_some(missing)}, which {CONFIG_NAME} implies.")
        # Nothing is there besides, but layers that predict further tokens.
        layers, further = config.num_hidden_layers, self.config.get("num_nextn_predict_layers")
        known = range(layers, layers + further) if isinstance(further, int) else ()
        unexpected = sorted(name for name in loading["unexpected_keys"] if layer_of(name) not in known)
        if unexpected:
            raise CheckpointError(
                f"{self.folder}: {_some(unexpected)} has no place in the model that {CONFIG_NAME} describes."
            )


def is_known_lossless(config: transformers.PreTrainedConfig) -> bool:
    """Say whether ports like this are tested to be lossless; any other is verified when it is made."""
    add = config.attn_res_form == "add"
    families = modeling_attnres.ADDITIVE_FAMILIES if add else modeling_attnres.LOSSLESS_FAMILIES
    return config.base_model_type() in families


def model_class(config_class: type[transformers.PreTrainedConfig], has_head: bool) -> type:
    """Return the class of a family's models: causal LM, or without a head."""
    return getattr(modeling_attnres, config_class.class_names()["AutoModelForCausalLM" if has_head else "AutoModel"])


def _fields(config: dict) -> Iterator[tuple[str, object]]:
    """Yield the fields of a config, and of configs within it."""
    for name, value in config.items():
        yield from _fields(value) if isinstance(value, dict) else [(name, value)]


def _as_json(value: object) -> str:
    """Write a value as its file has it, cut to what is enough to find it."""
    return one_line(json.dumps(value, ensure_ascii=False), 80)


def layer_of(name: str) -> int | None:
    """Return the layer that a tensor belongs to by its name, the first number in it, or `None`."""
    match = re.search(r"(?:^|\.)(\d{1,9})\.", name)
    return None if match is None else int(match[1])


def _some(names: list[str]) -> str:
    """Name the first of many, and how many more there are."""
    return names[0] + (f" (and {len(names) - 1} more)" if len(names) > 1 else "")


def _no_weights(folder: Path) -> str:
    """Say what a folder without safetensors holds in their place, and what to do about it."""
    pickles = sorted(path.name for path in folder.iterdir() if path.suffix in PICKLE_SUFFIXES)
    if pickles:
        return (
            f"{folder} holds pickled weights ({pickles[0]}); only safetensors are read. Where you trust its origin "
            "load it with transformers and save it: save_pretrained writes safetensors."
        )
    return f"{folder}: neither {SAFE_WEIGHTS_NAME} nor {SAFE_WEIGHTS_INDEX_NAME} is there."


def read_json(path: Path, unique_keys: bool = False) -> dict:
    """Read a JSON object; an error names the file and line. With `unique_keys` a key that comes twice is refused."""

    def unique(pairs):
        keys = [key for key, _ in pairs]
        if unique_keys and len(set(keys)) < len(keys):
            twice = next(key for key in keys if keys.count(key) > 1)
            raise CheckpointError(f"{path}: {twice!r} is named twice.")
        return dict(pairs)

    check_file(path)
    with reading(f"{path} as JSON"):
        content = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    if not isinstance(content, dict):
        raise CheckpointError(f"{path}: expected a JSON object, found a {type(content).__name__}.")
    return content


def open_shard(path: Path):
    """Open a safetensors file, as a context manager; its header is checked against the file's size and for overlaps."""
    check_file(path)
    with reading(f"{path} as a whole safetensors file"):
        return safe_open(path, framework="pt")


@contextlib.contextmanager
def open_source(source: str, scratch: Path | None = None) -> Iterator[Checkpoint]:
    """Open a local folder, a GGUF file, or a hub id (downloaded, or found in the cache).

    A GGUF file is first dequantised by transformers into a temporary folder, which is made in `scratch`.
    """
    path = expand_user(source)
    if path.is_dir():
        yield Checkpoint(path)
    elif path.suffix == ".gguf" and path.exists():
        with tempfile.TemporaryDirectory(prefix=".gguf-", dir=scratch) as folder:
            with quiet_transformers():
                dequantise(path, Path(folder))
            yield Checkpoint(Path(folder))
    elif path.exists():
        raise CheckpointError(f"{source} is neither a checkpoint folder nor a .gguf file.")
    else:
        try:
            folder = snapshot_download(source, ignore_patterns=list(OTHER_WEIGHTS))
        except (HFValidationError, HfHubHTTPError, LocalEntryNotFoundError, OSError) as error:
            raise CheckpointError(
                f"{source} is no local path, and not to be had from the hub: {describe(error)}"
            ) from error
        yield Checkpoint(Path(folder))
