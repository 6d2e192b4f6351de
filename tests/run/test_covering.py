"""Whether one kind's plan can run another's steps: the memory that is worked out is the memory that such steps take."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Decision, Keep, Offload, Plan
from ebbtide.machine import Machine
from ebbtide.run.covering import Room, can_run
from ebbtide.run.forks import KnownScripts
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import PeakMeter
from ebbtide.run.script import Script
from ebbtide.step import Step
from tests.run.harness import FAST_DISK, SLOW_DISK
from tests.run.inside import kinds_of

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")

MOVES = dataclasses.replace(FAST_DISK, replay_seconds=1.0)
"""A machine for which no plan computes anything again, as it now and then does where no time is lost by that."""
BLOCKS, WIDTH, BATCH = 8, 64, 256
EVERY = tuple(range(BLOCKS))
Keeps = Mapping[int, int]
"""Which blocks' outputs the user keeps, each until which block has run."""


class Kept(nn.Module):
    """Blocks of which a step may leave some out, and keep the outputs of others for longer than autograd's sake."""

    def __init__(self, act: type[nn.Module]) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), act()) for _ in EVERY)

    def forward(self, x: Tensor, blocks: Sequence[int], keeps: Keeps) -> Tensor:
        kept: dict[int, Tensor] = {}
        for place, block in enumerate(self.blocks):
            if place in blocks:
                x = block(x)
                if place in keeps:
                    kept[place] = x
            for each in [each for each in kept if keeps[each] <= place]:
                del kept[each]
        return x.square().mean()


def run(budget: ebbtide.Budget, model: Kept, blocks: Sequence[int], keeps: Keeps) -> int:
    """One step. Returns its peak bytes."""
    data = torch.ones(BATCH, WIDTH)
    with PeakMeter() as meter, budget.step():
        model(data, blocks, keeps).backward()
    model.zero_grad()
    return meter.peak_bytes


def least_limit(script: Script, other: Script) -> int:
    """The least limit within which ``script`` is said to run ``other``."""
    low, high = 0, 1 << 40
    while low + 1 < high:
        middle = (low + high) // 2
        if can_run(dataclasses.replace(script, limit_bytes=middle), other, 0):
            high = middle
        else:
            low = middle
    return high


def scripts_of(budget: ebbtide.Budget) -> list[Script]:
    """Of the kinds that are planned, largest first."""
    kinds: list[Kind] = sorted(kinds_of(budget), key=lambda kind: -len(kind.step.saved))
    return [kind.script for kind in kinds if kind.script is not None]


def run_both(
    budget: ebbtide.Budget, model: Kept, blocks: Sequence[int], keeps: Keeps, monkeypatch: pytest.MonkeyPatch
) -> tuple[Script, Script, int]:
    """Steps of all blocks and of some, at last by the plan for all: both scripts, and the peak bytes of the latter."""
    for _ in range(5):
        run(budget, model, blocks, keeps)
    for _ in range(5):
        run(budget, model, EVERY, {})
    whole, part = scripts_of(budget)
    assert len(part.saves) < len(whole.saves)
    monkeypatch.setattr(KnownScripts, "covers", lambda *_: True)
    monkeypatch.setattr(KnownScripts, "room_to_begin", lambda *_: Room(0, 0))
    for _ in range(3):
        peak_bytes = run(budget, model, blocks, keeps)
        run(budget, model, EVERY, {})
    assert [measured.left for measured in budget.measured[-6:]] == [""] * 6
    assert scripts_of(budget)[0] is whole
    return whole, part, peak_bytes


@pytest.mark.parametrize("machine", [MOVES, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("act", [nn.Tanh, nn.GELU])
@pytest.mark.parametrize(
    ("blocks", "keeps"),
    [
        (EVERY[:4] + EVERY[5:], {}),
        (EVERY[:-1], {}),
        (EVERY[:4] + EVERY[5:], {1: 6}),
        (EVERY[:4] + EVERY[5:], {1: 3, 2: 7}),
        (EVERY[:6] + EVERY[7:], {0: 5, 1: 5, 2: 5}),
    ],
    ids=["none kept", "last left out", "kept till late", "two kept", "three kept"],
)
def test_the_memory_that_is_worked_out_is_the_memory_that_is_taken(
    machine: Machine,
    act: type[nn.Module],
    blocks: Sequence[int],
    keeps: Keeps,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = Kept(act)
    with ebbtide.Budget("70%", spill=tmp_path, machine=machine) as budget:
        whole, part, peak_bytes = run_both(budget, model, blocks, keeps, monkeypatch)
    assert peak_bytes <= least_limit(whole, part)
    if machine is MOVES:
        assert not whole.known
        assert not part.known
        assert peak_bytes == least_limit(whole, part)


@pytest.mark.parametrize("last", [Keep(), Offload("disk", 22, 24, 33)], ids=["last kept", "last away"])
@pytest.mark.parametrize("blocks", [EVERY[:6] + EVERY[7:], EVERY[:-1]], ids=["one left out", "last left out"])
@pytest.mark.parametrize("released", [13, 18])
@pytest.mark.parametrize("keeps", [{}, {0: 5, 1: 5, 2: 5}, {2: 3, 3: 7}], ids=["none kept", "three kept", "two kept"])
def test_what_a_plan_lets_go_of_counts_once(
    released: int,
    keeps: Keeps,
    blocks: Sequence[int],
    last: Decision,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    quick_plans: Callable[..., Plan],
) -> None:
    """Whichever plan it is; those that are found follow from what ops took."""
    times = [(3, 7, 106), (6, 12, 78), (9, released, 78), (12, 18, 64), (15, 24, 50), (18, 24, 36)]
    decisions: tuple[Decision, ...] = (*(Offload("disk", *each) for each in times), last, Keep())

    def plan_of(step: Step, *arguments: Any, **options: Any) -> Plan:
        plan = quick_plans(step, *arguments, **options)
        return dataclasses.replace(plan, decisions=decisions) if len(step.absences) == len(decisions) else plan

    monkeypatch.setattr("ebbtide.run.solving.solve", plan_of)
    model = Kept(nn.Tanh)
    with ebbtide.Budget("70%", spill=tmp_path, machine=FAST_DISK) as budget:
        whole, part, peak_bytes = run_both(budget, model, blocks, keeps, monkeypatch)
    assert peak_bytes == least_limit(whole, part)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_what_the_user_keeps_is_not_away(machine: Machine, tmp_path: Path) -> None:
    """Layers' outputs that only steps with a part of the layers keep: the whole's plan has moved them out by then, and
    such steps held 1.1 times the limit each time."""
    model, keeps = Kept(nn.Tanh), {0: 6, 1: 6, 2: 6}
    blocks = EVERY[:6] + EVERY[7:]
    with ebbtide.Budget("80%", spill=tmp_path, machine=machine) as budget:
        for _ in range(5):
            run(budget, model, blocks, keeps)
        for _ in range(5):
            run(budget, model, EVERY, {})
        peaks = [run(budget, model, *each) for _ in range(8) for each in ((EVERY, {}), (blocks, keeps))]
        assert budget.limit_bytes is not None
        assert max(peaks[4:]) <= budget.limit_bytes
