"""Pictures of a frontier: overhead against memory, as a page that needs no network, and as a PNG."""

from __future__ import annotations

import dataclasses
import importlib
import io
import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path

from rich import box
from rich.table import Table

from ebbtide.errors import EbbtideError
from ebbtide.files import write_whole
from ebbtide.plan.frontier import Curve, Frontier, Point
from ebbtide.report.pages import template
from ebbtide.units import format_bytes, format_seconds, format_share

LINEAR = 0.01
"""Overhead up to which its axis is nearly linear; above, it is nearly logarithmic. So the 0.1 % of one planner can be
told from the 1 % of another in one picture with the 300 % of a third."""
TICKS = (0.0, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
COLOURS = (
    "#dd7c1b",
    "#17927a",
    "#8b5fc7",
    "#c2417f",
    "#8a7a1c",
    "#3f8f3f",
    "#b0532f",
    "#4a6fd0",
    "#7d6b62",
    "#2b93a8",
    "#a3539c",
    "#6d8f1f",
)
"""Colours of policies' curves, in order; from the start again, with dotted lines, if there are more policies."""
DASHES = {"solid": "-", "dashed": "--", "dotted": ":"}
"""How CSS and matplotlib call what lines are drawn with."""
SOLVER_COLOUR, BOUND_COLOUR = "#0b72b9", "#6b7785"
WIDTH, HEIGHT = 1060, 500
LEFT, RIGHT, TOP, BOTTOM = 74, 18, 16, 52
"""The drawing on the page, and its margins, in pixels."""
GAP = 3
"""Columns of a terminal between two columns of a table."""


@dataclasses.dataclass(frozen=True, slots=True)
class Dot:
    """One plan on the page: where it is, in pixels, and what is said of it."""

    x: float
    y: float
    words: str


@dataclasses.dataclass(frozen=True, slots=True)
class Line:
    """One curve on the page.

    Attributes:
        name: in the legend.
        kind: ``solver``, ``bound`` or ``policy``.
        colour: of the line.
        dash: ``solid``, ``dashed`` or ``dotted``; of two policies of one colour, one is dotted.
        path: SVG path.
        dots: its plans.
    """

    name: str
    kind: str
    colour: str
    dash: str
    path: str
    dots: tuple[Dot, ...]


def height(overhead: float) -> float:
    """Where on its axis an overhead stands: linear near 0, logarithmic far from it."""
    return math.asinh(overhead / LINEAR)


def write_page(found: Frontier, path: str | Path) -> None:
    """Write ``found`` as one HTML page that needs no network. Raises `OSError` if that fails."""
    page = template("frontier.html.j2").render(
        found=found,
        lines=lines_of(found),
        x_ticks=[(_x(found, size), format_bytes(size)) for size in _memory_ticks(found)],
        y_ticks=[(_y(found, share), format_share(share)) for share in _overhead_ticks(found)],
        box={
            "width": WIDTH,
            "height": HEIGHT,
            "left": LEFT,
            "right": WIDTH - RIGHT,
            "top": TOP,
            "bottom": HEIGHT - BOTTOM,
        },
        tiles=_tiles(found),
        heads=["budget", *(curve.name for curve in _shown(found))],
        rows=_rows(found),
        refused=[curve for curve in found.policies if not curve.points],
    )
    write_whole(path, page.encode())


def check_drawable() -> None:
    """Raises `EbbtideError` if matplotlib, which draws PNGs, is not installed."""
    try:
        importlib.import_module("matplotlib.figure")
    except ImportError as fault:
        raise EbbtideError(
            "a PNG is drawn by matplotlib, which is not installed: `pip install '.[plot]'` in a clone of ebbtide, "
            "or write .html instead"
        ) from fault


def write_png(found: Frontier, path: str | Path) -> None:
    """Draw ``found`` as a PNG with matplotlib.

    Raises:
        EbbtideError: if matplotlib is not installed.
        OSError: if the file cannot be written.
    """
    check_drawable()
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(9.6, 5.4), layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.add_subplot()
    for line, curve in zip(lines_of(found), _shown(found), strict=True):
        axes.plot(
            [point.limit_bytes for point in curve.points],
            [height(found.overhead(point.seconds)) for point in curve.points],
            color=line.colour,
            label=line.name,
            linestyle=DASHES[line.dash],
            linewidth=2.6 if line.kind == "solver" else 1.6,
            marker="" if line.kind == "bound" else "s" if line.dash == "dotted" else "o",
            markersize=5 if line.kind == "solver" else 3.5,
            zorder=3 if line.kind == "solver" else 2,
        )
    shares, sizes = _overhead_ticks(found), _memory_ticks(found)
    axes.set_yticks([height(share) for share in shares], [format_share(share) for share in shares])
    axes.set_xticks(sizes, [format_bytes(size) for size in sizes])
    axes.set_ylim(-0.04 * height(_highest(found)), height(_highest(found)))
    axes.set_xlabel("memory budget")
    axes.set_ylabel("time beyond the plain step")
    title = f"{found.machine}: from the least reachable peak to the plain one"
    axes.set_title(title, fontsize=11, loc="left", parse_math=False)  # a dollar in a name begins no formula
    axes.grid(color="#e6eaee")
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)
    handles, labels = axes.get_legend_handles_labels()
    figure.legend(handles[::-1], labels[::-1], loc="outside right upper", frameon=False, fontsize=9)
    drawn = io.BytesIO()
    figure.savefig(drawn, format="png", dpi=150)
    write_whole(path, drawn.getvalue())


def frontier_tables(found: Frontier, width: int) -> list[Table]:
    """Overheads by budget and planner, for a terminal of ``width`` columns: as many tables as leave each name whole,
    the bound and the solver in each of them."""
    columns = list(zip(["budget", *(curve.name for curve in _shown(found))], *_rows(found), strict=True))
    taken = [max(map(len, column)) + GAP for column in columns]
    policies = sum(bool(curve.points) for curve in found.policies)
    parts: list[list[int]] = [[]]
    for number in range(1, 1 + policies):
        others = [0, *parts[-1], *range(1 + policies, len(columns))]
        if parts[-1] and sum(taken[other] for other in others) + taken[number] > width + GAP:
            parts.append([])
        parts[-1].append(number)
    return [_table([columns[0], *(columns[number] for number in part), *columns[1 + policies :]]) for part in parts]


def _table(columns: Sequence[Sequence[str]]) -> Table:
    table = Table(box=box.SIMPLE_HEAD, show_edge=False, pad_edge=False, header_style="bold")
    for number, (head, *_) in enumerate(columns):
        table.add_column(head, justify="right" if number else "left", overflow="fold")
    for row in list(zip(*columns, strict=True))[1:]:
        table.add_row(*row)
    return table


def write_json(found: Frontier, path: str | Path) -> None:
    """Write ``found`` as JSON, with the field names of the records. Raises `OSError` if that fails."""
    write_whole(path, (json.dumps(dataclasses.asdict(found), indent=1, allow_nan=False) + "\n").encode())


WRITERS: dict[str, Callable[[Frontier, str | Path], None]] = {
    ".html": write_page,
    ".png": write_png,
    ".json": write_json,
}
"""What writes a frontier to a file, by the end of the file's name."""


def lines_of(found: Frontier) -> list[Line]:
    """What the page draws, the solver last, on top."""
    lines = []
    styles = {
        curve.name: (COLOURS[number % len(COLOURS)], "dotted" if number >= len(COLOURS) else "solid")
        for number, curve in enumerate(found.policies)
    }
    for curve in _shown(found):
        kind = "solver" if curve is found.solver else "bound" if curve is found.bound else "policy"
        own = {"solver": (SOLVER_COLOUR, "solid"), "bound": (BOUND_COLOUR, "dashed")}
        colour, dash = own.get(kind) or styles[curve.name]
        dots = tuple(
            Dot(_x(found, point.limit_bytes), _y(found, found.overhead(point.seconds)), _words(found, curve, point))
            for point in curve.points
        )
        path = " ".join(f"{'L' if number else 'M'}{dot.x:.1f} {dot.y:.1f}" for number, dot in enumerate(dots))
        lines.append(Line(curve.name, kind, colour, dash, path, dots))
    return lines


def _shown(found: Frontier) -> list[Curve]:
    """The curves that have points: the policies, the bound, the solver."""
    return [curve for curve in (*found.policies, found.bound, found.solver) if curve.points]


def _words(found: Frontier, curve: Curve, point: Point) -> str:
    held = "" if curve is found.bound else f", holds {format_bytes(point.peak_bytes)}"
    overhead = format_share(found.overhead(point.seconds))
    return f"{curve.name} within {format_bytes(point.limit_bytes)}: {format_seconds(point.seconds)}, +{overhead}{held}"


def _tiles(found: Frontier) -> list[tuple[str, str, str]]:
    least, half = found.solver.points[0], (found.least_peak_bytes + found.plain_peak_bytes) / 2
    middle = min(found.solver.points, key=lambda point: abs(point.limit_bytes - half))
    share = found.least_peak_bytes / max(1, found.plain_peak_bytes)
    return [
        ("plain", format_bytes(found.plain_peak_bytes), f"{format_seconds(found.plain_seconds)} a step"),
        ("least reachable peak", format_bytes(found.least_peak_bytes), f"{share:.0%} of plain"),
        ("resting", format_bytes(found.resting_bytes), "parameters and inputs: never moved"),
        ("half way", f"+{format_share(found.overhead(middle.seconds))}", f"within {format_bytes(middle.limit_bytes)}"),
        ("at the least", f"+{format_share(found.overhead(least.seconds))}", f"{format_seconds(least.seconds)} a step"),
    ]


def _rows(found: Frontier) -> list[list[str]]:
    """Budget and, by curve, overhead; a policy's own least budget has no row."""
    rows = []
    for point in found.solver.points:
        row = [format_bytes(point.limit_bytes)]
        for curve in _shown(found):
            at = {other.limit_bytes: other.seconds for other in curve.points}
            row.append(format_share(found.overhead(at[point.limit_bytes])) if point.limit_bytes in at else "-")
        rows.append(row)
    return rows


def _x(found: Frontier, size_bytes: float) -> float:
    span = max(1, found.plain_peak_bytes - found.least_peak_bytes)
    return LEFT + (WIDTH - LEFT - RIGHT) * (size_bytes - found.least_peak_bytes) / span


def _y(found: Frontier, overhead: float) -> float:
    return HEIGHT - BOTTOM - (HEIGHT - TOP - BOTTOM) * height(max(0.0, overhead)) / height(_highest(found))


def _highest(found: Frontier) -> float:
    """Upper end of the axis of overheads, a little above the highest."""
    most = max(found.overhead(point.seconds) for curve in _shown(found) for point in curve.points)
    return max(2 * LINEAR, 1.15 * most)


def _overhead_ticks(found: Frontier) -> list[float]:
    return [tick for tick in TICKS if tick <= _highest(found)]


def _memory_ticks(found: Frontier) -> Sequence[float]:
    """Both ends and round sizes between them, not too near."""
    low, high = found.least_peak_bytes, found.plain_peak_bytes
    if high <= low:
        return [float(low)]
    step = 2.0 ** math.floor(math.log2((high - low) / 4))
    inner = [step * number for number in range(math.ceil(low / step), math.floor(high / step) + 1)]
    return [low, *(size for size in inner if min(size - low, high - size) > 0.09 * (high - low)), high]
