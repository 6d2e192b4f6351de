"""What steps and transfers take, measured: before a chain is run, and while it runs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import statistics
import time
from collections.abc import Callable
from typing import Any

from ebbtide.machine import Link
from ebbtide.run.tiers.memory import CONGRUENCE_BYTES, take_memory
from ebbtide.sequence.choose import SlowMemory
from ebbtide.sequence.disk import Copy, StateDisk, StatePlace
from ebbtide.sequence.store import Block

TRIALS = 5
TRIAL_SECONDS = 0.5
"""Calls of a step that are timed before a chain is run: so many, or for so long, but more than the first."""
COPY_BLOCKS = 16
"""Copies of a state are timed into so many blocks at most."""
WARM_SECONDS = 2e-3
"""Short steps are timed for so long."""
TRANSFERS = 3
BESIDE_SECONDS = 0.1
"""Transfers in one direction are timed beside steps for so long at most."""
UNDER_WAY = 8
"""So many transfers at most are under way then: enough to keep a link busy beside a step."""
TRIAL_PLACES = 256
"""So many places in the file are written at most, but then one after another, as in a run: it grows meanwhile."""
STEADY = 1.5
"""The interval is left as planned while steps take up to this factor more or less than they did when it was."""
RECENT = 9
"""The median of so many of the last sweeps from one stored state to the next is what a step takes."""
LATE_INTERVALS = 16
LATE_SHARE = 0.1
"""If compute has waited for more than this share of so many intervals, the interval becomes longer."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """How to try out a chain without leaving a trace.

    Attributes:
        prepare: gives a state 0 that a step may alter.
        step: runs step 0 forward; gives state 1.
        pack: copies a state into a block.
        state_bytes, item_bytes: of a state, and of a number in it.
        slots: states that fit in memory beside the working state.
    """

    prepare: Callable[[], Any]
    step: Callable[[Any], Any]
    pack: Callable[[Any, Block], None]
    state_bytes: int
    item_bytes: int
    slots: int

    def time(self) -> float:
        """Seconds of one step."""
        state = self.prepare()
        start = time.perf_counter()
        self.step(state)
        return time.perf_counter() - start

    def sample(self, alignment_bytes: int) -> Block:
        """State 1 as it is stored, in whole blocks."""
        whole = -(-self.state_bytes // alignment_bytes) * alignment_bytes
        block = Block(take_memory(whole, 0, alignment_bytes))
        self.pack(self.step(self.prepare()), block)
        return block


def time_first_steps(trial: Trial) -> float:
    """Median seconds of a step, from a few calls: enough for a chain that may be short."""
    return _median_seconds(trial.time, 0.0)


def time_step(trial: Trial) -> float:
    """Median seconds of a step, once all that it touches is warm."""
    return _median_seconds(trial.time, WARM_SECONDS)


def time_copy(trial: Trial) -> float:
    """Median seconds to copy a state into a block; every schedule does that about once for each step.

    Into one block after another, as in a run: one that was just used would be in the processor's caches still.
    """
    state = trial.prepare()
    count = min(trial.slots, COPY_BLOCKS)
    blocks = [Block(take_memory(trial.state_bytes, 0, CONGRUENCE_BYTES)) for _ in range(count)]
    for block in blocks:  # the first time memory is faulted in
        trial.pack(state, block)
    following = itertools.cycle(blocks)

    def time_one() -> float:
        block = next(following)
        start = time.perf_counter()
        trial.pack(state, block)
        return time.perf_counter() - start

    return _median_seconds(time_one, 0.0)


def _median_seconds(call: Callable[[], float], least_seconds: float) -> float:
    """Of `TRIALS` calls, or as many as it takes for them to last so long; the first of these do not count."""
    seconds: list[float] = []
    start = time.perf_counter()
    while (taken := time.perf_counter() - start) < TRIAL_SECONDS or len(seconds) < 2:
        if len(seconds) >= TRIALS and taken >= least_seconds:
            break
        seconds.append(call())
    return statistics.median(seconds[len(seconds) // 4 :])


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
    blocks = [trial.sample(disk.congruence_bytes)]
    state = trial.prepare()
    places: collections.deque[StatePlace] = collections.deque()
    ways = [_time_trip(disk, blocks[0], places) for _ in range(TRANSFERS)]
    out, back = (statistics.median(way) for way in zip(*ways, strict=True))
    out_loss = back_loss = 0.0
    seconds = min(seconds / 2, BESIDE_SECONDS)
    if step_seconds < seconds / 4 and trial.slots >= 2:
        room = (
            TRIAL_PLACES if capacity_bytes is None else min(TRIAL_PLACES, capacity_bytes // blocks[0].storage.nbytes())
        )
        count = min(UNDER_WAY, trial.slots, 2 + int(step_seconds / max(min(out, back), 1e-9)))
        blocks += [trial.sample(disk.congruence_bytes) for _ in range(count - 1)]

        def write(number: int) -> Copy:
            if len(places) >= max(room, count + 1):
                disk.forget(places.popleft())
            trial.pack(state, blocks[number])
            copy = disk.store(blocks[number].storage)
            places.append(copy.place)
            return copy

        out, out_loss = _beside(trial, write, count, step_seconds, seconds, out)
        out_loss = max(out_loss - copy_seconds, 0.0)
        following = itertools.cycle(places)
        back, back_loss = _beside(
            trial,
            lambda number: disk.bring(next(following), blocks[number].storage),
            count,
            step_seconds,
            seconds,
            back,
        )
    for place in reversed(places):
        disk.forget(place)
    return SlowMemory(
        disk.name,
        _link("memory", disk.name, trial.state_bytes, out, out_loss),
        _link(disk.name, "memory", trial.state_bytes, back, back_loss),
        capacity_bytes,
    )


def _time_trip(disk: StateDisk, block: Block, places: collections.deque[StatePlace]) -> tuple[float, float]:
    """Seconds of a state to the disk and of the way back; notes its place, which is not given back."""
    start = time.perf_counter()
    copy = disk.store(block.storage)
    copy.wait()
    written = time.perf_counter()
    disk.bring(copy.place, block.storage).wait()
    end = time.perf_counter()
    places.append(copy.place)
    return written - start, end - written


def _beside(
    trial: Trial,
    begin: Callable[[int], Copy],
    count: int,
    step_seconds: float,
    seconds: float,
    alone_seconds: float,
) -> tuple[float, float]:
    """Seconds of a transfer while steps run beside, and seconds of compute that each costs.

    From medians: what other processes take now and then is no matter of the disk.

    Args:
        trial: the steps.
        begin: begins a transfer with some buffer.
        count: buffers, and so transfers under way.
        step_seconds: a step alone.
        seconds: how long to try.
        alone_seconds: a transfer alone.
    """
    whole, stepping, beginning = [], [], []
    done = 0
    start = time.perf_counter()
    under_way = collections.deque(begin(number) for number in range(count))
    while (began := time.perf_counter()) - start < seconds or done < count:
        stepping.append(trial.time())
        whole.append(time.perf_counter() - began)
        for _ in range(count):
            if not under_way[0].ready:
                break
            began = time.perf_counter()
            under_way.popleft().wait()
            under_way.append(begin(done % count))
            beginning.append(time.perf_counter() - began)
            done += 1
    for transfer in under_way:
        transfer.wait()
    steps_each = len(whole) / done
    begin_seconds = statistics.median(beginning)
    step_loss = max(statistics.median(stepping) - step_seconds, 0.0)
    loss = begin_seconds + steps_each * step_loss
    was_idle = alone_seconds * count < statistics.median(whole)  # as steps take too long for so few buffers
    return alone_seconds if was_idle else begin_seconds + steps_each * statistics.median(whole), loss


def _link(source: str, target: str, state_bytes: int, seconds: float, loss_seconds: float) -> Link:
    seconds = max(seconds, 1e-9)
    rate = max(state_bytes, 1) / seconds
    return Link(source, target, 0.0, rate, rate, loss_seconds / seconds)


class Pace:
    """Re-chooses the interval of a multistage schedule as steps or the disk become slower or quicker than planned.

    An interval is meant to last as long as a transfer, or some multiple of it: so its seconds are kept, not its steps.
    Where compute waits for the disk more than planned, the disk has become slower, and the interval longer.

    Args:
        interval: as planned.
        step_seconds: for which it was.
        least: the shortest interval for which the slow tier has room.
        late_seconds: for each interval, that compute is expected to wait.
    """

    def __init__(self, interval: int, step_seconds: float, least: int = 1, late_seconds: float = 0.0) -> None:
        self._planned = interval
        self._planned_seconds = step_seconds
        self._least = least
        self._late_seconds = late_seconds
        self._stretch = 1.0
        self._recent: collections.deque[float] = collections.deque(maxlen=RECENT)
        self._waited = 0.0
        self._intervals = 0

    def steps_took(self, steps: int, seconds: float) -> None:
        """Note what steps of the first sweep took."""
        self._recent.append(seconds / steps)

    def was_late(self, seconds: float) -> None:
        """Note that compute has waited for a copy out."""
        self._waited += seconds

    def interval(self, step: int) -> int:  # noqa: ARG002
        """Steps from a state that is about to be stored to the next."""
        step_seconds = max(statistics.median(self._recent) if self._recent else self._planned_seconds, 1e-9)
        ratio = self._planned_seconds / step_seconds
        if 1 / STEADY < ratio < STEADY:
            ratio = 1.0
        self._follow_the_disk()
        return max(round(self._planned * ratio * self._stretch), self._least, 1)

    def _follow_the_disk(self) -> None:
        self._intervals += 1
        if self._intervals < LATE_INTERVALS:
            return
        late = self._waited / self._intervals - self._late_seconds
        share = late / max(self._planned * self._stretch * self._planned_seconds, 1e-9)
        if share > LATE_SHARE:
            self._stretch *= 1 + share
        self._waited, self._intervals = 0.0, 0
