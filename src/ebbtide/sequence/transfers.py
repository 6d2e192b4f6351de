"""What it takes to move states to a disk and back beside steps, measured before a chain is run.

NOTE [As in a run]
Besides the transfer itself a state costs compute what it takes to ask for it, to look whether it is done and to know
where it is, and what steps lose beside it: in the caches, and to the disk's side of the work, which goes on on another
core. So states are stored and brought back as a run does it, through a `StateStore`, and what steps take so is compared
with what they take alone, in turns: what compute loses is a difference of times that vary by more than that.
"""

from __future__ import annotations

import collections
import dataclasses
import statistics
import time
from collections.abc import Sequence

import torch

from ebbtide.machine import Link
from ebbtide.sequence.blocks import storage_of
from ebbtide.sequence.choose import SlowMemory
from ebbtide.sequence.disk import StateDisk
from ebbtide.sequence.schedules import MEMORY
from ebbtide.sequence.schedules.multistage import MOST_AHEAD
from ebbtide.sequence.store import StateStore
from ebbtide.sequence.trial import Trial

TRIPS = 3
"""This many transfers alone are timed in each direction."""
TURN_RUNS = 2
"""Steps alone and steps beside transfers take turns, in each of which at least this many runs go."""
TURN_STATES = 8
"""In each turn at least this many states go, too."""
LATE_SHARE = 0.1
"""A disk that makes compute wait for more than this share of a turn does not keep up with it."""
UNTRIED_SECONDS = 30e-6
"""Seconds that a state costs compute each way where there is no time to try it: measured were 10 to 60 microseconds."""
BESIDE_SECONDS = 0.6
"""Turns are taken for at most this many seconds."""
TRIAL_PLACES = 256
"""At most this many states are in the file during a trial, one after another, as in a run: it grows meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Turn:
    """Times of a turn: of some steps that states were moved beside.

    Attributes:
        whole: seconds of the whole turn.
        late: seconds for which compute waited for the disk.
        busy: seconds of steps, and of what compute does for the transfers.
    """

    whole: float
    late: float
    busy: float


def time_transfers(
    disk: StateDisk,
    trial: Trial,
    step_seconds: float,
    copy_seconds: float,
    capacity_bytes: int | None,
    *,
    seconds: float,
) -> SlowMemory:
    """Measure how long a state takes to ``disk`` and back, and what compute loses by it besides the copy of the state.

    Args:
        disk: the disk to measure.
        trial: the chain's steps.
        step_seconds, copy_seconds: time of a step alone, and of a copy of a state.
        capacity_bytes: bytes that the disk can take.
        seconds: time that measuring may take; if it is less than a few steps, each way is timed alone, and compute is
            taken to lose what it usually does.

    Raises:
        SpillError: if states cannot be moved.
    """
    length = trial.blocks.run_length if disk.takes_runs(trial.blocks.block_bytes) else 1
    run = trial.samples(length)
    trips = [_time_trip(disk, storage_of(run)) for _ in range(TRIPS)]
    trial.blocks.give_back(*run)
    alone = [statistics.median(way) for way in zip(*trips, strict=True)]
    losses = [UNTRIED_SECONDS, UNTRIED_SECONDS]
    takes = [way / len(run) for way in alone]
    steps = max(TURN_RUNS * length, TURN_STATES)
    room = TRIAL_PLACES if capacity_bytes is None else min(capacity_bytes // trial.blocks.block_bytes, TRIAL_PLACES)
    seconds = min(seconds, BESIDE_SECONDS)
    most_seconds = steps * (3 * step_seconds + sum(takes))  # of a turn; transfers run beside steps, so less
    if most_seconds < 2 * seconds and trial.slots >= 2 and steps <= room:
        alone_turns, *ways = _in_turns(disk, trial, steps, room, seconds)
        for way, turns in enumerate(ways):
            whole, late, busy = (
                statistics.median(getattr(turn, each) for turn in turns) for each in ("whole", "late", "busy")
            )
            if late - alone[way] > LATE_SHARE * whole:  # else it keeps up with compute, and a turn tells of that only
                takes[way] = (whole - busy * length / steps) / steps  # the first, or the last, run goes beside none
            pairs = zip(turns, alone_turns, strict=True)
            losses[way] = statistics.median(turn.busy - plain.busy for turn, plain in pairs) / steps - copy_seconds
    return SlowMemory(
        disk.name,
        _link("memory", disk.name, trial.state_bytes, takes[0], losses[0]),
        _link(disk.name, "memory", trial.state_bytes, takes[1], losses[1]),
        capacity_bytes,
    )


def _time_trip(disk: StateDisk, storage: torch.UntypedStorage) -> tuple[float, float]:
    """Seconds of some states to the disk and of the way back."""
    start = time.perf_counter()
    copy = disk.store(storage)
    copy.wait()
    written = time.perf_counter()
    disk.bring(copy.place, storage).wait()
    end = time.perf_counter()
    disk.forget(copy.place)
    return written - start, end - written


def _in_turns(
    disk: StateDisk, trial: Trial, steps: int, room: int, seconds: float
) -> tuple[list[_Turn], list[_Turn], list[_Turn]]:
    """Turns of ``steps`` steps alone, of as many that each store their state, and of as many that each bring one back.

    Args:
        disk: the disk to measure.
        trial: the chain's steps.
        steps: number of steps in a turn.
        room: number of states that the disk may hold.
        seconds: time after which no further turn begins.
    """
    alone: list[_Turn] = []
    out: list[_Turn] = []
    back: list[_Turn] = []
    stored: list[int] = []
    start = time.perf_counter()
    with StateStore(trial.blocks, {disk.name: disk}) as store:
        while not alone or time.perf_counter() - start < seconds:
            if len(stored) + steps > room:  # all at once, so that no holes are left between runs
                _drop(store, disk.name, stored)
            numbers = range(len(alone) * steps, (len(alone) + 1) * steps)
            stored.extend(numbers)
            busy = sum(trial.time() for _ in numbers)
            alone.append(_Turn(busy, 0.0, busy))
            out.append(_storing(disk, trial, store, numbers))
            back.append(_bringing(disk, trial, store, numbers))
        _drop(store, disk.name, stored)
    return alone, out, back


def _drop(store: StateStore, tier: str, numbers: list[int]) -> None:
    while numbers:
        store.drop(numbers.pop(), tier)


def _storing(disk: StateDisk, trial: Trial, store: StateStore, numbers: Sequence[int]) -> _Turn:
    """Run a step for each of ``numbers`` and store its state."""
    waited_before, busy, start = store.waited_seconds, 0.0, time.perf_counter()
    for number in numbers:
        state = trial.prepare()
        began = time.perf_counter()
        state = trial.step(state)
        block = store.take(disk.name)
        trial.pack(state, block)
        store.put(number, disk.name, block)
        busy += time.perf_counter() - began
    stepped, waited = time.perf_counter(), store.waited_seconds - waited_before
    disk.drain()
    end = time.perf_counter()
    return _Turn(end - start, waited + end - stepped, busy - waited)


def _bringing(disk: StateDisk, trial: Trial, store: StateStore, numbers: Sequence[int]) -> _Turn:
    """Bring back the states ``numbers``, the last one first, and run a step after each."""
    waited_before, busy, start = store.waited_seconds, 0.0, time.perf_counter()
    ahead = max(min(trial.slots // 2, MOST_AHEAD), 1)
    wanted, coming = collections.deque(reversed(numbers)), collections.deque[int]()
    target = memoryview(bytearray(trial.blocks.block_bytes))
    while wanted or coming:
        began = time.perf_counter()
        if len(coming) <= ahead // 2:  # as schedules do, so that several come in one go
            while wanted and len(coming) < ahead:
                coming.append(wanted.popleft())
                store.fetch(coming[-1], disk.name)
        number = coming.popleft()
        target[:] = store.get(number, MEMORY).memory()
        store.drop(number, MEMORY)
        busy += time.perf_counter() - began + trial.time()
    waited = store.waited_seconds - waited_before
    return _Turn(time.perf_counter() - start, waited, busy - waited)


def _link(source: str, target: str, state_bytes: int, seconds: float, loss_seconds: float) -> Link:
    seconds = max(seconds, 1e-9)
    rate = max(state_bytes, 1) / seconds
    return Link(source, target, 0.0, rate, rate, max(loss_seconds, 0.0) / seconds)
