"""Going on from states that lie wherever a run has left them: by the judge, and after a run was killed."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from ebbtide.machine import Link
from ebbtide.sequence import SlowMemory, interval_control, planning
from ebbtide.sequence.schedules import (
    DISK,
    MEMORY,
    Advance,
    Costs,
    DiskCosts,
    HRevolve,
    Level,
    Load,
    Multistage,
    PeriodicDiskRevolve,
    Revolve,
    Schedule,
    StoreAll,
    interpret,
)
from ebbtide.sequence.schedules.continued import Continued, resumed
from ebbtide.sequence.schedules.disk_revolve import TABLE_STEPS
from ebbtide.sequence.trial import StepCosts
from tests.sequence.test_named import START, check_whole, killed_at, lines

pytestmark = pytest.mark.usefixtures("nothing_left")
WRITE = 3.0
STARTS = [(0,), (0, 1), (0, 7, 9, 40), (0, 13, 26, 39), (0, 30)]


def tails(n: int, states: int, costs: DiskCosts) -> list[Schedule]:
    levels = (Level(MEMORY, states), Level(DISK, None, costs.write, costs.read))
    return [
        Revolve(n, states),
        StoreAll(n, tier=DISK),
        HRevolve(n, levels, costs.forward, costs.reverse),
        PeriodicDiskRevolve(n, states, costs, 4),
    ]


@pytest.mark.parametrize("starts", STARTS)
@pytest.mark.parametrize("states", [1, 3])
@pytest.mark.parametrize("read", [0.25, 4.0])
def test_keeps_every_rule_and_takes_what_it_says(starts: tuple[int, ...], states: int, read: float) -> None:
    costs = DiskCosts(1.0, 2.0, WRITE, read)
    taken = Costs(1.0, 2.0, {DISK: WRITE}, {DISK: read})
    for n in (1, 2, 23):
        for tail in tails(n, states, costs):
            schedule = Continued(starts, tail, states, costs)
            count = interpret(schedule.records(), starts[-1] + n, schedule.slots, taken)
            assert count.reversed_steps == schedule.n
            assert count.forward_steps == schedule.forward_steps
            assert count.most.get(DISK, 0) == schedule.slots[DISK]
            assert count.seconds == schedule.seconds(interpret(tail.records(), n, tail.slots, taken).seconds)


@pytest.mark.parametrize("starts", STARTS)
def test_goes_on_without_what_was_run(starts: tuple[int, ...]) -> None:
    for tail in [*tails(23, 3, DiskCosts(read=1.0)), Multistage(23, 3, 4)]:
        schedule = Continued(starts, tail, 3, DiskCosts(read=1.0))
        interpret(schedule.records(), schedule.n, schedule.slots)
        records = list(resumed(schedule.records(), starts, DISK))
        assert records[0] == Load(starts[-1], DISK)
        steps = sum(record.stop - record.start for record in records if isinstance(record, Advance))
        assert steps == schedule.forward_steps - starts[-1]


@pytest.mark.parametrize(
    ("there", "can"), [([], False), ([0], True), ([0, 5, 6], True), ([5, 6], False), ([0, TABLE_STEPS + 1], False)]
)
def test_only_from_states_that_lie_near_enough_and_begin_with_the_first(there: Sequence[int], can: bool) -> None:
    assert planning._can_continue(there) == can


@pytest.fixture
def measured(monkeypatch: pytest.MonkeyPatch) -> Callable[[float], None]:
    """Says how many steps the disk takes for a state, whatever it does."""
    monkeypatch.setattr(planning, "time_steps", lambda *_: StepCosts(1e-4, 0.0))
    monkeypatch.setattr(interval_control, "STEADY", 1e9)  # intervals are not chosen again
    monkeypatch.setattr(interval_control, "LATE_SHARE", 1e9)

    def take(write_steps: float) -> None:
        rate = START.nbytes / (1e-4 * write_steps)
        links = Link("m", DISK, 0, rate, rate), Link(DISK, "m", 0, rate, rate)
        monkeypatch.setattr(planning, "time_transfers", lambda *given, **_: SlowMemory(DISK, *links, given[4]))

    return take


@pytest.mark.parametrize("later", [9, 12, 25, 1e6])
def test_memory_for_two_states(later: float, measured: Callable[[float], None], tmp_path: Path) -> None:
    """What is quickest on the disk as it is now would have stored other states than those that are there."""
    options: dict[str, Any] = {"schedule": None, "memory": 2 * START.nbytes}
    measured(9)
    killed_at(tmp_path, 100, **options)
    newest = lines(tmp_path)[-1]["step"]
    measured(later)
    assert check_whole(tmp_path, **options).resumed_step == newest > 50
