"""The picture of the benchmark of sequences: time per step, memory, and the slowdown against the interval."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

if TYPE_CHECKING:
    from benchmarks.sequence import Record, Sweep

COLOURS = {
    "ours": "#0b6e99",
    "pyrevolve": "#c4512d",
    "h-revolve": "#7a5195",
    "revolve": "#d9a441",
    "store-all": "#777777",
    "scan": "#2e8b57",
}
COUNT = 10
"""The memory, in states, for which all methods are drawn."""


def draw(records: Sequence[Record], sweeps: Sequence[Sweep], path: Path) -> None:
    """Write the picture to ``path``."""
    matplotlib.use("Agg")
    cells = [cell for cell in ("wave", "lstm") if any(record.cell == cell for record in records)]
    figure = Figure(figsize=(5.2 * (len(cells) + 2), 4.6), layout="constrained")
    axes = figure.subplots(1, len(cells) + 2)
    for cell, ax in zip(cells, axes, strict=False):
        _draw_time(ax, [record for record in records if record.cell == cell], cell)
    _draw_memory(axes[-2], [record for record in records if record.cell == cells[0]], cells[0])
    _draw_sweeps(axes[-1], sweeps)
    figure.savefig(path, dpi=110)


def _draw_time(ax: Axes, records: Sequence[Record], cell: str) -> None:
    for method, colour in COLOURS.items():
        for count, style in ((10, "-"), (50, "--"), (100, ":")):
            if count != COUNT and method not in ("ours", "pyrevolve"):
                continue
            points = [(r.n, r.microseconds_per_step) for r in records if r.method == method and r.count == count]
            if points:
                label = method if count == COUNT else f"{method}, {count} states"
                ax.plot(*zip(*sorted(points), strict=True), style, marker="o", ms=4, color=colour, label=label)
    ax.set(
        xscale="log", xlabel="steps", ylabel="microseconds per step", title=f"{cell}: time, {COUNT} states or as said"
    )
    ax.set_ylim(bottom=0)
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7, ncols=2, loc="lower left")  # all times are above the lower part


def _draw_memory(ax: Axes, records: Sequence[Record], cell: str) -> None:
    for method, colour in COLOURS.items():
        points = [(r.n, r.rss_bytes / 2**20) for r in records if r.method == method and r.count == COUNT]
        if points:
            ax.plot(*zip(*sorted(points), strict=True), marker="o", ms=4, color=colour, label=method)
    ax.set(xscale="log", yscale="log", xlabel="steps", ylabel="MiB above rest")
    ax.set_title(f"{cell}: resident memory, {COUNT} states")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)


def _draw_sweeps(ax: Axes, sweeps: Sequence[Sweep]) -> None:
    for cell in dict.fromkeys(sweep.cell for sweep in sweeps):
        own = [sweep for sweep in sweeps if sweep.cell == cell]
        points = [(sweep.critical, 100 * sweep.slowdown) for sweep in own if sweep.states == COUNT]
        chosen = [(sweep.critical, 100 * sweep.slowdown) for sweep in own if sweep.chosen]
        (line,) = ax.plot(*zip(*points, strict=True), marker="o", ms=4, label=cell)
        ax.plot(*(zip(*chosen, strict=True) if chosen else ((), ())), "x", ms=8, color=line.get_color())
    ax.axvline(1, color="black", lw=0.8, ls=":")
    ax.axhline(0, color="black", lw=0.8)
    ax.set(xscale="log", xlabel="interval / (transfer / step)", ylabel="slowdown of the forward sweep, %")
    ax.set_title(f"Forward sweep that stores states, {COUNT} in memory\nx: chosen interval, 10 to 100 in memory")
    ax.grid(alpha=0.3)
    ax.legend(fontsize=7)
