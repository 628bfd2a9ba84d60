"""Which decoder layers each stage of a pipeline has, and what travels between stages: a plan; the runtime sends it.

Stage c of C = P·V runs on rank c mod P. Shapes: B rows of a microbatch, T tokens, D hidden size.
"""

from dataclasses import dataclass
from itertools import pairwise

from transformers import PreTrainedConfig

from modeling_attnres.configuration_attnres import BlockLayout

from .loading import TrainingError


@dataclass(frozen=True)
class Cut:
    """Which decoder layers each stage has, and what travels between stages.

    Args:
        starts: the first decoder layer of each of the C stages.
        num_layers: L, decoder layers.
        ranks: P; stage c runs on rank c mod P.
        layout: which blocks there are; `None`: standard residuals, of which there are none.
        caching: a rank keeps the blocks that it has received or made.

    Example:
        from modeling_attnres.configuration_attnres import BlockLayout
        from training.pipeline_cut import cut_layers

        layout = BlockLayout(16, starts=tuple(range(0, 16, 2)))
        cut = cut_layers(16, ranks=2, virtual=2, layout=layout)
        assert cut.starts == (0, 4, 8, 12)
        assert [cut.num_sent(stage) for stage in range(4)] == [0, 3, 2, 2]  # 3: the embedding, a block, the running sum
    """

    starts: tuple[int, ...]
    num_layers: int
    ranks: int
    layout: BlockLayout | None
    caching: bool = True

    @property
    def num_stages(self) -> int:
        return len(self.starts)

    def layers_of(self, stage: int) -> range:
        """Return the decoder layers of a stage."""
        return [range(start, end) for start, end in pairwise((*self.starts, self.num_layers))][stage]

    def stages_of(self, rank: int) -> range:
        """Return the stages of a rank."""
        return range(rank, self.num_stages, self.ranks)

    def layers_on(self, rank: int) -> set[int]:
        """Return the decoder layers of a rank's stages."""
        return {layer for stage in self.stages_of(rank) for layer in self.layers_of(stage)}

    def closed_before(self, stage: int) -> int:
        """Return how many blocks have closed where the stage begins; its first layer may close one more."""
        first = self.starts[stage]
        return 0 if self.layout is None else self.closed_after(stage) - self.layout.opens_block(first)

    def closed_after(self, stage: int) -> int:
        """Return how many blocks have closed once the stage's first layer has closed what ends there."""
        return 0 if self.layout is None else self.layout.closed_blocks(2 * self.starts[stage])

    def known(self, stage: int) -> int:
        """Return how many of the blocks the stage's rank has from its stage before.

        That one ended where another began, with the blocks closed there; if that one's first layer closes another, it
        is the running sum with which the rank's stage ended.
        """
        before = stage - self.ranks
        return self.closed_after(before + 1) if self.caching and before >= 0 else 0

    def sent(self, stage: int) -> range:
        """Return which blocks travel to a stage, beside the running sum."""
        return range(min(self.known(stage), self.closed_before(stage)), self.closed_before(stage))

    def num_sent(self, stage: int) -> int:
        """Return how many tensors `[B, T, D]` travel to a stage, the running sum included."""
        within_a_rank = self.ranks == 1
        return 0 if stage == 0 or within_a_rank else len(self.sent(stage)) + 1

    @property
    def total_sent(self) -> int:
        """How many tensors `[B, T, D]` travel in one forward pass; as many gradients travel back."""
        return sum(self.num_sent(stage) for stage in range(self.num_stages))


def cut_layers(num_layers: int, ranks: int, virtual: int, layout: BlockLayout | None, caching: bool = True) -> Cut:
    """Cut a model's layers into ranks · virtual stages as equal as can be, the longer ones first.

    Raises:
        TrainingError: there are more stages than layers.
    """
    if ranks < 1 or virtual < 1:
        raise TrainingError(f"A pipeline needs 1 rank and 1 virtual stage or more, got {ranks} and {virtual}.")
    stages = ranks * virtual
    if stages > num_layers:
        raise TrainingError(
            f"A pipeline of {ranks} ranks with {virtual} virtual stages each has {stages} stages, but the model has "
            f"{num_layers} decoder layers: each stage needs one."
        )
    size, longer = divmod(num_layers, stages)
    starts = tuple(stage * size + min(stage, longer) for stage in range(stages))
    return Cut(starts, num_layers, ranks, layout, caching)


def describe_cut(config: PreTrainedConfig, ranks: int, virtual: int) -> list[str]:
    """Describe in lines how a model is cut, and what travels in a forward pass, per token.

    Beside it stands the paper's count.

    Raises:
        TrainingError: as `cut_layers`.
    """
    layout, layers = layout_of(config), config.num_hidden_layers
    cut, whole = (cut_layers(layers, ranks, virtual, layout, caching) for caching in (True, False))
    lines = [
        f"stage {stage} on rank {stage % ranks}: layers {own.start} to {own.stop - 1}, "
        f"sent {cut.num_sent(stage)} ({whole.num_sent(stage)} without caching)"
        for stage in range(cut.num_stages)
        if (own := cut.layers_of(stage))
    ]
    lines.append(f"together: {cut.total_sent} vectors a token ({whole.total_sent} without caching)")
    if layout is not None:
        blocks = (2 * layers if layout.full else len(layout.blocks)) / cut.num_stages
        cached, history = paper_counts(ranks, virtual, blocks)
        lines.append(f"by the paper's formulas, of {blocks:g} blocks a stage: {cached:g} ({history:g})")
    return lines


def paper_counts(ranks: int, virtual: int, blocks: float) -> tuple[float, float]:
    """Return how many blocks travel a token by the paper's formulas, with caching and without, of N_p in each stage.

    Without caching they are C (C - 1) / 2 · N_p, with it P (P - 1) / 2 · N_p + (V - 1) P² · N_p. That leaves out the
    embedding, and counts blocks that a rank has made itself.
    """
    stages = ranks * virtual
    cached = (ranks * (ranks - 1) / 2 + (virtual - 1) * ranks**2) * blocks
    return cached, stages * (stages - 1) / 2 * blocks


def layout_of(config: PreTrainedConfig) -> BlockLayout | None:
    """Return the blocks of a model, `None` where it has standard residuals.

    Raises:
        TrainingError: what travels would not be running sums and blocks alone.
    """
    if getattr(config, "output_router_logits", False):
        raise TrainingError(
            "output_router_logits: the router loss of a pipeline's stages is not gathered; expected false."
        )
    if config.attn_res_mode == "none":
        return None
    if config.attn_res_form == "add":
        raise TrainingError('attn_res_form="add" cannot be cut into pipeline stages; expected "replace".')
    return config.attn_res_layout
