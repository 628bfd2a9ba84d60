"""Numbers of what depth attention does: entropy, reach, the mixing matrix and its rank.

Shapes: S sites, N sources of a site, U sublayers' outputs and the embedding (U = S).
"""

from dataclasses import dataclass

import torch


def mean_depth_weights(
    model, input_ids: torch.Tensor, attention_mask: torch.Tensor | None = None
) -> list[torch.Tensor]:
    """Compute every site's mean depth weights `[N]`, over all tokens that are not padding, in order and in float64.

    With several heads over these, too.
    """
    with torch.no_grad():
        outputs = model(
            input_ids=input_ids, attention_mask=attention_mask, output_depth_attentions=True, use_cache=False
        )
    real_BT = (torch.ones_like(input_ids) if attention_mask is None else attention_mask).bool()
    return [
        weights_BTN[real_BT.to(weights_BTN.device)].double().flatten(0, -2).mean(0).cpu()
        for weights_BTN in outputs.depth_attentions
    ]


@dataclass
class SiteStatistics:
    """What one site's mean weights are like: their entropy, relative to the largest possible, reach, and largest."""

    entropy_of_mean: float  # not the mean over tokens of their weights' entropies, which is no larger
    reach: float  # in sublayers back
    largest: float


def site_statistics(config, weights: list[torch.Tensor]) -> list[SiteStatistics]:
    """Compute the statistics of every site from its mean weights.

    Reach is the mean distance back, in sublayers: to the newest output in each source, so 1 is the sublayer before; the
    null source of the form "add" is nowhere, and counts as none. A site with one source has an entropy of 1: it has no
    choice to lose. Weights whose sum is not 1 count by their share of it.
    """
    statistics = []
    for site, weights_N in enumerate(weights):
        weights_N = weights_N.abs() / weights_N.abs().sum()
        sources = config.attn_res_layout.sources_of(site)
        distances_N = torch.tensor([site + 1 - source[-1] if source else 0 for source in sources], dtype=torch.float64)
        entropy = -torch.special.xlogy(weights_N, weights_N).sum()
        most = torch.tensor(len(weights_N), dtype=torch.float64).log()
        statistics.append(
            SiteStatistics(
                entropy_of_mean=(entropy / most).item() if len(weights_N) > 1 else 1.0,
                reach=(weights_N * distances_N).sum().item(),
                largest=weights_N.max().item(),
            )
        )
    return statistics


def mixing_matrix(config, weights: list[torch.Tensor]) -> torch.Tensor:
    """Compute the depth mixing matrix `[S, U]` (paper, section 6.2): how much of each output a site's input holds.

    Lower triangular; a block's outputs share the block's weight. Standard residuals are all ones below the diagonal. In
    the form "add" it is the mixture's, without the stream beside it.
    """
    matrix_SU = torch.zeros(len(weights), len(weights), dtype=torch.float64)
    for site, weights_N in enumerate(weights):
        for weight, source in zip(weights_N, config.attn_res_layout.sources_of(site), strict=True):
            matrix_SU[site, source.start : source.stop] = weight
    return matrix_SU


def semiseparable_rank(matrix_SU: torch.Tensor, share: float = 0.99) -> tuple[int, float]:
    """Compute the semiseparable rank of a lower triangular matrix, and its effective one.

    The rank is the largest of any block below the diagonal, `matrix[j:, :j + 1]`: 1 for standard residuals. The
    effective one counts, in the same blocks, the singular values that hold `share` of the squared norm, on average.
    """
    ranks, effective = [], []
    for j in range(len(matrix_SU)):
        values = torch.linalg.svdvals(matrix_SU[j:, : j + 1])
        ranks.append(int((values > values[0] * 1e-6).sum()))
        held = values.square().cumsum(0) / values.square().sum()
        effective.append(int((held < share).sum()) + 1)
    return max(ranks), sum(effective) / len(effective)
