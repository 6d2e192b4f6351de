"""The data of the timeline page, and that the page is whole, safe and needs no network."""

from __future__ import annotations

import dataclasses
import itertools
import json
import re
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from ebbtide.decisions import Keep, Offload, Plan, Recompute
from ebbtide.errors import PlanError
from ebbtide.machine import Machine
from ebbtide.plan import simulate
from ebbtide.report import timeline_data, write_timeline
from ebbtide.report.timeline import decision_words
from ebbtide.step import Step
from ebbtide.units import format_seconds

HOSTILE = "</script><img src=x onerror=alert(1)>&amp;'\"<!--"
VOID = {"meta", "link", "br", "img", "input", "hr"}


@pytest.fixture(scope="module")
def data(step: Step, on: Machine, plan: Plan) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(json.dumps(timeline_data(step, on, plan), allow_nan=False))
    return found


class Page(HTMLParser):
    """Checks that elements nest, and collects attributes and the text of each script and style."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.names: list[str] = []
        self.attributes: list[tuple[str, str, str]] = []
        self.texts: dict[str, str] = {}
        self.words = ""
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.names.append(tag)
        self.attributes += [(tag, name, value or "") for name, value in attrs]
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag, self.getpos()

    def handle_data(self, data: str) -> None:
        if self.open and self.open[-1] in {"script", "style"}:
            self.texts[f"{self.open[-1]}{self.names.count(self.open[-1])}"] = data
        else:
            self.words += data


def page_of(step: Step, on: Machine, plan: Plan, folder: Path) -> str:
    path = folder / "timeline.html"
    write_timeline(step, on, plan, path)
    return path.read_text(encoding="utf-8")


def test_curves_are_those_of_the_simulator(step: Step, on: Machine, plan: Plan, data: dict[str, Any]) -> None:
    decisions = {"plain": tuple(Keep() for _ in step.absences), "planned": plan.decisions}
    for name, chosen in decisions.items():
        outcome = simulate(step, on, chosen)
        curve = data[name]
        assert curve["bytes"] == list(outcome.memory)
        assert len(curve["times"]) == step.moments + 1
        assert curve["times"] == sorted(curve["times"])
        assert curve["times"][-1] == pytest.approx(outcome.seconds, abs=1e-6)
    assert max(data["planned"]["bytes"]) == plan.peak_bytes
    assert max(data["plain"]["bytes"]) == plan.plain_peak_bytes


def test_moments_can_be_told_apart(step: Step, data: dict[str, Any]) -> None:
    assert len(data["ops"]) + len(data["events"]) == step.moments
    assert [data["words"][word] for word in data["modules"]] == [op.module for op in step.ops]
    assert data["words"][data["ops"][0]] == "convolution"


def test_phases_cover_the_ops(step: Step, data: dict[str, Any]) -> None:
    assert [phase["phase"] for phase in data["phases"]] == ["forward", "backward"]
    assert data["phases"][0]["first"] == 0
    assert data["phases"][0]["end"] == data["phases"][1]["first"]
    assert data["phases"][1]["end"] == len(step.ops)


def test_every_moved_value_goes_out_and_comes_back(step: Step, plan: Plan, data: dict[str, Any]) -> None:
    moved = [index for index, decision in enumerate(plan.decisions) if isinstance(decision, Offload)]
    for direction in ("out", "in"):
        bars = [bar for bar in data["transfers"] if bar["direction"] == direction]
        assert sorted(bar["absence"] for bar in bars) == moved
        assert all(0 <= bar["issued"] <= bar["start"] < bar["end"] for bar in bars)
    for index in moved:
        described = data["absent"][str(index)]
        assert described["bytes"] == step.values[step.absences[index].value].size_bytes
        assert described["module"].startswith("Net.features.")


def test_recomputations_are_done_when_values_are_asked_for(step: Step, plan: Plan, data: dict[str, Any]) -> None:
    again = [index for index, decision in enumerate(plan.decisions) if isinstance(decision, Recompute)]
    assert sorted(bar["absence"] for bar in data["recomputes"]) == again
    for bar in data["recomputes"]:
        # Another recipe may need the value earlier, never later.
        assert bar["start"] < bar["end"] <= data["planned"]["times"][step.absences[bar["absence"]].closes + 1]


def test_stalls_end_with_the_copy_they_wait_for(data: dict[str, Any]) -> None:
    assert data["stalls"]
    ends = {(bar["absence"], bar["direction"]): bar["end"] for bar in data["transfers"]}
    for stall in data["stalls"]:
        direction = {"release": "out", "load": "in"}[stall["reason"]]
        assert stall["start"] < stall["end"] == ends[stall["absence"], direction]
    assert all(first["end"] <= second["start"] + 1e-6 for first, second in itertools.pairwise(data["stalls"]))


def test_bytes_are_free_between_gone_and_back(step: Step, data: dict[str, Any]) -> None:
    for number, value in data["absent"].items():
        opens = data["planned"]["times"][step.absences[int(number)].opens]
        closes = data["planned"]["times"][step.absences[int(number)].closes + 1]
        assert opens <= value["gone"] < value["back"] <= closes


def test_decisions_in_words(step: Step) -> None:
    absence = step.absences[0]
    assert decision_words(step, absence, Keep(), 0.0) == "stays"
    assert decision_words(step, absence, Offload("disk", 3, 5, 90), 0.0) == "disk: out at op 3, free at 5, back at 90"
    final = dataclasses.replace(absence, closes=step.moments)
    words = decision_words(step, final, Offload("disk", 3, 5, 99), 0.0)
    assert words == "disk: out at op 3, free at 5, not asked for again"
    seconds = step.ops[0].duration_seconds + step.ops[1].duration_seconds
    for more_seconds in (0.0, 0.25):
        again = decision_words(step, absence, Recompute((0, 1)), more_seconds)
        taken = format_seconds(seconds + 2 * more_seconds)
        assert again == f"computed again by convolution, native_batch_norm in {taken}"


def test_page_loads_nothing(step: Step, on: Machine, plan: Plan, tmp_path: Path) -> None:
    text = page_of(step, on, plan, tmp_path)
    page = Page(text)
    sources = [value for _, name, value in page.attributes if name in {"src", "href", "srcset", "action"}]
    assert sources == ["data:,"]
    assert not re.search(r"https?:|//[a-z]+\.|url\(|@import|fetch\(|XMLHttpRequest|import\(", text)
    assert len(text) < 1_000_000


def test_page_is_whole(step: Step, on: Machine, plan: Plan, data: dict[str, Any], tmp_path: Path) -> None:
    text = page_of(step, on, plan, tmp_path)
    page = Page(text)
    assert text.startswith("<!DOCTYPE html>")
    for name in ("html", "head", "title", "body", "main", "canvas"):
        assert page.names.count(name) == 1
    identities = [value for _, name, value in page.attributes if name == "id"]
    assert len(set(identities)) == len(identities)
    assert json.loads(page.texts["script1"]) == data
    for looked_up in re.findall(r'getElementById\("(\w+)"\)', page.texts["script2"]):
        assert looked_up in identities
    assert "Saved values by op" in page.words
    assert page.names.count("tr") == 1 + 4 + 1 + 1 + 10


def test_names_cannot_break_out(step: Step, on: Machine, plan: Plan, tmp_path: Path) -> None:
    ops = tuple(dataclasses.replace(op, name=HOSTILE, module=HOSTILE) for op in step.ops)
    hostile = dataclasses.replace(step, ops=ops)
    method = dataclasses.replace(plan, method=HOSTILE)
    page = Page(page_of(hostile, dataclasses.replace(on, name=HOSTILE), method, tmp_path))
    assert "img" not in page.names
    assert page.names.count("script") == 2
    assert HOSTILE in page.words
    assert HOSTILE in json.loads(page.texts["script1"])["words"]


def test_a_plan_that_keeps_all_has_a_page(step: Step, on: Machine, plan: Plan, tmp_path: Path) -> None:
    keep = dataclasses.replace(plan, decisions=tuple(Keep() for _ in step.absences))
    assert "0 of 143 values" in page_of(step, on, keep, tmp_path)
    data = timeline_data(step, on, keep)
    assert data["transfers"] == data["recomputes"] == data["stalls"] == []
    assert data["plain"] == data["planned"]


def test_a_plan_that_does_not_fit_is_one_error(step: Step, on: Machine, plan: Plan, tmp_path: Path) -> None:
    page = tmp_path / "page.html"
    for wrong, expected in (
        (dataclasses.replace(plan, decisions=plan.decisions[1:]), "but the step has"),
        (dataclasses.replace(plan, decisions=(Offload("tape", 1, 2, 3), *plan.decisions[1:])), "no slow tier 'tape'"),
        (dataclasses.replace(plan, decisions=(Recompute((10**6,)), *plan.decisions[1:])), "absence 0"),
    ):
        with pytest.raises(PlanError, match=expected):
            write_timeline(step, on, wrong, page)
    assert not page.exists()


def test_the_same_plan_gives_the_same_page(step: Step, on: Machine, plan: Plan, tmp_path: Path) -> None:
    assert page_of(step, on, plan, tmp_path) == page_of(step, on, plan, tmp_path)
