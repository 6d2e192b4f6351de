"""Steps of which no two are alike, as where experts take the rows they are sent, run by one plan."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.plan import plain_peak_bytes
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import PeakMeter
from ebbtide.run.native import arena_library
from ebbtide.run.roomy import largest_of, roomy
from ebbtide.step import Step
from ebbtide.step_checks import check_step
from ebbtide.structure import structure
from tests.plan.random_steps import KIB, Tape
from tests.run.harness import FAST_DISK, HELD_MORE, SLOW_DISK
from tests.run.inside import expected_kind, kinds_of, latest_kind

ROWS, WIDTH, EXPERTS, LAYERS = 512, 64, 3, 2


class Experts(nn.Module):
    """Layers of experts, each of which takes the rows that a step deals to it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, 2 * WIDTH), nn.GELU(), nn.Linear(2 * WIDTH, WIDTH), nn.Tanh())
            for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor, step: int) -> Tensor:
        dice = torch.Generator().manual_seed(step)
        for _ in range(LAYERS):
            sent = torch.randint(EXPERTS, (ROWS,), generator=dice)
            out = torch.zeros_like(x)
            for number, expert in enumerate(self.experts):
                rows = (sent == number).nonzero()[:, 0]
                out = out.index_add(0, rows, expert(x[rows]))
            x = x + out
        return x.square().mean()


def gradients(model: nn.Module) -> list[Tensor]:
    found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
    model.zero_grad()
    return found


def plain_peak(data: Tensor) -> int:
    model = Experts()
    with PeakMeter() as meter:
        model(data, 0).backward()
    return meter.peak_bytes


@pytest.mark.usefixtures("nothing_left", "quick_plans")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_experts_that_take_other_rows_in_each_step(machine: Machine, tmp_path: Path) -> None:
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    limit_bytes = int(0.75 * plain_peak(data))
    plain, model = Experts(), Experts()
    planned, places, peaks = [], [], []
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=machine) as memory:
        for step in range(48):
            plain(data, step).backward()
            state, kind = memory.state, expected_kind(memory)
            places.append(kind is not None and kind.rehearsed.serves)
            with PeakMeter() as meter, memory.step():
                model(data, step).backward()
            for one, other in zip(gradients(plain), gradients(model), strict=True):
                assert torch.equal(one, other)
            planned.append(state == "planned" and not memory.measured[-1].left)
            peaks.append(meter.peak_bytes)
        settled = memory.settled
    assert sum(planned[-16:]) >= 14, "hardly a step has no room in the plan"
    assert settled
    assert arena_library() is None or sum(places[-16:]) >= 14, "blocks have no places where their sizes vary"
    assert [(i, peak) for i, peak in enumerate(peaks) if planned[i] and peak > limit_bytes] == []


class Boxes(nn.Module):
    """Layers that are the same in each step, and a loss of as many boxes as there are in it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(*(m for _ in range(4) for m in (nn.Linear(WIDTH, WIDTH), nn.GELU())))

    def forward(self, x: Tensor, step: int, boxes: int) -> Tensor:
        h = x + self.layers(x)
        rows = torch.randint(ROWS, (boxes,), generator=torch.Generator().manual_seed(step))
        return h[:, :1][rows].tanh().mean() + h.square().mean()


@pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_where_only_trifles_vary_one_plan_serves_with_places(machine: Machine, tmp_path: Path) -> None:
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    dice = random.Random(0)
    boxes = [dice.randrange(20, 40) for _ in range(20)] + [dice.randrange(100, 200) for _ in range(20)]
    plain, model = Boxes(), Boxes()
    planned, places = [], []
    with ebbtide.Budget("75%", spill=tmp_path, machine=machine) as memory:
        for step, count in enumerate(boxes):
            plain(data, step, count).backward()
            planned.append(memory.state == "planned")
            kind = expected_kind(memory)
            places.append(kind is not None and kind.rehearsed.serves)
            with PeakMeter() as meter, memory.step():
                model(data, step, count).backward()
            for one, other in zip(gradients(plain), gradients(model), strict=True):
                assert torch.equal(one, other)
            planned[-1] = planned[-1] and not memory.measured[-1].left
            assert memory.limit_bytes is None or not planned[-1] or meter.peak_bytes <= memory.limit_bytes
        assert memory.plan is not None
        assert memory.plan.binds
    for settled in (planned, places) if arena_library() is not None else (planned,):
        assert all(settled[10:20]), "kinds of steps were told by trifles"
        assert all(settled[32:]), "no more room was made when there were more boxes"


class Words(Boxes):
    """The same layers, and a large head for as many words as are masked."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(WIDTH, 8 * WIDTH)

    def forward(self, x: Tensor, step: int, words: int) -> Tensor:
        h = x + self.layers(x)
        rows = torch.randint(ROWS, (words,), generator=torch.Generator().manual_seed(step))
        loss: Tensor = self.head(h[rows]).logsumexp(-1).mean()
        return loss


@pytest.mark.usefixtures("nothing_left", "quick_plans")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_more_than_four_sizes_share_a_plan_though_one_is_the_largest(machine: Machine, tmp_path: Path) -> None:
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    dice = random.Random(0)
    plain, model = Words(), Words()
    with PeakMeter() as meter:
        plain(data, 0, 140).backward()
    plain.zero_grad()
    limit_bytes = int(0.8 * meter.peak_bytes)
    planned = []
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=machine) as memory:
        for step in range(40):
            words = dice.randrange(100, 140)
            plain(data, step, words).backward()
            planned.append(memory.state == "planned")
            with PeakMeter() as meter, memory.step():
                model(data, step, words).backward()
            for one, other in zip(gradients(plain), gradients(model), strict=True):
                assert torch.equal(one, other)
            planned[-1] = planned[-1] and not memory.measured[-1].left
            assert not planned[-1] or meter.peak_bytes <= limit_bytes
        assert memory.plan is not None
        assert memory.plan.binds
    assert planned[-12:].count(True) >= 11


@pytest.mark.usefixtures("nothing_left", "quick_plans")
def test_what_the_plan_has_room_for_is_not_planned_for_again(tmp_path: Path) -> None:
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    model = Words()
    with PeakMeter() as meter:
        model(data, 0, 140).backward()
    model.zero_grad()
    with ebbtide.Budget(int(0.8 * meter.peak_bytes), spill=tmp_path, machine=FAST_DISK) as memory:

        def step(number: int, words: int) -> None:
            with memory.step():
                model(data, number, words).backward()

        for number in range(30):
            step(number, 100 + number % 10)
        assert memory.state == "planned"
        kinds, kind, plan = kinds_of(memory), latest_kind(memory), memory.plan
        memory._loop.looks.left = 1
        step(30, 95)
        assert memory.measured[-1].state == "observe"
        assert (kinds_of(memory), memory.plan, memory.state) == (kinds, plan, "planned")
        memory._loop.looks.left = 1
        step(31, 140)
        assert memory.measured[-1].state == "observe"
        assert memory.plan is not plan
        assert kind not in kinds_of(memory)


@pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")
def test_a_plan_that_is_made_anew_ends_no_training(tmp_path: Path) -> None:
    """Steps that hold more than any plan allows were warned of under the former one, and went on."""
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    model, dice = Words(), random.Random(0)
    with PeakMeter() as meter:
        model(data, 0, 140).backward()
    model.zero_grad()
    with ebbtide.Budget(int(0.85 * meter.peak_bytes), spill=tmp_path, machine=FAST_DISK) as memory:

        def step(words: int, copies: int) -> None:
            with memory.step():
                loss = model(data, len(memory.measured), words)
                kept = [data.clone() for _ in range(copies)]
                loss.backward()
                del kept
            model.zero_grad()

        def steps(count: int, copies: int) -> None:
            for _ in range(count):
                step(dice.randrange(100, 128), copies)

        for number in range(24):
            step(dice.randrange(100, 140 if number < 20 else 128), 0)
        former = expected_kind(memory)
        with pytest.warns(UserWarning, match=HELD_MORE) as said:
            steps(8, 14)
        assert len(said) == 1
        for words in range(166, 186):
            if expected_kind(memory) is not former and memory.state == "audit":
                break
            step(words if expected_kind(memory) is former else 120, 0)
        assert expected_kind(memory) is not former
        steps(4, 14)  # the first of these is counted
        assert memory.state != "audit"


@pytest.mark.usefixtures("quick_plans")
def test_what_was_left_free_stays_free_where_a_plan_is_made_anew() -> None:
    steps, limit_bytes = [chain(300, 300, 300), chain(290, 310, 300), chain(310, 290, 320)], 1 << 20
    former, later = Kind(roomy(steps), steps), Kind(roomy([*steps, chain(330, 330, 330)]), steps)
    for kind in (former, later):
        kind.make_plan(FAST_DISK, limit_bytes)
    former.reserve_bytes(1 << 16, FAST_DISK)
    resting_bytes = later.step.resting_bytes
    later.inherit([former, Kind(steps[0])], FAST_DISK)
    assert later.step.resting_bytes == resting_bytes + (1 << 16)
    assert later.structure == former.structure


@pytest.mark.usefixtures("nothing_left")
def test_where_there_is_no_plan_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_plans: Callable[..., Plan]
) -> None:
    """Steps run by the safe policy where a plan with so much room cannot be made, and it is tried but once."""
    tried: list[int] = []

    def huge(steps: Sequence[Step], least: float = 1.0, most: float = math.inf) -> Step:
        tried.extend([len(steps)] if least == 1 else [])
        step = roomy(steps, least, most)
        values = tuple(dataclasses.replace(value, size_bytes=100 * value.size_bytes) for value in step.values)
        return dataclasses.replace(step, values=values)

    monkeypatch.setattr("ebbtide.run.loop.MOST_STRANGERS", 2)
    monkeypatch.setattr("ebbtide.run.roomy.roomy", huge)
    data = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(1))
    plain, model = Experts(), Experts()
    with ebbtide.Budget(int(0.9 * plain_peak(data)), spill=tmp_path, machine=FAST_DISK) as memory:
        for step in range(12):
            plain(data, step).backward()
            with memory.step():
                model(data, step).backward()
            for one, other in zip(gradients(plain), gradients(model), strict=True):
                assert torch.equal(one, other)
    assert len(tried) == 1


def chain(*rows: int, width: int = 256) -> Step:
    """A chain of ops, each of which makes and saves so many rows."""
    tape = Tape()
    value, saved = tape.external(64 * KIB), []
    for count in rows:
        value = tape.op([value], [4 * width * count], name="aten.mm.default", seconds=1e-6 * count, workspace=count)[0]
        saved.append(tape.pack(value))
    for number in reversed(saved):
        tape.unpack(number)
        tape.op([tape.saved[number][0]], [8 * KIB], phase="backward", seconds=1e-3)
    step = tape.step()
    shown = tuple(dataclasses.replace(s, shape=(count, width)) for s, count in zip(step.saved, rows, strict=True))
    return dataclasses.replace(step, saved=shown)


def test_structures() -> None:
    assert structure(chain(3, 5)) == structure(chain(7, 1))
    assert structure(chain(3, 5)) != structure(chain(3, 5, 7))
    assert largest_of([chain(3, 5), chain(4, 4)]) is None
    assert largest_of([chain(3, 5), chain(4, 6), chain(4, 2)]) == chain(4, 6)


@hypothesis.given(st.lists(st.tuples(*[st.integers(0, 300)] * 3), min_size=2, max_size=6), st.data())
def test_a_roomy_step_has_room(rows: list[tuple[int, int, int]], data: st.DataObject) -> None:
    """It is as large as all of them, what does not vary stays as it is, and what fits its shapes fits its values."""
    steps = [chain(*counts) for counts in rows]
    one = roomy(steps)
    check_step(one)
    assert structure(one) == structure(steps[0])
    for number, saved in enumerate(one.saved):
        counts = {step.saved[number].shape[0] for step in steps}
        assert saved.shape[0] == max(counts) if len(counts) == 1 else saved.shape[0] > max(counts)
    for step in steps:
        assert all(a.size_bytes >= b.size_bytes for a, b in zip(one.values, step.values, strict=True))
        assert all(a.workspace_bytes >= b.workspace_bytes for a, b in zip(one.ops, step.ops, strict=True))
    fits = chain(*(data.draw(st.integers(0, saved.shape[0])) for saved in one.saved))
    assert plain_peak_bytes(fits) <= plain_peak_bytes(one)
