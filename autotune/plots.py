"""The plots of a sweep's report, as PNG files."""

from __future__ import annotations

import io
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from k3dsl.autotune.report import Study, by_backend, ends_of
from k3dsl.autotune.trial import End
from k3dsl.backends.common import write_whole

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

GOOD, BAD, LINE = "#2a7f62", "#b5b5b5", "#333333"
LOG_FROM = 10
"""Ratio of the slowest to the fastest trial from which times are drawn on a log scale."""
COLOURS = ("#2b6cb0", "#c05621", "#6b46c1", "#2a7f62")


def write_all(found: Study, importance: Mapping[str, float], folder: Path) -> dict[str, str]:
    """Writes every plot that there is something to show in; file names by what they show. Raises OSError."""
    drawn: dict[str, tuple[Callable[..., None], tuple[Any, ...], float]] = {
        "time": (time_by_trial, (found,), 4.0),
        "ends": (ends, (ends_of(found),), 0.8 + 0.32 * len(ends_of(found))),
    }
    if found.timed:
        drawn["backends"] = (best_by_backend, (found,), 0.9 + 0.4 * len(by_backend(found)))
    if importance:
        drawn["importance"] = (importances, (importance,), 0.8 + 0.32 * len(importance))
    for name, (draw, arguments, height) in drawn.items():
        _save(folder / f"{name}.png", draw, arguments, height)
    return {name: f"{name}.png" for name in drawn}


def time_by_trial(axes: Axes, found: Study) -> None:
    """Every timed trial, the best so far and the floor; trials without a time as ticks on the axis."""
    numbers = {record.key: n for n, record in enumerate(found.trials)}
    for colour, (name, group) in zip(COLOURS * 8, by_backend(found).items(), strict=False):
        points = [(numbers[r.key], r.outcome.time_ms) for r in group if r.outcome.end is End.OK and r.outcome.time_ms]
        if points:
            axes.plot(*zip(*points, strict=True), "o", ms=3.5, color=colour, label=name)
    best: list[tuple[int, float]] = []
    for record in found.timed:
        assert record.outcome.time_ms is not None
        best.append((numbers[record.key], min(record.outcome.time_ms, best[-1][1] if best else record.outcome.time_ms)))
    if best:
        best.append((len(numbers) - 1, best[-1][1]))
        axes.step(*zip(*best, strict=True), where="post", color=LINE, lw=1.2, label="best so far")
        times = [r.outcome.time_ms for r in found.timed if r.outcome.time_ms is not None]
        if max(times) > LOG_FROM * min(times):
            axes.set_yscale("log")
    if found.floor_ms is not None:
        axes.axhline(found.floor_ms, color=GOOD, ls="--", lw=1.2, label="floor: roofline")
    lost = [numbers[r.key] for r in found.trials if r not in found.timed]
    if lost:
        axes.plot(lost, [0.01] * len(lost), "|", color=BAD, transform=axes.get_xaxis_transform(), label="no time")
    axes.set(xlabel="trial", ylabel="time (ms)", title=found.title)
    axes.legend(fontsize=8, frameon=False)


def best_by_backend(axes: Axes, found: Study) -> None:
    """The best time of each backend, with its share of the roofline where that is known."""
    times = {name: min((r.outcome.time_ms for r in group if r in found.timed), default=None)  # type: ignore[type-var]
             for name, group in by_backend(found).items()}  # fmt: skip
    known = {name: ms for name, ms in times.items() if ms is not None}
    bars = axes.barh(list(known), list(known.values()), color=COLOURS[0], height=0.6)
    floor = found.floor_ms
    axes.bar_label(bars, [f"{ms:.4g} ms" + (f", {floor / ms:.0%} of roofline" if floor else "") for ms in known.values()],
                   padding=4, fontsize=8)  # fmt: skip
    if floor is not None:
        axes.axvline(floor, color=GOOD, ls="--", lw=1.2)
    axes.set(xlabel="best time (ms)")
    axes.margins(x=0.35)
    axes.invert_yaxis()


def ends(axes: Axes, counts: Mapping[str, int]) -> None:
    """Trials by how they ended."""
    bars = axes.barh(
        list(counts), list(counts.values()), color=[GOOD if n == "ok" else BAD for n in counts], height=0.6
    )
    axes.bar_label(bars, padding=4, fontsize=8)
    axes.set(xlabel="points")
    axes.margins(x=0.12)
    axes.invert_yaxis()


def importances(axes: Axes, shares: Mapping[str, float]) -> None:
    """How much each setting mattered."""
    bars = axes.barh(list(shares), [100 * share for share in shares.values()], color=COLOURS[0], height=0.6)
    axes.bar_label(bars, fmt="%.0f %%", padding=4, fontsize=8)
    axes.set(xlabel="importance (%)")
    axes.margins(x=0.12)
    axes.invert_yaxis()


def _save(path: Path, draw: Callable[..., None], arguments: tuple[Any, ...], height: float) -> None:
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(7.5, max(1.5, height)), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    draw(axes, *arguments)
    axes.spines[["top", "right"]].set_visible(False)
    write_figure(path, figure)


def write_figure(path: Path, figure: Figure) -> None:
    """A figure as a PNG file, whole or not at all. Raises OSError."""
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=130)
    write_whole(path, drawn.getvalue())
