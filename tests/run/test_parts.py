"""Steps that leave out some of what is planned for, and are of no known kind: what they hold is found out."""

from __future__ import annotations

import contextlib
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

import ebbtide
from ebbtide.measured import Measured
from ebbtide.run.held_bytes import Held
from ebbtide.run.kinds import Kind
from ebbtide.run.late_counts import MOST_VAIN_RUNS, RUN
from ebbtide.run.lessons import _weigh_late
from ebbtide.run.meter import PeakMeter
from ebbtide.run.observing import observe_step
from ebbtide.run.parts import Parts
from tests.run.harness import FAST_DISK, HELD_MORE
from tests.run.test_kinds import BATCH, EVERY, WIDTH, Dropped, plain_peak

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


@pytest.fixture
def kind() -> Kind:
    model, data = nn.Sequential(*(nn.Sequential(nn.Linear(64, 64), nn.GELU()) for _ in range(4))), torch.randn(256, 64)
    step = observe_step(lambda: model(data).square().mean().backward(), torch.device("cpu"))
    found = Kind(step, verify=False)
    found.make_plan(FAST_DISK, step.resting_bytes + 500_000)
    return found


def limit_of(kind: Kind) -> int:
    assert kind.plan is not None
    return kind.plan.limit_bytes


def counted(parts: Parts, first: int, last: int) -> list[int]:
    return [number for number in range(first, last) if parts.claim_count(number)]


def test_the_step_is_counted_that_comes_as_long_after_it_as_it_came_after_the_last_one(kind: Kind) -> None:
    parts = Parts()
    parts.met(kind, 1, 10, None)
    assert parts.due == 21, "the first one of all came so long after the loop began"
    parts.met(kind, 1, 17, None)
    assert counted(parts, 18, 24) == []
    assert counted(parts, 24, 25) == [24]
    assert parts.met(kind, 1, 24, limit_of(kind)) == "none"
    parts.met(kind, 1, 31, None)
    assert not counted(parts, 32, 100), "it is known to be within the limit"


def test_one_that_holds_more_later_is_counted_again(kind: Kind) -> None:
    """As the arena tells, by the first one that ran without being counted."""
    parts = Parts()
    assert kind.plan is not None
    parts.met(kind, 1, 10, limit_of(kind))
    above_rest = kind.plan.limit_bytes - kind.plan.resting_bytes
    for number, share in ((17, 0.9), (24, 0.9), (31, 0.905)):
        parts.met(kind, 1, number, None, Held(int(share * above_rest), int(share * above_rest)))
    assert counted(parts, 32, 60) == []
    parts.met(kind, 1, 60, None, Held(2 * above_rest, 2 * above_rest))
    assert counted(parts, 61, 100) == [89]


def test_ones_that_hold_more_now_and_then(kind: Kind) -> None:
    """That the next one of their kind is within the limit tells nothing: the one after as many is counted."""
    parts = Parts()
    assert kind.plan is not None
    parts.met(kind, 1, 10, limit_of(kind))
    above_rest, found = kind.plan.limit_bytes - kind.plan.resting_bytes, list[int]()
    for number in range(11, 61):
        holds_more = number % 12 == 0
        taken_bytes = (2 if holds_more else 0.9) * above_rest
        if not parts.claim_count(number):
            parts.met(kind, 1, number, None, Held(int(taken_bytes), int(taken_bytes)))
        else:
            found.append(number)
            parts.met(kind, 1, number, limit_of(kind))
    assert found == [13, 36]


def test_ones_that_are_compared_with_none_and_hold_more_now_and_then(kind: Kind) -> None:
    """As those that are smaller than the audited one: that the next ones are within the limit tells nothing."""
    counted, held = list[int](), Held(limit_of(kind), limit_of(kind))
    for number in range(50):
        kind.comings.count = number
        if kind.scrutiny.recounts.claim_count(number):
            counted.append(number)
        elif number >= 20 and number % 12 == 8:
            kind.usage.note_uncompared(kind, held)
    assert counted == [21, 22, 23, 24, 44]


def test_ones_that_are_never_begun_as_and_hold_more_now_and_then(kind: Kind) -> None:
    """That the next one of their kind is within the limit tells nothing: the one after as many is counted."""
    asked, more = list[tuple[str, int]](), limit_of(kind)
    late_counts = SimpleNamespace(
        ask=lambda number: asked.append(("next", number)), ask_around=lambda due, number: asked.append(("one", number))
    )
    for number in range(1, 18):
        kind.comings.count = number
        held = Held(more, more) if number in (8, 13) else Held(1, 1)
        step: Any = SimpleNamespace(held=held)
        loop: Any = SimpleNamespace(late_counts=late_counts, measured=range(number))
        _weigh_late(loop, step, kind, None)
    assert asked == [("next", 8), ("next", 13), ("one", 17)]


def test_around_which_steps_one_is_looked_for_that_none_is_begun_as(kind: Kind, tmp_path: Path) -> None:
    """Around the one that comes as long after the last as that came after the one before; a few times."""
    with ebbtide.Budget("1GiB", spill=tmp_path, machine=FAST_DISK) as memory:
        loop, counted = memory._loop, list[int]()
        for number in range(800):
            if number % 80 == 39:
                kind.comings.came_at(number)
                loop.late_counts.ask_around(kind.comings.due, number)
            if loop.claim_count_of_parts():
                counted.append(number)
            loop.measured.add(Measured("planned", None, None))
    assert counted[:16] == list(range(71, 87))  # 40 from the loop's begin on, and then as many
    assert 2 * RUN <= len(counted) <= MOST_VAIN_RUNS * RUN


def test_one_that_is_counted_and_passes_the_limit_no_longer_fits(kind: Kind) -> None:
    """Where nobody weighs such steps, that one is counted is all that tells."""
    parts = Parts()
    parts.met(kind, 1, 10, limit_of(kind))
    parts.met(kind, 1, 17, None)
    assert parts.met(kind, 1, 24, limit_of(kind) + 1) == "observe"
    assert parts.due == 31


def test_what_was_counted_tells_nothing_of_another_plan(kind: Kind) -> None:
    parts = Parts()
    for number in (10, 17):
        parts.met(kind, 1, number, limit_of(kind))
    kind.make_plan(FAST_DISK, limit_of(kind))
    parts.met(kind, 1, 24, None)
    assert counted(parts, 25, 32) == [31]


def test_steps_that_never_come_again_are_hardly_counted(kind: Kind) -> None:
    parts = Parts()
    taken = 0
    for number in range(10_000):
        peak = limit_of(kind) if parts.claim_count(number) else None
        taken += peak is not None
        assert parts.met(kind, number, number, peak) == "none"
    assert 50 < taken < 150


def test_one_that_passes_the_limit_is_observed_and_planned_for_if_that_does_not_help(kind: Kind) -> None:
    parts, above = Parts(), limit_of(kind) + 1
    parts.met(kind, 1, 3, None)
    assert parts.met(kind, 1, 5, above) == "observe"
    assert parts.due == 7
    assert parts.met(kind, 1, 7, above) == "plan", "it was not seen when it was looked for"
    remedies = [parts.met(kind, key, 10 + key, above) for key in range(2, 7)]
    assert remedies == ["observe"] * 3 + ["plan"] * 2, "there are too many of them"


def test_steps_that_leave_out_a_block_and_hold_more_become_a_kind(tmp_path: Path) -> None:
    """The plan of whole steps makes room too late for what follows: they passed the limit each time, unnoticed."""
    torch.manual_seed(0)
    acts = (nn.GELU, nn.GELU, nn.ReLU, nn.GELU, nn.SiLU, nn.ReLU, nn.GELU)
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(256, 256), act()) for act in acts)
    for block in list(blocks)[3:5]:
        block.append(nn.LayerNorm(256))  # type: ignore[operator]
    data, seen = torch.randn(512, 256), []

    def step(number: int) -> None:
        h = kept = data
        for place, block in enumerate(blocks):
            if place == 3 and number % 3 == 2:
                continue
            h = block(h)
            kept = h if place == 5 else kept
        (h.square().mean() + h.abs().mean()).backward()
        kept.sum()

    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(40):
            state = memory.state
            with PeakMeter() as meter, memory.step():
                step(number)
            blocks.zero_grad()
            seen.append((state, memory.measured[-1].left, meter.peak_bytes <= (memory.limit_bytes or 0)))
        assert all(within for state, _, within in seen[28:] if state == "planned"), seen
        assert not any(left for _, left, _ in seen), seen


def test_one_that_holds_too_much_in_the_middle_of_training_is_warned_of(tmp_path: Path) -> None:
    """It goes on, though nobody was ever audited whom others can be compared with: without an arena none is."""
    model, data, limit_bytes = Dropped(), torch.randn(BATCH, WIDTH), int(0.7 * plain_peak(EVERY))
    states = list[str]()
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK, tune_allocator=False) as memory:
        for number in range(20):
            is_due = memory._loop.parts.due == number
            told = pytest.warns(UserWarning, match=HELD_MORE) if is_due else contextlib.nullcontext()
            with told, memory.step():
                more = torch.zeros(limit_bytes) if is_due else None
                model(data, EVERY[1:] if number == 8 else EVERY, 0).backward()
                del more
            model.zero_grad()
            states += [memory.state] if is_due else []
    assert states == ["planned"]
