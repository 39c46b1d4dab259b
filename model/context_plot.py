"""The plot of a network's cache, and of its attention's time where that was measured, over the context."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from k3dsl.autotune.plots import COLOURS, LINE, write_figure
from k3dsl.autotune.report import check_plots
from k3dsl.errors import ArgumentError
from k3dsl.model.context import ContextCost, ContextTimes

if TYPE_CHECKING:
    from matplotlib.axes import Axes

SERIES = {"network": "as it is: {kda} KDA + {mla} MLA layers", "all_mla": "MLA in all {layers} layers",
          "plain": "plain softmax attention in all {layers} layers"}  # fmt: skip


def check_plot(path: Path) -> None:
    """Raises ArgumentError where matplotlib is missing, or the file is not to be a PNG."""
    check_plots("a plot")
    if path.suffix.lower() != ".png":
        raise ArgumentError(f"{path} does not end in .png", fix="the plot is written as a PNG file: name it so")


def write_plot(path: Path, name: str, cost: ContextCost, times: ContextTimes | None = None) -> None:
    """Bytes over contexts, and a second panel with times if there are any, as a PNG file that is whole or not there.

    Raises ArgumentError.
    """
    check_plot(path)
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    panels = 1 if times is None else 2
    figure = Figure(figsize=(6.2 * panels, 4.2), layout="constrained")
    FigureCanvasAgg(figure)
    all_axes = figure.subplots(1, panels, squeeze=False)[0]
    draw_bytes(all_axes[0], name, cost)
    if times is not None:
        draw_times(all_axes[1], cost, times)
    for axes in all_axes:
        axes.spines[["top", "right"]].set_visible(False)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_figure(path, figure)
    except OSError as error:
        raise ArgumentError(f"{path} cannot be written: {error.strerror}", fix="choose another file") from None


def draw_bytes(axes: Axes, name: str, cost: ContextCost) -> None:
    """The three caches, and where the MLA layers' latents take as much as the states."""
    from matplotlib.ticker import EngFormatter

    _lines(axes, cost, {series: [(row.tokens, getattr(row, series)) for row in cost.rows] for series in SERIES})
    tokens = [row.tokens for row in cost.rows]
    if cost.latents_equal_states is not None and min(tokens) <= cost.latents_equal_states <= max(tokens):
        label = f"latents = states: {cost.latents_equal_states:,} tokens"
        axes.axvline(cost.latents_equal_states, color=LINE, ls=":", lw=1.2, label=label)
    requests = "a request" if cost.batch == 1 else f"{cost.batch} requests"
    axes.yaxis.set_major_formatter(EngFormatter(unit="B"))
    axes.set(ylabel=f"cache of {requests} (bytes)", title=name)
    axes.legend(fontsize=8, frameon=False)


def draw_times(axes: Axes, cost: ContextCost, times: ContextTimes) -> None:
    """The attention part of a decode step; contexts that were left out have no point."""
    found = {s: [(r.tokens, getattr(r, s)) for r in times.rows if getattr(r, s) is not None] for s in SERIES}
    _lines(axes, cost, found)
    batch = "a request" if times.batch == 1 else f"{times.batch} requests"
    axes.set(ylabel="attention ops of a decode step (ms)", title=f"{times.device}, {batch}, {times.dtype}")


def _lines(axes: Axes, cost: ContextCost, points: dict[str, list[tuple[int, float]]]) -> None:
    from matplotlib.ticker import FixedLocator, FuncFormatter, NullLocator

    counts = {"kda": cost.kda_layers, "mla": cost.mla_layers, "layers": cost.kda_layers + cost.mla_layers}
    for colour, (series, label) in zip(COLOURS, SERIES.items(), strict=False):
        if points[series]:
            axes.plot(*zip(*points[series], strict=True), "o-", ms=3.5, color=colour, label=label.format(**counts))
    axes.set_xscale("log", base=2)
    axes.set_yscale("log")
    axes.xaxis.set_major_locator(FixedLocator(_ticks([row.tokens for row in cost.rows])))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_major_formatter(FuncFormatter(lambda tokens, _: short(round(tokens))))
    axes.set(xlabel="context (tokens of a request)")
    axes.grid(alpha=0.25)


def _ticks(tokens: Sequence[int], most: int = 10) -> list[int]:
    """Every n-th context, so that their labels do not touch."""
    return list(tokens[:: -(-len(tokens) // most)])


def short(tokens: int) -> str:
    """1M for 2^20, 64K for 2^16, else the number."""
    for unit, size in (("M", 1 << 20), ("K", 1 << 10)):
        if tokens and tokens % size == 0:
            return f"{tokens // size}{unit}"
    return f"{tokens:,}"
