"""Pictures of what depth attention does."""

from pathlib import Path

import matplotlib


matplotlib.use("Agg")  # no display needed
import matplotlib.pyplot as plt
import numpy as np


def draw_depth_weights(weights: list[list[float]], path: Path, caption: str) -> None:
    """Draw depth weights as two heat maps, attention sites and MLP sites, with a row for the output site.

    Args:
        weights: for every site in order (attention and MLP of each decoder layer, then the output) its weights over
            the sources it reads, the running sum last.
        path: the PNG to write.
        caption: what a reader should know.
    """
    # A row per decoder layer, as wide as the most sources; what a site does not read stays blank
    output = weights[-1]
    figure, axes = plt.subplots(1, 2, figsize=(11, 8), sharey=True, layout="constrained")
    for axis, first, name in zip(axes, (0, 1), ("attention", "MLP"), strict=True):
        rows = [*weights[first:-1:2], output]
        grid = np.full((len(rows), len(output)), np.nan)
        for row, values in enumerate(rows):
            grid[row, : len(values)] = values
        image = axis.imshow(grid, aspect="auto", vmin=0, vmax=1, cmap="viridis", interpolation="nearest")
        axis.set_title(f"{name} sites")
        axis.set_xlabel("source (0: embedding, then blocks, the running sum last)")
        axis.set_xticks(range(0, len(output), max(1, len(output) // 16)))
        axis.set_yticks(range(len(rows)), [*map(str, range(len(rows) - 1)), "output"])
    # What both maps share
    axes[0].set_ylabel("decoder layer")
    figure.colorbar(image, ax=axes, label="depth weight, mean over the text's tokens", shrink=0.6)
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_by_layer(curves: dict[str, dict[str, list[float]]], path: Path, caption: str) -> None:
    """Draw one panel per quantity and one curve per model, over decoder layers."""
    figure, axes = plt.subplots(1, len(curves), figsize=(5.5 * len(curves), 4), squeeze=False, layout="constrained")
    for axis, (quantity, of_models) in zip(axes[0], curves.items(), strict=True):
        for name, values in of_models.items():
            axis.plot(values, marker=".", label=name)
        axis.set_xlabel("decoder layer")
        axis.set_title(quantity)
        axis.set_yscale("log")
        axis.legend(fontsize=8)
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_losses(curves: dict[str, list[tuple[int, float]]], path: Path, caption: str) -> None:
    """Draw one curve per model: its training loss by step."""
    figure, axis = plt.subplots(figsize=(7, 4.5), layout="constrained")
    for name, points in curves.items():
        axis.plot(*zip(*points), label=name)
    axis.set_xlabel("step")
    axis.set_ylabel("training loss")
    axis.legend()
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_sites(statistics: dict[str, list[float]], path: Path, caption: str) -> None:
    """Draw one panel per statistic: attention and MLP sites over decoder layers."""
    figure, axes = plt.subplots(
        1, len(statistics), figsize=(5.5 * len(statistics), 4), squeeze=False, layout="constrained"
    )
    for axis, (name, values) in zip(axes[0], statistics.items(), strict=True):
        axis.plot(values[0:-1:2], marker=".", label="attention")
        axis.plot(values[1:-1:2], marker=".", label="MLP")
        axis.axhline(values[-1], linestyle=":", color="black", label="output")
        axis.set_xlabel("decoder layer")
        axis.set_title(name)
        axis.legend(fontsize=8)
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_mixing_matrix(matrix: list[list[float]], path: Path, caption: str) -> None:
    """Draw the depth mixing matrix, sites by sublayers' outputs."""
    figure, axis = plt.subplots(figsize=(7, 6), layout="constrained")
    image = axis.imshow(np.ma.masked_equal(matrix, 0), cmap="viridis", interpolation="nearest")
    axis.set_xlabel("output of (0: embedding, then sublayers in order)")
    axis.set_ylabel("input of site")
    figure.colorbar(image, label="weight")
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_ablation(weights: list[list[float]], rises: list[list[float | None]], path: Path, caption: str) -> None:
    """Draw depth weights beside how much the loss rises without each source: a row per site, a column per source."""
    figure, axes = plt.subplots(1, 2, figsize=(11, 8), sharey=True, layout="constrained")
    columns = max(map(len, weights))
    for axis, rows, name in zip(axes, (weights, rises), ("depth weight", "rise of the loss when hidden"), strict=True):
        grid = np.full((len(rows), columns), np.nan)
        for row, values in enumerate(rows):
            grid[row, : len(values)] = [np.nan if value is None else value for value in values]
        largest = np.nanmax(np.abs(grid))
        limits = {"vmin": 0, "cmap": "viridis"} if rows is weights else {"vmin": -largest, "cmap": "RdBu_r"}
        image = axis.imshow(grid, aspect="auto", vmax=largest, interpolation="nearest", **limits)
        axis.set_title(name)
        axis.set_xlabel("source, in the order of the depth weights")
        figure.colorbar(image, ax=axis, shrink=0.6)
    axes[0].set_ylabel("site (2l: attention of layer l, 2l + 1: its MLP, last: output)")
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_scaling(scaling: dict, path: Path) -> None:
    """Draw loss over compute, both as logarithms: runs as dots, their means and fitted laws in one colour per mode."""
    figure, axis = plt.subplots(figsize=(7.5, 5.5), layout="constrained")
    everything = [size["compute"] for of_mode in scaling["modes"].values() for size in of_mode["sizes"]]
    compute_P = np.geomspace(min(everything) / 1.2, max(everything) * 1.2, 200)  # P points of a line
    for number, (mode, of_mode) in enumerate(scaling["modes"].items()):
        colour, sizes = f"C{number}", of_mode["sizes"]
        runs = [(size["compute"], loss) for size in sizes for loss in size["losses"]]
        axis.scatter(*zip(*runs), color=colour, s=9, alpha=0.5)
        axis.scatter(*zip(*((s["compute"], np.mean(s["losses"])) for s in sizes)), color=colour, marker="x")
        for law, style in zip(of_mode["laws"].values(), ("-", ":")):
            floor, amplitude, exponent = (law[name]["value"] for name in ("floor", "amplitude", "exponent"))
            offset = f"{floor:.3f} + " if style == ":" else ""
            label = f"{mode}: {offset}{amplitude:.4g}·C^{-exponent:.4f}"
            axis.plot(
                compute_P, floor + amplitude * compute_P**-exponent, style, color=colour, linewidth=1, label=label
            )
    axis.axvline(scaling["compute"], color="grey", linewidth=0.5)
    axis.set(xscale="log", yscale="log", xlabel="compute C in PFLOP/s-days", ylabel="loss")
    axis.yaxis.set_major_formatter("{x:.4g}")
    axis.yaxis.set_minor_formatter("{x:.4g}")
    axis.legend(fontsize=8)
    first_laws = {mode: next(iter(of_mode["laws"].values())) for mode, of_mode in scaling["modes"].items()}
    worth = [f"{mode} {law['worth']['value']:.3g}×" for mode, law in first_laws.items() if "worth" in law]
    caption = f"at {scaling['compute']:.4g} PFLOP/s-days, in compute of {scaling['baseline']}: {', '.join(worth)}"
    figure.suptitle(caption, fontsize=11)
    figure.savefig(path, dpi=110)
    plt.close(figure)
