"""One picture of the cases: time beyond plain against the budget, by link speed, a line for each policy."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from benchmarks.plans.cases import FORWARDS, SHARES, Case
from ebbtide.plan.published.registry import POLICIES
from ebbtide.report.frontier import BOUND_COLOUR, COLOURS, SOLVER_COLOUR, TICKS, height

STYLES = (("o", "-"), ("s", ":"))
"""Marker and line, two for each colour: there are more policies than colours."""


def draw(cases: Sequence[Case], path: Path) -> None:
    """Write the picture: medians over the steps, where at least half of them have a plan."""
    figure = Figure(figsize=(15, 11), layout="constrained")
    FigureCanvasAgg(figure)
    panels = figure.subplots(2, 2, sharex=True, sharey=True)
    most = 0.0
    for panel, forwards in zip(panels.flat, FORWARDS, strict=True):
        own = [case for case in cases if case.forwards == forwards]
        for number, policy in enumerate(POLICIES):
            colour, (marker, line) = COLOURS[number % len(COLOURS)], STYLES[number // len(COLOURS)]
            points = _medians(own, [case.policy_seconds[policy] for case in own])
            most = max([most, *(overhead for _, overhead in points)])
            panel.plot(*_columns(points), line, color=colour, marker=marker, markersize=4, linewidth=1.1, label=policy)
        for name, seconds, colour, style in (
            ("bound", [case.bound_seconds for case in own], BOUND_COLOUR, "--"),
            ("solver", [case.solver_seconds for case in own], SOLVER_COLOUR, "-"),
        ):
            panel.plot(*_columns(_medians(own, seconds)), style, color=colour, linewidth=2.5, label=name)
        panel.set_title(f"all saved bytes move one way in {forwards:g} forward passes", fontsize=11)
        panel.grid(alpha=0.3)
    ticks = [tick for tick in TICKS if tick <= 1.2 * most]
    panels[0, 0].set_yticks([height(tick) for tick in ticks], [f"{100 * tick:g} %" for tick in ticks])
    panels[0, 0].set_xticks(SHARES, ["least", *(f"{share:.0%}" for share in SHARES[1:])])
    figure.supxlabel("budget: of the way from the least reachable peak to the plain one")
    figure.supylabel("time beyond plain, median over the steps; drawn where at least half of them meet the budget")
    handles, labels = panels[0, 0].get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", fontsize=9)
    figure.savefig(path, dpi=110)


def _medians(cases: Sequence[Case], seconds: Sequence[float | None]) -> list[tuple[float, float]]:
    """Budget and median overhead, where at least half of the steps have a time; a step without one counts as slower."""
    points = []
    for share in SHARES:
        found = [
            math.inf if time is None else case.overhead(time)
            for case, time in zip(cases, seconds, strict=True)
            if case.share == share
        ]
        middle = statistics.median_high(found) if found else math.inf
        if math.isfinite(middle):
            points.append((share, middle))
    return points


def _columns(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [share for share, _ in points], [height(overhead) for _, overhead in points]
