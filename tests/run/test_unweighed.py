"""Steps of which nobody knows what they hold, or with what to compare that: now and then one is counted."""

from __future__ import annotations

import contextlib
import random
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.run.meter import PeakMeter
from ebbtide.run.native import arena_library
from tests.run.harness import FAST_DISK, HELD_MORE, Guard
from tests.run.inside import expected_kind, kinds_of
from tests.run.test_gone_over import same
from tests.run.test_kinds import EVERY, WIDTH, Dropped, gradients
from tests.run.test_noticed import steps_beside
from tests.run.test_roomy import ROWS, Words

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")
needs_arena = pytest.mark.skipif(arena_library() is None, reason="without the arena each 61st step is counted, no more")
BATCH, COPIES, SETTLED, SOON = 512, 14, 7, 7
PART = EVERY[:3] + EVERY[4:]
"""All blocks but one."""


class Step(NamedTuple):
    """A step: the blocks that it has, how many copies of activations it keeps, and its rows."""

    blocks: Sequence[int] = EVERY
    copies: int = 0
    rows: int = BATCH


class Copying(Dropped):
    """Steps may keep copies of activations to look at until they end."""

    def run(self, data: Tensor, step: Step, guard: Guard) -> list[Tensor | None]:
        with guard():
            h = self.blocks[0](data[: step.rows])
            for block in step.blocks:
                h = h + self.blocks[block](h)
            kept = [h.detach().clone() for _ in range(step.copies)]
            self.ends[0](h).square().mean().backward()
            del kept
        return gradients(self)


class Loop:
    """Steps within ``share`` of what the largest one holds; their gradients are those without a budget."""

    def __init__(self, share: float, directory: Path, *, tunes: bool = True) -> None:
        self._plain, self.model, self._data = Copying(), Copying(), torch.randn(BATCH, WIDTH)
        with PeakMeter() as meter:
            self._plain.run(self._data, Step(), contextlib.nullcontext)
        self._limit_bytes = int(share * meter.peak_bytes)
        self.memory = ebbtide.Budget(
            self._limit_bytes, spill=directory, machine=FAST_DISK, verify=False, tune_allocator=tunes
        )

    def take(self, steps: Sequence[Step]) -> list[bool]:
        """Take these steps; whether each has passed the limit."""
        above = []
        for step in steps:
            expected = self._plain.run(self._data, step, contextlib.nullcontext)
            with PeakMeter() as meter:
                found = self.model.run(self._data, step, self.memory.step)
            assert same(expected, found)
            above.append(meter.peak_bytes > self._limit_bytes)
        return above


def assert_soon_within(above: Sequence[bool]) -> None:
    """Of steps that hold more, the first ones have passed the limit, and later ones do not."""
    assert above[0], "they do not hold more than was planned for"
    assert not any(above[SOON:]), above


def assert_noticed_without_an_audit(loop: Loop) -> None:
    """Nothing was audited that whole steps could be compared with; that they hold more is noticed nevertheless."""
    kind = expected_kind(loop.memory)
    assert kind is not None
    assert (kind.state, kind.usage.audited) == ("rehearse", None)
    loop.take([Step()] * SETTLED)
    assert_soon_within(loop.take([Step(EVERY, COPIES)] * 2 * SOON))


@needs_arena
def test_whole_steps_where_only_parts_were_audited(tmp_path: Path) -> None:
    loop = Loop(0.7, tmp_path)
    with loop.memory:
        loop.take([Step()] * 2 + [Step(PART)] * 3)
        assert_noticed_without_an_audit(loop)


@needs_arena
def test_steps_whose_audit_ran_beside_another_budgets_step(tmp_path: Path) -> None:
    loop = Loop(0.7, tmp_path)
    with loop.memory, steps_beside(tmp_path) as beside:
        loop.take([Step()] * 2)
        handle = loop.model.blocks[1].register_forward_pre_hook(beside)
        loop.take([Step()])
        handle.remove()
        assert_noticed_without_an_audit(loop)


@needs_arena
def test_steps_that_are_smaller_than_planned_for(tmp_path: Path) -> None:
    loop = Loop(0.8, tmp_path)
    smaller = [Step(EVERY, 0, BATCH - 16), Step(EVERY, 0, BATCH - 40)]
    with loop.memory:
        loop.take([Step()] * 2 + smaller * SETTLED)
        assert_soon_within(loop.take([step._replace(copies=COPIES) for step in smaller * SOON]))


@needs_arena
def test_one_in_many_is_counted_of_steps_that_are_smaller_than_the_audited_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With whole ones the audited one can be compared, so that none is."""
    monkeypatch.setattr("ebbtide.run.scrutiny.UNWEIGHED", 3)
    loop, counted = Loop(0.8, tmp_path), []
    with loop.memory:
        loop.take([Step()] * 8)
        for step in (Step(), Step(EVERY, 0, BATCH - 200)):
            loop.take([step] * 9)
            counted.append(sum(measured.peak_bytes is not None for measured in loop.memory.measured[-9:]))
    assert counted[0] == 0
    assert counted[1] in (2, 3)


@needs_arena
def test_steps_that_are_audited_once_such_were_warned_of_go_on_as_planned(tmp_path: Path) -> None:
    """Each later one was counted instead, for good: a planned one held more, and the one that audits the plan for that
    held too much for any."""
    loop = Loop(0.7, tmp_path)
    with loop.memory:
        loop.take([Step()] * 8)
        for _ in range(12):
            loop.take([Step(EVERY, COPIES)] * (loop.memory.state != "audit"))
        with warnings.catch_warnings(record=True) as said:
            warnings.simplefilter("always")
            loop.take([Step(EVERY, 4 * COPIES)] * 3)
        assert sum("than is planned for" in str(each.message) for each in said) == 1
        assert [measured.state for measured in loop.memory.measured[-3:]] == ["audit", "rehearse", "planned"]


@needs_arena
def test_parts_where_no_whole_step_comes_again(tmp_path: Path) -> None:
    """The plan can never be rehearsed, which is no reason to count nothing."""
    loop = Loop(0.7, tmp_path)
    with loop.memory:
        loop.take([Step()] * 2 + [Step(PART)] * SETTLED)
        assert loop.memory.state == "rehearse"
        assert_soon_within(loop.take([Step(PART, COPIES)] * 2 * SOON))


def test_parts_that_nobody_weighs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """That some were within the limit once tells nothing of later ones that are counted."""
    monkeypatch.setattr("ebbtide.run.scrutiny.UNWEIGHED", 3)
    loop = Loop(0.7, tmp_path, tunes=False)
    with loop.memory:
        loop.take([Step()] * 2 + [Step(PART)] * SETTLED)
        assert_soon_within(loop.take([Step(PART, COPIES)] * 2 * SOON))


@needs_arena
def test_steps_of_many_sizes_that_share_a_plan(tmp_path: Path) -> None:
    model, data, dice = Words(), torch.randn(ROWS, WIDTH), random.Random(0)
    with PeakMeter() as meter:
        model(data, 0, 140).backward()
    model.zero_grad()
    with ebbtide.Budget(int(0.85 * meter.peak_bytes), spill=tmp_path, machine=FAST_DISK) as memory:

        def take(first: int, last: int, copies: int) -> None:
            for number in range(first, last):
                with memory.step():
                    loss = model(data, number, dice.randrange(100, 140 if number < 20 else 128))
                    kept = [data.clone() for _ in range(copies)]
                    loss.backward()
                    del kept
                model.zero_grad()

        take(0, 24, 0)
        assert [kind.varies for kind in kinds_of(memory)] == [True]
        with pytest.warns(UserWarning, match=HELD_MORE) as said:  # there is no room for that
            take(24, 24 + SOON, COPIES)
        assert len(said) == 1


def one_size(number: int) -> int:
    del number
    return BATCH


def smaller_size(number: int) -> int:
    return BATCH if number < 2 else BATCH - 32


def many_sizes(number: int) -> int:
    return BATCH - 32 * (number * 5 % 9)


@pytest.mark.parametrize(("size_of", "tunes"), [(smaller_size, True), (many_sizes, True), (one_size, False)])
def test_gradients_that_are_added_to(
    size_of: Callable[[int], int], tunes: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """They are there before the step, and with the arena, too, nobody knows that they are its own."""
    monkeypatch.setattr("ebbtide.run.scrutiny.UNWEIGHED", 7)
    torch.manual_seed(0)
    model = nn.Sequential(*(layer for _ in range(8) for layer in (nn.Linear(256, 256), nn.Tanh())))
    data = torch.randn(BATCH, 256)
    with PeakMeter() as meter:
        model(data).square().mean().backward()
    model.zero_grad()
    limit_bytes, above = int(0.96 * meter.peak_bytes), list[bool]()
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK, tune_allocator=tunes) as memory:
        for number in range(40):
            with PeakMeter() as meter, memory.step():
                model(data[: size_of(number)]).square().mean().backward()
            if number < 18:
                model.zero_grad()
            above.append(meter.peak_bytes > limit_bytes)
    assert any(above[18:]), "they do not hold more than was planned for"
    assert not any(above[-12:]), "".join("-#"[each] for each in above)
