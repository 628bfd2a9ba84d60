"""Back to the base family, where that changes nothing: depth attention as it was at the start."""

from dataclasses import dataclass, fields
from pathlib import Path

from huggingface_hub.constants import REPOCARD_NAME
from transformers import PreTrainedConfig

from common.files import check_target, complete_or_absent, take_over, write_new
from model_cards.provenance import NAME as PROVENANCE
from modeling_attnres.configuration_attnres import PREFIX, AttnResConfigMixin

from .checkpoint import CONFIG_NAME, Checkpoint, CheckpointError, model_class, open_source
from .writing import copy_other_files, numbered, save_shard, write_index


@dataclass(frozen=True)
class ExportReport:
    """What an export did."""

    target: Path
    family: str
    tensors_dropped: int

    def __str__(self) -> str:
        return (
            f"exported to {self.target}\n"
            f"family      {self.family}\n"
            f"dropped     {self.tensors_dropped} depth tensors: they are as at the start, the base computes the same"
        )


def export_checkpoint(source: str, target: Path) -> ExportReport:
    """Write an Attention Residuals checkpoint as one of its base family.

    Raises:
        UserError: the source is none, its depth attention is trained, or it was not ported.

    Example:
        from pathlib import Path
        from conversion.export import export_checkpoint

        print(export_checkpoint("ported", Path("exported")))
    """
    check_target(target, source)
    with complete_or_absent(target) as folder, open_source(source, folder) as checkpoint:
        config = check_exportable(checkpoint)
        write_base_shards(checkpoint, folder)
        # The card and provenance that came with a port describe the port: they stay behind.
        ours = (PROVENANCE, REPOCARD_NAME) if (checkpoint.folder / PROVENANCE).exists() else ()
        copy_other_files(checkpoint, folder, ours)
        # The base's config: all fields but those of depth attention and those that name our classes.
        dropped = {*(field.name for field in fields(AttnResConfigMixin)), "auto_map", "architectures", "model_type"}
        kept = {key: value for key, value in config.to_dict().items() if key not in dropped}
        base = config.base_class(**kept)
        base.architectures = [model_class(type(config), checkpoint.has_head).__name__.removeprefix(PREFIX)]
        write_new(folder / CONFIG_NAME, base.to_json_string())
    return ExportReport(target, config.base_model_type(), len(checkpoint.depth_names))


def check_exportable(checkpoint: Checkpoint) -> PreTrainedConfig:
    """Return the config of a checkpoint whose base family would compute the same.

    Raises:
        CheckpointError: it would not; says why.
    """
    # Is it a checkpoint of ours, and whole?
    if not checkpoint.is_attnres:
        raise CheckpointError(
            f"{checkpoint.folder} is no Attention Residuals checkpoint but a {checkpoint.config['model_type']!r}."
        )
    config = checkpoint.read_config()
    checkpoint.check_fit(config)
    if config.attn_res_mode == "none":
        return config
    # Is every read as at the start? A norm with scaled epsilon cannot tell it from the sum, or its gate is closed.
    depth = checkpoint.read_depth(config)
    distances = depth.distance_from_start()
    trained = [distance for distance in distances.values() if distance > 0]
    if trained:
        plural = {"query": "queries", "query_up": "query projections", "static": "static weights", "gate": "gates"}
        raise CheckpointError(
            f"{checkpoint.folder}: {len(trained)} of {len(distances)} {plural[depth.moving]} are trained (the largest "
            f"norm is {max(trained):.3g}); no model of the base family computes the same."
        )
    if config.attn_res_form == "replace":
        if drops_sources(config):
            raise CheckpointError(f"{checkpoint.folder}: attn_res_window={config.attn_res_window} drops sources.")
        if not config.attn_res_scale_norm_eps:
            raise CheckpointError(
                f"{checkpoint.folder}: attn_res_scale_norm_eps is off, so its norms use another epsilon than the "
                "base's."
            )
    return config


def drops_sources(config: PreTrainedConfig) -> bool:
    """Say whether a window hides a source from any site."""
    layout = config.attn_res_layout
    return any(len(layout.visible_blocks(site)) < layout.closed_blocks(site) for site in range(layout.num_sites))


def write_base_shards(checkpoint: Checkpoint, folder: Path) -> None:
    """Take over shards without depth tensors, rewrite those with some, drop those with nothing else."""
    depth = set(checkpoint.depth_names)
    kept: dict[str, list[str]] = {}  # shard -> its tensors that stay
    for tensor, shard in checkpoint.weight_map.items():
        if tensor not in depth:
            kept.setdefault(shard, []).append(tensor)
    mixed = {checkpoint.weight_map[name] for name in depth}
    names = numbered(kept, len(kept))
    whole = {checkpoint.folder / old: folder / new for old, new in names.items() if old not in mixed}
    if whole:
        take_over(whole)
    with checkpoint.open_tensors() as read:
        for old in mixed & kept.keys():
            save_shard({tensor: read(tensor) for tensor in kept[old]}, folder / names[old])
    write_index(folder, {tensor: names[old] for old, tensors in kept.items() for tensor in tensors})
