"""What the ranks of a pipeline save and load: together one checkpoint like any other, complete or not at all."""

import contextlib
import json
import shutil
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
from peft import get_peft_model_state_dict, set_peft_model_state_dict
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.core_model_loading import revert_weight_conversion
from transformers.utils import ADAPTER_SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from common.errors import describe
from common.files import complete_or_absent
from common.quiet import quiet_transformers
from modeling_attnres import is_depth_parameter

from .checkpoints import writing
from .loading import TrainingError
from .pipeline import Pipeline, naming_lost_processes
from .pipeline_cut import Cut
from .pipeline_stage import stand_in


def save_weights(pipeline: Pipeline, target: Path, add_files: Callable[[Path], None] = lambda folder: None) -> None:
    """Write the whole model or, if it is adapted, the adapter, complete or not at all.

    The folder is a checkpoint or an adapter like any other; the names are those of a model that was never cut.

    Args:
        pipeline: of this rank; every rank calls this.
        target: the folder, which is absent or empty, and which all ranks can write to.
        add_files: writes on the first rank what else belongs there.

    Raises:
        TrainingError: a rank could not write its part.
    """
    save = save_model if pipeline.adapted is None else save_adapter
    with naming_lost_processes():
        save(pipeline, target, add_files)
        dist.barrier(group=pipeline.group)


def save_adapter(pipeline: Pipeline, target: Path, add_files: Callable[[Path], None]) -> None:
    """Write the adapter on the first rank, which is sent the tensors of the others."""
    own = {name: value.cpu() for name, value in get_peft_model_state_dict(pipeline.adapted).items()}
    parts = [None] * pipeline.cut.ranks if pipeline.rank == 0 else None
    dist.gather_object(own, parts, group=pipeline.group, group_dst=0)
    if pipeline.rank == 0:
        state = {name: value for part in parts for name, value in part.items()}
        with complete_or_absent(target) as folder, writing(target):
            pipeline.adapted.save_pretrained(folder)  # with the tensors of this rank alone
            save_file(state, folder / ADAPTER_SAFE_WEIGHTS_NAME, metadata={"format": "pt"})
            add_files(folder)


def save_model(pipeline: Pipeline, target: Path, add_files: Callable[[Path], None]) -> None:
    """Write the whole model: each rank its tensors, one file a rank."""
    rank, ranks, group = pipeline.rank, pipeline.cut.ranks, pipeline.group
    own_folder = complete_or_absent(target) if rank == 0 else contextlib.nullcontext()
    with own_folder as folder:
        where = [folder]
        dist.broadcast_object_list(where, group=group, group_src=0)
        error = None
        try:
            save_part(pipeline, where[0] / f"stage-{rank}")
        except Exception as raised:  # others wait for this rank's answer
            error = describe(raised)
        errors = [None] * ranks
        dist.all_gather_object(errors, error, group=group)
        for other, found in enumerate(errors):
            if found is not None:
                raise TrainingError(f"{target}: pipeline rank {other} cannot write its part: {found}.")
        if rank == 0:
            join_parts(folder, [folder / f"stage-{other}" for other in range(ranks)])
            add_files(folder)


def save_part(pipeline: Pipeline, part: Path) -> None:
    """Write what a rank saves to a folder; the first one's is a checkpoint, with a config and its code."""
    model, state = pipeline.model, own_state(pipeline)
    if pipeline.rank == 0:
        model.save_pretrained(part, state_dict=state, max_shard_size="1000TB")
    else:  # save_pretrained writes on the first rank alone
        part.mkdir()
        state = {name: value.contiguous() for name, value in revert_weight_conversion(model, state).items()}
        save_file(state, part / SAFE_WEIGHTS_NAME, metadata={"format": "pt"})


def own_state(pipeline: Pipeline) -> dict[str, torch.Tensor]:
    """Return what a rank saves: of what several have, one rank has it."""
    state = pipeline.model.state_dict()
    if pipeline.rank == 0:
        return state
    tied = None if pipeline.tied is None else pipeline.tied.data_ptr()
    return {
        name: value
        for name, value in state.items()
        if not is_depth_parameter(name) and (tied is None or value.data_ptr() != tied)
    }


def join_parts(folder: Path, parts: list[Path]) -> None:
    """Make one checkpoint of those that the ranks wrote into folders within it."""
    files, size = {}, 0
    for number, part in enumerate(parts, start=1):
        name = f"model-{number:05}-of-{len(parts):05}.safetensors"
        (part / SAFE_WEIGHTS_NAME).rename(folder / name)
        with safe_open(folder / name, "pt") as file:
            files |= dict.fromkeys(file.keys(), name)
        size += (folder / name).stat().st_size
    for path in parts[0].iterdir():  # the config and its code
        path.rename(folder / path.name)
    index = {"metadata": {"total_size": size}, "weight_map": files}
    (folder / SAFE_WEIGHTS_INDEX_NAME).write_text(json.dumps(index, indent=1) + "\n")
    for part in parts:
        shutil.rmtree(part)


def load_part(path: str | Path, cut: Cut, rank: int, **kwargs) -> PreTrainedModel:
    """Load a causal language model for a rank: the layers of other ranks are left out, in memory and from disk.

    Args:
        path: of a model with Attention Residuals.
        cut: of its layers.
        rank: in the pipeline.
        kwargs: for `from_pretrained`.
    """
    config = AutoConfig.from_pretrained(path)
    model_class = AutoModelForCausalLM._model_mapping[type(config)]
    own = cut.layers_on(rank)

    def make_without_layers(self, config, *args, **kwargs):
        model_class.__init__(self, config, *args, **kwargs)
        layers = self.get_decoder().layers
        for index, layer in enumerate(layers):
            if index not in own:
                layers[index] = stand_in(layer, index)

    part_class = type(model_class.__name__, (model_class,), {"__init__": make_without_layers})
    with quiet_transformers():  # it reports the tensors left out
        model = part_class.from_pretrained(path, config=config, **kwargs)
    model.__class__ = model_class
    return model


def restore_weights(pipeline: Pipeline, checkpoint: Path) -> None:
    """Give a rank its part of what `save_weights` wrote.

    Raises:
        TrainingError: an adapter lacks a tensor of this rank.
    """
    if pipeline.adapted is None:
        part = load_part(checkpoint, pipeline.cut, pipeline.rank, dtype=torch.float32)
        pipeline.model.load_state_dict(pipeline.keep_parts(part).state_dict())
        return
    file = checkpoint / ADAPTER_SAFE_WEIGHTS_NAME
    missing = set(set_peft_model_state_dict(pipeline.adapted, load_file(file)).missing_keys)
    for name, parameter in pipeline.adapted.named_parameters():
        if parameter.requires_grad and name in missing:
            raise TrainingError(f"{file}: {name} is missing.")
