"""Memory and a disk whose transfers compute waits for: Disk-Revolve and Periodic-Disk-Revolve.

Aupy, Herrmann, Hovland and Robert 2016 (SIAM J. Sci. Comput. 38(3)); Aupy and Herrmann 2017 (Optim. Methods Softw.).

NOTE [Tables]
All are indexed by ``l``, in code ``length``: ``l`` steps forward and ``l + 1`` reversed. ``memory[l]`` is Revolve's
time; ``once[l]``, the "1D-Revolve" of the papers, is the time if the first state is on the disk and nothing else goes
there; ``disk[l]`` is the time with a disk of any size. Beside each, ``advance[l]`` steps are run before the next store,
0 for plain Revolve.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.errors import SequenceError
from ebbtide.sequence.schedules.binomial import forward_steps, forward_steps_table, reach
from ebbtide.sequence.schedules.records import (
    DISK,
    MEMORY,
    Advance,
    Drop,
    Load,
    Record,
    Schedule,
    Store,
    check_slots,
    check_times,
    take_whole,
)
from ebbtide.sequence.schedules.revolve import revolve

TABLE_STEPS = 20_000
"""Longest chain, or period, that tables are made for: quadratic time, about a second."""


@dataclasses.dataclass(frozen=True, slots=True)
class DiskCosts:
    """Times for which a schedule with a synchronous disk is made, all in the same unit, whichever that is.

    Attributes:
        forward: time of one step forward.
        reverse: time of one step reversed, with what it runs forward itself.
        write: time to write one state from memory to the disk.
        read: time to read one state back.
    """

    forward: float = 1.0
    reverse: float = 1.0
    write: float = 0.0
    read: float = 0.0

    def __post_init__(self) -> None:
        check_times(forward=self.forward, reverse=self.reverse, write=self.write, read=self.read)


def memory_times(longest: int, states: int, costs: DiskCosts) -> Floats:
    """``memory[0..longest]``."""
    reverses = costs.reverse * np.arange(1, longest + 2)
    return np.asarray(forward_steps_table(longest + 1, states)[1:] * costs.forward + reverses)


def once_times(longest: int, states: int, costs: DiskCosts) -> tuple[Floats, Ints]:
    """``once[0..longest]`` and its distances. Time O(longest^2)."""
    memory = memory_times(longest, states, costs)
    once, advance = memory.copy(), np.zeros(longest + 1, dtype=np.int64)
    steps = costs.forward * np.arange(longest + 1)
    for length in range(1, longest + 1):
        # Advance j = 1..length; Revolve on the length - j steps to the right; read; the j - 1 steps to the left.
        times = steps[1 : length + 1] + memory[length - 1 :: -1][:length] + once[:length] + costs.read
        best = int(np.argmin(times))
        if times[best] < once[length]:
            once[length], advance[length] = times[best], best + 1
    return once, advance


def disk_times(longest: int, states: int, costs: DiskCosts, once: Floats) -> tuple[Floats, Ints]:
    """``disk[0..longest]`` and its distances. Time O(longest^2)."""
    disk = memory_times(longest, states, costs)
    advance = np.zeros(longest + 1, dtype=np.int64)
    steps = costs.forward * np.arange(longest + 1)
    for length in range(1, longest + 1):
        times = costs.write + steps[1 : length + 1] + disk[length - 1 :: -1][:length] + once[:length] + costs.read
        best = int(np.argmin(times))
        if times[best] < disk[length]:
            disk[length], advance[length] = times[best], best + 1
    return disk, advance


def reverse_from_disk(start: int, stop: int, states: int, tier: str, advance: Ints) -> Iterator[Record]:
    """Reverse ``stop - 1, ..., start`` by 1D-Revolve: state ``start`` is on ``tier`` and is the working state."""
    while (distance := int(advance[stop - start - 1])) > 0:
        yield Advance(start, start + distance)
        yield from revolve(start + distance, stop, states)
        yield Load(start, tier)
        stop = start + distance
    yield from revolve(start, stop, states)


def steps_from_disk(length: int, states: int, advance: Ints) -> int:
    """Forward steps of `reverse_from_disk` for ``length`` steps."""
    steps = 0
    while (distance := int(advance[length - 1])) > 0:
        steps += distance + forward_steps(length - distance, states)
        length = distance
    return steps + forward_steps(length, states)


@dataclasses.dataclass(frozen=True)
class DiskRevolve(Schedule):
    """The least time with ``states`` slots in memory and any number on a synchronous disk.

    Aupy, Herrmann, Hovland and Robert 2016 (SIAM J. Sci. Comput. 38(3)).

    Attributes:
        n: number of steps, at most `TABLE_STEPS`.
        states: slots in memory.
        costs: times for which the schedule is optimal.
        tier: the disk.

    Raises:
        SequenceError: if there are too few slots, or too many steps for tables.
    """

    n: int
    states: int
    costs: DiskCosts
    tier: str = DISK

    def __post_init__(self) -> None:
        take_whole(self, "n", "states")
        check_slots(self.n, self.states)
        if self.n > TABLE_STEPS:
            raise SequenceError(
                f"Disk-Revolve needs a table quadratic in its {self.n} steps, and {TABLE_STEPS} is the most; "
                "take PeriodicDiskRevolve or Multistage"
            )
        once, once_advance = once_times(self.n - 1, self.states, self.costs)
        disk, disk_advance = disk_times(self.n - 1, self.states, self.costs, once)
        object.__setattr__(self, "seconds", float(disk[-1]))
        object.__setattr__(self, "_once_advance", once_advance)
        object.__setattr__(self, "_disk_advance", disk_advance)

    seconds: float = dataclasses.field(init=False, compare=False)
    """Time of all steps and transfers, in the unit of the costs."""
    _once_advance: Ints = dataclasses.field(init=False, compare=False, repr=False)
    _disk_advance: Ints = dataclasses.field(init=False, compare=False, repr=False)

    @property
    def stored(self) -> list[int]:
        """States that go to the disk, ascending."""
        states = [0]
        while (distance := int(self._disk_advance[self.n - 1 - states[-1]])) > 0:
            states.append(states[-1] + distance)
        return states[:-1]

    @property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`."""
        return {MEMORY: min(self.states, self.n - 1), self.tier: len(self.stored)}

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        stored = self.stored
        start = 0
        for state in stored:
            yield Store(state, self.tier)
            distance = int(self._disk_advance[self.n - 1 - state])
            yield Advance(state, state + distance)
            start = state + distance
        yield from revolve(start, self.n, self.states)
        for state in reversed(stored):
            yield Load(state, self.tier)
            yield from reverse_from_disk(state, start, self.states, self.tier, self._once_advance)
            yield Drop(state, self.tier)
            start = state


@dataclasses.dataclass(frozen=True)
class PeriodicDiskRevolve(Schedule):
    """Every ``period``-th state on a synchronous disk, 1D-Revolve between them: near optimal for chains of any length.

    Aupy and Herrmann 2017 (Optim. Methods Softw.).

    The last part, which may be shorter, goes by Revolve in memory where that takes less than to store its first state.

    Attributes:
        n: number of steps.
        states: slots in memory.
        costs: times for which the period and the parts in between are optimal.
        period: steps between two states on the disk; the best one if not given.
        tier: the disk.

    Raises:
        SequenceError: if there are too few slots, or the period is below 1 or too long for tables.
    """

    n: int
    states: int
    costs: DiskCosts
    period: int = 0
    tier: str = DISK

    def __post_init__(self) -> None:
        take_whole(self, "n", "states", "period")
        check_slots(self.n, self.states)
        period = min(self.period or best_period(self.states, self.costs, self.n), self.n)
        if not 1 <= period <= TABLE_STEPS:
            raise SequenceError(f"a period of {period} steps cannot be planned for: it may be 1 to {TABLE_STEPS}")
        object.__setattr__(self, "period", period)
        once, advance = once_times(period - 1, self.states, self.costs)
        object.__setattr__(self, "_advance", advance)
        costs, rest = self.costs, self.n - self.full_parts * period
        part = costs.write + period * costs.forward + costs.read + once[-1]
        in_memory, stored = memory_times(rest - 1, self.states, costs)[-1], costs.write + once[rest - 1]
        object.__setattr__(self, "parts", self.full_parts + int(stored < in_memory))
        object.__setattr__(self, "seconds", float(self.full_parts * part + min(in_memory, stored)))

    seconds: float = dataclasses.field(init=False, compare=False)
    """Time of all steps and transfers, in the unit of the costs."""
    parts: int = dataclasses.field(init=False, compare=False, repr=False)
    """How many states go to the disk."""
    _advance: Ints = dataclasses.field(init=False, compare=False, repr=False)

    @property
    def full_parts(self) -> int:
        """How many parts are ``period`` steps long and have others behind them."""
        return (self.n - 1) // self.period

    @property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`."""
        return {MEMORY: min(self.states, self.period - 1, self.n - 1), self.tier: self.parts}

    @property
    def forward_steps(self) -> int:
        """See `Schedule.forward_steps`. Time O(period)."""
        part = self.period + steps_from_disk(self.period, self.states, self._advance)
        rest = self.n - self.full_parts * self.period
        stored = self.parts > self.full_parts
        last = steps_from_disk(rest, self.states, self._advance) if stored else forward_steps(rest, self.states)
        return self.full_parts * part + last

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        for part in range(self.full_parts):
            yield Store(part * self.period, self.tier)
            yield Advance(part * self.period, (part + 1) * self.period)
        start, stop = self.full_parts * self.period, self.n
        if self.parts > self.full_parts:
            yield Store(start, self.tier)
            yield from reverse_from_disk(start, stop, self.states, self.tier, self._advance)
            yield Drop(start, self.tier)
        else:
            yield from revolve(start, stop, self.states)
        while start:
            start, stop = start - self.period, start
            yield Load(start, self.tier)
            yield from reverse_from_disk(start, stop, self.states, self.tier, self._advance)
            yield Drop(start, self.tier)


def longest_first(states: int, costs: DiskCosts) -> int:
    """The longest period that `best_period` looks at first. It takes time by the square of this."""
    t = 0
    while reach(states + 1, t) * costs.forward <= costs.write + costs.read and reach(states, t) < TABLE_STEPS:
        t += 1
    return min(4 * reach(states, t), TABLE_STEPS)


@functools.lru_cache(maxsize=64)
def best_period(states: int, costs: DiskCosts, n: int) -> int:
    """The period ``m`` with the least ``(write + read + once[m - 1]) / m``, transfers of a part per step of it.

    If a part is read only once, that is ``C(states + t, t)`` with the smallest ``t`` for which ``C(states + 1 + t, t)``
    is more than the steps that a write and a read take. Reading again can only help longer parts: they are searched,
    ever longer ones until the best is far from the longest, or is that of a chain of ``n`` steps in any case.
    """
    if states == 0:
        return 1  # of a chain of one step, which stores nothing
    transfers, longest = costs.write + costs.read, longest_first(states, costs)
    while True:
        per_step = (transfers + once_times(longest - 1, states, costs)[0]) / np.arange(1, longest + 1)
        # Of equally good periods the longest: it needs the least disk.
        best = int(np.flatnonzero(per_step <= per_step.min() * (1 + 1e-12))[-1]) + 1
        if 2 * best <= longest or best >= n or longest == TABLE_STEPS:
            return best
        longest = min(2 * longest, TABLE_STEPS)
