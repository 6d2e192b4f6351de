"""What steps and copies of states take, measured before a chain is run.

NOTE [Typical times]
A core that shares its execution units or caches with another's work is up to twice as slow while that lasts, for some
milliseconds or seconds: a chain meets both. So what it will take is told by a mean over as long as measuring may last,
not by a median, which is either one or the other. Calls that are a little slower than most belong to it: without the
slowest twentieth it was 3 % less than chains then took. Only those that met another process, or compiled something, are
left out.
"""

from __future__ import annotations

import dataclasses
import statistics
import time
from collections.abc import Callable
from typing import Any

from ebbtide.sequence.blocks import Block, Blocks

TRIALS = 5
"""A step is timed this often before a chain is run, or more often where that is asked for."""
TRIAL_SECONDS = 0.5
"""Timing long steps ends after this many seconds, or those asked for, once there were two calls."""
WARM_SECONDS = 2e-3
"""Where a disk may pay, steps are timed for at least this many seconds."""
WARM_SHARE = 0.25
"""The share of timed calls that is left out at the beginning."""
MANY_CALLS = 20
"""From this many calls on the mean of times is taken, and of fewer the median."""
OUTLYING = 5.0
"""Calls that take more than this many times the median do not count for the mean."""
MOST_SAMPLES = 256
"""When there are this many means of calls, each two neighbours are made one, so that a long trial keeps few."""
FEW_BLOCKS = 16
"""States in up to this many blocks are likely to be in the processor's caches still when they are read."""
MANY_BLOCKS_BYTES = 64 << 20
"""Copies into many blocks are timed in blocks of at most this many bytes together."""


@dataclasses.dataclass(frozen=True, slots=True)
class Trial:
    """A chain's steps, to be tried out without leaving a trace.

    Attributes:
        prepare: gives a state 0 that a step may alter.
        step: runs step 0 forward; gives state 1.
        pack: copies a state into a block.
        blocks: the blocks that the chain will be run with, all of them free.
    """

    prepare: Callable[[], Any]
    step: Callable[[Any], Any]
    pack: Callable[[Any, Block], object]
    blocks: Blocks

    @property
    def state_bytes(self) -> int:
        """Bytes of one state."""
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
        seconds: time of a copy into a block, and by how much a step that reads it there takes longer.
        first_seconds: by how much a copy into a block that was not in use before takes longer.
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
        means = self._means[int(len(self._means) * warm_share) :]
        median = statistics.median(means)
        if len(means) < MANY_CALLS:
            return median
        return statistics.fmean(mean for mean in means if mean <= OUTLYING * median)


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
