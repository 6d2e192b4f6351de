"""The frontier's page, picture, table and JSON: whole, in scale, and safe."""

from __future__ import annotations

import dataclasses
import io
import json
import re
import sys
from pathlib import Path
from typing import Any

import pytest
from matplotlib.figure import Figure
from rich.console import Console

from ebbtide.errors import EbbtideError
from ebbtide.plan.frontier import Curve, Frontier, Point
from ebbtide.plan.published.registry import POLICIES
from ebbtide.report.frontier import COLOURS, HEIGHT, WIDTH, WRITERS, _tiles, frontier_tables, height, lines_of
from tests.report.test_timeline import HOSTILE, Page

GIB = 2**30
FOUND = Frontier(
    machine="a machine",
    resting_bytes=GIB,
    least_peak_bytes=2 * GIB,
    plain_peak_bytes=10 * GIB,
    plain_seconds=1.0,
    solver=Curve("solver", (Point(2 * GIB, 2 * GIB, 1.2), Point(6 * GIB, 6 * GIB, 1.01), Point(10 * GIB, GIB, 1.0))),
    bound=Curve("bound", (Point(2 * GIB, 2 * GIB, 1.1), Point(6 * GIB, 6 * GIB, 1.0), Point(10 * GIB, GIB, 1.0))),
    policies=(
        Curve("slow", (Point(5 * GIB, 5 * GIB, 4.0), Point(6 * GIB, 5 * GIB, 4.0), Point(10 * GIB, 5 * GIB, 4.0))),
        Curve("picky", (), "this step is no chain"),
    ),
)


def test_lines() -> None:
    lines = lines_of(FOUND)
    assert [line.kind for line in lines] == ["policy", "bound", "solver"]
    slow, bound, solver = lines
    assert slow.colour == COLOURS[0]
    assert len(solver.dots) == 3
    for line in lines:
        assert [dot.x for dot in line.dots] == sorted(dot.x for dot in line.dots)
        assert all(0 <= dot.x <= WIDTH and 0 <= dot.y <= HEIGHT for dot in line.dots)
    assert bound.dots[0].y > solver.dots[0].y > slow.dots[0].y  # pixels go down
    assert solver.dots[2].y == bound.dots[2].y
    assert solver.dots[1].words == "solver within 6.00 GiB: 1.01 s, +1 %, holds 6.00 GiB"
    assert solver.path.count("L") == 2


def test_no_two_curves_look_alike() -> None:
    """Of policies there are more than colours."""
    names = [f"policy {number}" for number in range(2 * len(COLOURS))]
    lines = lines_of(dataclasses.replace(FOUND, policies=tuple(Curve(name, FOUND.solver.points) for name in names)))
    assert len({(line.colour, line.dash) for line in lines}) == len(lines) == len(names) + 2
    assert len(POLICIES) <= len(names)


def test_the_legend_of_the_picture_covers_no_curve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    figures = list[Figure]()
    save = Figure.savefig

    def saved(figure: Figure, *arguments: Any, **options: Any) -> None:
        figures.append(figure)
        save(figure, *arguments, **options)

    monkeypatch.setattr(Figure, "savefig", saved)
    policies = tuple(Curve(name, FOUND.policies[0].points) for name in POLICIES)
    WRITERS[".png"](dataclasses.replace(FOUND, policies=policies), tmp_path / "found.png")
    (figure,) = figures
    (axes,), (legend,) = figure.axes, figure.legends
    assert len(legend.get_texts()) == len(POLICIES) + 2
    assert not legend.get_window_extent().overlaps(axes.get_window_extent())
    assert figure.bbox.containsx(legend.get_window_extent().x1)
    assert figure.bbox.containsy(legend.get_window_extent().y0)


def test_the_axis_tells_small_overheads_apart() -> None:
    assert height(0.0) == 0.0
    assert height(0.002) == pytest.approx(0.2, rel=0.01)
    assert height(1.0) - height(0.1) == pytest.approx(height(10.0) - height(1.0), rel=0.01)


def test_page(tmp_path: Path) -> None:
    WRITERS[".html"](FOUND, tmp_path / "page.html")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert "src" not in {name for _, name, _ in page.attributes}
    assert not re.search(r"https?://|url\(", text)
    assert page.names.count("path") == 3
    assert page.names.count("circle") == 9
    assert "this step is no chain" in page.words
    assert "a plan that runs leaves time free" in text
    assert "10.0 GiB" in page.words


def test_names_are_no_markup(tmp_path: Path) -> None:
    curve = dataclasses.replace(FOUND.policies[0], name=HOSTILE)
    WRITERS[".html"](dataclasses.replace(FOUND, machine=HOSTILE, policies=(curve,)), tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert "img" not in page.names
    assert HOSTILE in page.words


@pytest.mark.parametrize("found", [FOUND, dataclasses.replace(FOUND, policies=())], ids=["policies", "alone"])
def test_png(found: Frontier, tmp_path: Path) -> None:
    WRITERS[".png"](found, tmp_path / "picture.png")
    data = (tmp_path / "picture.png").read_bytes()
    assert data.startswith(b"\x89PNG")
    width, tall = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
    assert (width, tall) == (1440, 810)


@pytest.mark.parametrize("name", [r"rig $\host$", "at $PRICE_$ a month", "100 $"])
def test_a_dollar_in_a_name_begins_no_formula(name: str, tmp_path: Path) -> None:
    WRITERS[".png"](dataclasses.replace(FOUND, machine=name), tmp_path / "page.png")
    assert (tmp_path / "page.png").read_bytes().startswith(b"\x89PNG")


def test_png_without_matplotlib(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(EbbtideError, match=r"`pip install '\.\[plot\]'` in a clone of ebbtide, or write \.html"):
        WRITERS[".png"](FOUND, tmp_path / "picture.png")


def test_json(tmp_path: Path) -> None:
    WRITERS[".json"](FOUND, tmp_path / "found.json")
    document = json.loads((tmp_path / "found.json").read_text())
    assert document["solver"]["points"][1] == {"limit_bytes": 6 * GIB, "peak_bytes": 6 * GIB, "seconds": 1.01}
    assert document["policies"][1]["refused"] == "this step is no chain"


def test_table() -> None:
    (table,) = frontier_tables(FOUND, 100)
    columns = table.columns
    assert [str(column.header) for column in columns] == ["budget", "slow", "bound", "solver"]
    assert [list(column.cells) for column in columns] == [
        ["2.00 GiB", "6.00 GiB", "10.0 GiB"],
        ["-", "300 %", "300 %"],
        ["10 %", "0 %", "0 %"],
        ["20 %", "1 %", "0 %"],
    ]


def test_tiles() -> None:
    """Half way is so between the least peak and the plain one."""
    points = [FOUND.solver.points[0], Point(5 * GIB, 5 * GIB, 1.05), *FOUND.solver.points[1:]]
    found = dataclasses.replace(FOUND, solver=Curve("solver", tuple(points)))
    tiles = {label: (figure, words) for label, figure, words in _tiles(found)}
    assert tiles["least reachable peak"] == ("2.00 GiB", "20% of plain")
    assert tiles["half way"] == ("+1 %", "within 6.00 GiB")
    assert tiles["at the least"] == ("+20 %", "1.20 s a step")


@pytest.mark.parametrize("width", [60, 80, 100, 400])
def test_names_of_many_policies_stay_whole(width: int) -> None:
    slow = FOUND.policies[0]
    curves = tuple(dataclasses.replace(slow, name=name) for name in POLICIES)
    tables = frontier_tables(dataclasses.replace(FOUND, policies=curves), width)
    written = io.StringIO()
    for table in tables:
        Console(width=width, file=written).print(table)
    shown = written.getvalue().splitlines()
    heads = [line.split() for line in shown if line.startswith("budget")]
    assert [name for head in heads for name in head[1:-2]] == [*POLICIES]
    assert all(head[-2:] == ["bound", "solver"] for head in heads)
    assert len(shown) == 5 * len(tables)
    assert (len(tables) == 1) == (width == 400)


def test_one_budget_only(tmp_path: Path) -> None:
    only = Curve("solver", (Point(GIB, GIB, 1.0),))
    found = dataclasses.replace(FOUND, least_peak_bytes=GIB, plain_peak_bytes=GIB, solver=only, bound=only, policies=())
    for suffix, write in WRITERS.items():
        write(found, tmp_path / f"only{suffix}")
    page = Page((tmp_path / "only.html").read_text())
    assert page.names.count("circle") == 2  # of the solver and of the bound
    assert "1.00 GiB" in page.words
    assert (tmp_path / "only.png").read_bytes().startswith(b"\x89PNG")
    document = json.loads((tmp_path / "only.json").read_text())
    assert document["least_peak_bytes"] == document["plain_peak_bytes"] == GIB
    assert document["solver"]["points"] == [{"limit_bytes": GIB, "peak_bytes": GIB, "seconds": 1.0}]
    assert document["policies"] == []
