"""What a disk is planned to take, and what follows while a chain runs."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide import scan
from ebbtide.machine import Link
from ebbtide.sequence import SlowMemory, planning, run
from ebbtide.sequence.blocks import Blocks, bytes_on_disk
from ebbtide.sequence.choose import predicted
from ebbtide.sequence.interval_control import IntervalController
from ebbtide.sequence.planning import SequencePlan
from ebbtide.sequence.schedules import DISK, MEMORY, Advance, Multistage, Record, Store, interpret
from ebbtide.sequence.trial import StepCosts, Trial
from tests.sequence.loops import WIDTH, states
from tests.sequence.test_run import START, STATE_BYTES, forward, plain, reverse, turn

pytestmark = pytest.mark.usefixtures("nothing_left")
N, INTERVAL, STEP_SECONDS, STATE_SECONDS = 1000, 20, 1e-3, 5e-4


def slow_memory(capacity_bytes: int | None) -> SlowMemory:
    rate = STATE_BYTES / STATE_SECONDS
    return SlowMemory(DISK, Link("m", DISK, 0, rate, rate), Link(DISK, "m", 0, rate, rate), capacity_bytes)


def controlled(tier: SlowMemory) -> SequencePlan:
    """A multistage schedule whose intervals follow what steps and the disk do."""
    schedule = Multistage(N, 4, INTERVAL)
    trial = Trial(lambda: None, lambda state: state, lambda *_: None, Blocks(STATE_BYTES, 4, for_disk=True))
    return planning._controlled(schedule, predicted(schedule, STATE_BYTES, 1.0), tier, trial, STEP_SECONDS, [])


@pytest.fixture
def as_given(monkeypatch: pytest.MonkeyPatch) -> None:
    """Steps and the disk take the times above, whatever they do."""

    def measured(*given: Any, **_: Any) -> SlowMemory:
        return slow_memory(given[4])

    monkeypatch.setattr(planning, "time_transfers", measured)
    for name in ("time_first_steps", "time_steps"):
        monkeypatch.setattr(planning, name, lambda *_: StepCosts(STEP_SECONDS, 0.0))


@pytest.mark.usefixtures("as_given")
def test_no_more_goes_to_a_disk_than_it_has_room_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a tenth of that left free, for others."""
    monkeypatch.setattr(planning, "free_bytes", lambda _: 20 * STATE_BYTES)
    done = run(forward, reverse, N, START, turn=turn, memory=5 * STATE_BYTES, spill=tmp_path)
    assert done.choice is not None
    assert 0 < done.choice.slow_bytes[DISK] <= 18 * STATE_BYTES
    assert done.adjoint.tobytes() == plain(N)[0].tobytes()


def test_intervals_never_become_shorter_than_the_disk_has_room_for() -> None:
    """Steps take ten times as long as they were measured to, and intervals follow."""
    room = N // INTERVAL
    plan = controlled(slow_memory(room * bytes_on_disk(STATE_BYTES)))

    def followed() -> Iterator[Record]:
        for record in plan.records(range(N).__contains__):
            if isinstance(record, Advance):
                steps = record.stop - record.start
                plan.steps_took(steps, 10 * STEP_SECONDS * steps)
            yield record

    assert interpret(followed(), N, {MEMORY: 4, DISK: room}).reversed_steps == N


def test_intervals_grow_where_compute_waits_for_the_disk() -> None:
    plan, stored = controlled(slow_memory(None)), list[int]()
    for record in plan.records(range(N).__contains__):
        if isinstance(record, Store) and record.tier == DISK:
            stored.append(record.step)
            plan.was_late(INTERVAL * STEP_SECONDS, 1)
    intervals = [following - step for step, following in itertools.pairwise(stored)]
    assert intervals[0] == INTERVAL
    assert 2 * INTERVAL in intervals


def run_chain(spill: Path) -> None:
    run(forward, reverse, N, START, turn=turn, memory=5 * STATE_BYTES, spill=spill)


def run_cells(spill: Path) -> None:
    weight, state = torch.ones(WIDTH, requires_grad=True), torch.ones(WIDTH)
    final, _ = scan(lambda u, _: ((u * weight).sin(), None), state, range(N), memory=states(5, state), spill=spill)
    final.sum().backward()


@pytest.mark.usefixtures("as_given")
@pytest.mark.parametrize("chain", [run_chain, run_cells])
def test_intervals_follow_what_is_seen_of_a_chain(
    chain: Callable[[Path], None], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    steps, late = list[int](), list[int]()
    monkeypatch.setattr(IntervalController, "steps_took", lambda _, count, seconds: steps.append(count))
    monkeypatch.setattr(IntervalController, "was_late", lambda _, seconds, states: late.append(states))
    chain(tmp_path)
    assert len(steps) >= 10
    assert 0.9 * N <= sum(steps) <= N
    assert sum(late) >= 10
