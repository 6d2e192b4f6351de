"""What steps, copies and transfers take, measured before a chain is run.

NOTE [Typical times]
A core that shares its execution units or caches with another's work is up to twice as slow while that lasts, for some
milliseconds or seconds: a chain meets both. So what it will take is told by a mean over as long as measuring may last,
not by a median, which is either one or the other; only the slowest few calls, which met another process, are left out.
What compute loses beside transfers is a difference: it is measured in turns with steps alone.
"""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.machine import Link
from ebbtide.sequence.blocks import Block, Blocks, storage_of
from ebbtide.sequence.choose import SlowMemory
from ebbtide.sequence.disk import Copy, StateDisk, StatePlace

TRIALS = 5
TRIAL_SECONDS = 0.5
"""Calls of a step that are timed before a chain is run: so many, or for so long, but more than the first."""
WARM_SECONDS = 2e-3
"""Once it is worth it, short steps are timed for so long at least ..."""
WARM_SHARE = 0.25
"""... and so much of all calls is left out, at the beginning."""
MANY_CALLS = 20
"""From so many on, a mean says more than a median; one in so many is left out."""
MOST_SAMPLES = 256
FEW_BLOCKS = 16
"""States in so many blocks are likely to be in the processor's caches still when they are read ..."""
MANY_BLOCKS_BYTES = 64 << 20
"""... and no more are timed, where there are more, than take so much."""
STORE_SECONDS = 10e-6
"""Compute spends about so long for each transfer in one direction on what the store must know of it."""
TRANSFERS = 3
TURNS = 8
TURN_STEPS = 10
"""Steps beside transfers and steps alone take up to so many turns, of at least so many steps."""
BESIDE_SECONDS = 0.3
"""Transfers in one direction are timed beside steps for so long at most."""
UNDER_WAY = 8
"""So many transfers at most are under way then: enough to keep a link busy beside a step."""
TRIAL_PLACES = 256
"""So many places in the file are written at most, but then one after another, as in a run: it grows meanwhile."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """How to try out a chain without leaving a trace.

    Attributes:
        prepare: gives a state 0 that a step may alter.
        step: runs step 0 forward; gives state 1.
        pack: copies a state into a block.
        item_bytes: of a number in a state.
        blocks: those that the chain will be run with, all of them free.
    """

    prepare: Callable[[], Any]
    step: Callable[[Any], Any]
    pack: Callable[[Any, Block], None]
    item_bytes: int
    blocks: Blocks

    @property
    def state_bytes(self) -> int:
        """Of a state."""
        return self.blocks.state_bytes

    @property
    def slots(self) -> int:
        """States that fit in memory beside the working state."""
        return self.blocks.count

    def time(self) -> float:
        """Seconds of one step."""
        state = self.prepare()
        start = time.perf_counter()
        self.step(state)
        return time.perf_counter() - start

    def samples(self, length: int) -> list[Block]:
        """A run of up to ``length`` blocks with state 1 in each. They must be given back."""
        run = self.blocks.take_run(length)
        state = self.step(self.prepare())
        for block in run:
            self.pack(state, block)
        return run


@dataclasses.dataclass(frozen=True, slots=True)
class StepCosts:
    """Seconds of a step, and of a copy of the state that it has made."""

    seconds: float
    copy_seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class CopyCosts:
    """Seconds that a state costs besides steps, once for each step about, whatever the schedule.

    Attributes:
        seconds: to copy it into a block, and what a step that reads it there takes longer for it.
        first_seconds: to copy it into a block that was not in use before takes so much longer.
    """

    seconds: float
    first_seconds: float


class Samples:
    """What many calls took, in memory that does not grow: when there are many, means of 2, 4, ... calls are kept."""

    def __init__(self) -> None:
        self.calls = 0
        self._means: list[float] = []
        self._together = 1
        self._sum = 0.0

    def add(self, seconds: float) -> None:
        """Note what a call took."""
        self.calls += 1
        self._sum += seconds
        if self.calls % self._together:
            return
        self._means.append(self._sum / self._together)
        self._sum = 0.0
        if len(self._means) == MOST_SAMPLES:
            pairs = iter(self._means)
            self._means = [(one + other) / 2 for one, other in zip(pairs, pairs, strict=True)]
            self._together *= 2

    def typical(self, *, warm_share: float = 0.0) -> float:
        """What a call is likely to take: see NOTE [Typical times]. The first calls, so many of all, do not count."""
        means = sorted(self._means[int(len(self._means) * warm_share) :])
        if len(means) < MANY_CALLS:
            return statistics.median(means)
        return statistics.fmean(means[: len(means) - len(means) // MANY_CALLS])


def time_first_steps(trial: Trial) -> StepCosts:
    """What a step costs, from a few calls: enough for a chain that may be short."""
    return time_steps(trial, 0.0)


def time_steps(trial: Trial, seconds: float) -> StepCosts:
    """What a step costs, once all that it touches is warm; ``seconds`` is what measuring may take.

    As in a run, states are copied in between: steps and copies take from each other what they have in the caches.
    """
    blocks = [trial.blocks.take() for _ in range(min(trial.slots, FEW_BLOCKS))]
    steps, copies = Samples(), Samples()
    start = time.perf_counter()
    while (taken := time.perf_counter() - start) < max(TRIAL_SECONDS, seconds) or steps.calls < 2:
        if steps.calls >= TRIALS and taken >= seconds:
            break
        state = trial.prepare()
        began = time.perf_counter()
        state = trial.step(state)
        done = time.perf_counter()
        trial.pack(state, blocks[steps.calls % len(blocks)])
        copies.add(time.perf_counter() - done)
        steps.add(done - began)
    trial.blocks.give_back(*blocks)
    return StepCosts(steps.typical(warm_share=WARM_SHARE), copies.typical(warm_share=WARM_SHARE))


def time_copy(trial: Trial, count: int) -> CopyCosts:
    """What copies of states cost that go into ``count`` blocks, one after another, and are read last first."""
    state = trial.prepare()
    made = trial.blocks.made
    blocks = [trial.blocks.take() for _ in range(count)]
    fresh = trial.blocks.made - made
    first, writing, reading, again = Samples(), Samples(), Samples(), Samples()
    for number, block in enumerate(blocks):
        seconds = _seconds(trial.pack, state, block)
        if number >= count - fresh:
            first.add(seconds)
    views = [block.memory() for block in blocks]
    target = memoryview(bytearray(len(views[0])))
    for _ in range(2 if count > FEW_BLOCKS else TRIALS):
        for block in blocks:
            writing.add(_seconds(trial.pack, state, block))
        for view in reversed(views):
            reading.add(_seconds(_copy, view, target))
    for _ in range(TRIALS):
        again.add(_seconds(_copy, views[0], target))
    trial.blocks.give_back(*blocks)
    write = writing.typical()
    read_longer = max(reading.typical() - again.typical(), 0.0)
    return CopyCosts(write + read_longer, max(first.typical() - write, 0.0) if first.calls else 0.0)


def _copy(source: memoryview, target: memoryview) -> None:
    target[:] = source


def _seconds(call: Callable[..., object], *arguments: Any) -> float:
    start = time.perf_counter()
    call(*arguments)
    return time.perf_counter() - start


def time_transfers(
    disk: StateDisk,
    trial: Trial,
    step_seconds: float,
    copy_seconds: float,
    capacity_bytes: int | None,
    *,
    seconds: float,
) -> SlowMemory:
    """Measure how long a state takes to ``disk`` and back, and what compute loses beside it, but for the copy.

    Args:
        disk: where to.
        trial: the chain's steps.
        step_seconds, copy_seconds: what a step takes alone, and a copy of a state.
        capacity_bytes: how much the disk can take.
        seconds: that measuring may take; if it is less than a few steps, each way is timed alone.

    Raises:
        SpillError: if states cannot be moved.
    """
    runs = [trial.samples(trial.blocks.run_length if disk.takes_runs(trial.blocks.block_bytes) else 1)]
    length = len(runs[0])
    storages = [storage_of(runs[0])]
    state = trial.prepare()
    places: collections.deque[StatePlace] = collections.deque()
    ways = [_time_trip(disk, storages[0], places) for _ in range(TRANSFERS)]
    out, back = (statistics.median(way) for way in zip(*ways, strict=True))
    out_loss = back_loss = 0.0
    seconds = min(seconds / 2, BESIDE_SECONDS)
    if step_seconds < seconds / 4 and trial.slots >= 2:
        room = max(TRIAL_PLACES // length, 1)
        if capacity_bytes is not None:
            room = min(room, capacity_bytes // storages[0].nbytes())
        count = min(UNDER_WAY, trial.slots // length, 2 + int(step_seconds / max(min(out, back), 1e-9)))
        others = [trial.samples(length) for _ in range(count - 1)]
        runs += [run for run in others if len(run) == length]
        for run in others:  # of what is free, some may not lie together
            if len(run) < length:
                trial.blocks.give_back(*run)
        count = len(runs)
        storages = [storage_of(run) for run in runs]

        def write(number: int) -> Copy:
            if len(places) >= max(room, count + 1):
                disk.forget(places.popleft())
            for block in runs[number]:
                trial.pack(state, block)
            copy = disk.store(storages[number])
            places.append(copy.place)
            return copy

        out, out_loss = _beside(trial, write, count, seconds, out)
        following = itertools.cycle(places)
        back, back_loss = _beside(
            trial, lambda number: disk.bring(next(following), storages[number]), count, seconds, back
        )
        out_loss = STORE_SECONDS + max(out_loss / length - copy_seconds, 0.0)
        back_loss = STORE_SECONDS + back_loss / length
    for place in reversed(places):
        disk.forget(place)
    for run in runs:
        trial.blocks.give_back(*run)
    return SlowMemory(
        disk.name,
        _link("memory", disk.name, trial.state_bytes, out / length, out_loss),
        _link(disk.name, "memory", trial.state_bytes, back / length, back_loss),
        capacity_bytes,
    )


def _time_trip(
    disk: StateDisk, storage: torch.UntypedStorage, places: collections.deque[StatePlace]
) -> tuple[float, float]:
    """Seconds of some states to the disk and of the way back; notes its place, which is not given back."""
    start = time.perf_counter()
    copy = disk.store(storage)
    copy.wait()
    written = time.perf_counter()
    disk.bring(copy.place, storage).wait()
    end = time.perf_counter()
    places.append(copy.place)
    return written - start, end - written


def _beside(
    trial: Trial, begin: Callable[[int], Copy], count: int, seconds: float, alone_seconds: float
) -> tuple[float, float]:
    """Seconds of a transfer while steps run beside, and seconds of compute that each costs.

    Args:
        trial: the steps.
        begin: begins a transfer with some buffer.
        count: buffers, and so transfers under way.
        seconds: how long to try.
        alone_seconds: a transfer alone.
    """
    alone = Samples()
    stepping, whole, beginning = Samples(), Samples(), Samples()
    start = time.perf_counter()
    turn_seconds = max(seconds / 2 / TURNS, TURN_STEPS * trial.time())
    while alone.calls < TURN_STEPS or time.perf_counter() - start < seconds:
        end = time.perf_counter() + turn_seconds
        alone.add(trial.time())
        while time.perf_counter() < end:
            alone.add(trial.time())
        _turn_beside(trial, begin, count, turn_seconds, (stepping, whole, beginning))
    steps_each = whole.calls / beginning.calls
    begin_seconds, whole_seconds = beginning.typical(), whole.typical()
    lost_share = max(1 - alone.typical() / stepping.typical(), 0.0)
    loss = begin_seconds + steps_each * whole_seconds * lost_share
    was_idle = alone_seconds * count < whole_seconds  # as steps take too long for so few buffers
    return alone_seconds if was_idle else begin_seconds + steps_each * whole_seconds, loss


def _turn_beside(
    trial: Trial,
    begin: Callable[[int], Copy],
    count: int,
    seconds: float,
    samples: tuple[Samples, Samples, Samples],
) -> None:
    """Run steps for so long beside as many transfers as can be.

    Notes what each step took, also with what came before it, and what it took to begin each transfer.
    """
    stepping, whole, beginning = samples
    done = 0
    start = time.perf_counter()
    under_way = collections.deque(begin(number) for number in range(count))
    while (began := time.perf_counter()) - start < seconds or done < count:
        stepping.add(trial.time())
        whole.add(time.perf_counter() - began)
        for _ in range(count):
            if not under_way[0].ready:
                break
            began = time.perf_counter()
            under_way.popleft().wait()
            under_way.append(begin(done % count))
            beginning.add(time.perf_counter() - began)
            done += 1
    for transfer in under_way:
        transfer.wait()


def _link(source: str, target: str, state_bytes: int, seconds: float, loss_seconds: float) -> Link:
    seconds = max(seconds, 1e-9)
    rate = max(state_bytes, 1) / seconds
    return Link(source, target, 0.0, rate, rate, loss_seconds / seconds)
