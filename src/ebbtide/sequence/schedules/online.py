"""Schedules for chains whose length, or whose steps' cost, is not known before they have run.

With a slow tier: every so many steps a state goes there, and how many is asked anew each time, so that it can follow
what steps and transfers really take. Without one: states in memory give way to later ones. Revolve reverses each gap.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Generator, Iterator

from ebbtide.arguments import as_whole
from ebbtide.sequence.schedules.binomial import forward_steps
from ebbtide.sequence.schedules.multistage import check_multistage, inner_slots, reverse_parts, turn_steps
from ebbtide.sequence.schedules.records import (
    DISK,
    MEMORY,
    Advance,
    Drop,
    Load,
    Record,
    Reverse,
    Store,
    check_length,
    check_slots,
    take_whole,
)
from ebbtide.sequence.schedules.revolve import revolve

HasStep = Callable[[int], bool]
"""Says whether the chain has a step of that number. Asked once for each, in order, while the step before it waits."""


@dataclasses.dataclass(frozen=True, slots=True)
class OnlineInMemory:
    """A schedule for a chain of unknown length, without a slow tier.

    From Wang, Moin and Iaccarino 2009, SIAM J. Sci. Comput. 31(4).

    Each stored state has a level, and may be dropped for a new one once a later state has a higher level. Where none
    may be, the newest is passed on to the next step, one level higher. So no step is run more often than in Revolve.

    Attributes:
        states: slots in memory.

    Raises:
        SequenceError: if there is no slot.
    """

    states: int

    def __post_init__(self) -> None:
        take_whole(self, "states")
        check_slots(2, self.states)

    def records(self, more: HasStep) -> Iterator[Record]:
        """The records of a chain that has a step 0, and any further step that ``more`` says."""
        held: dict[int, None] = {}  # states stored, ascending
        # Of these and the working state: those that may not be dropped, with levels that never rise; and the others.
        lasting: list[tuple[int, float]] = [(0, math.inf)]
        dispensable: list[int] = []
        step = 0
        while more(step + 1):
            level = 0.0
            if len(held) < self.states or dispensable:
                if len(held) == self.states:
                    dropped = dispensable.pop()
                    del held[dropped]
                    yield Drop(dropped, MEMORY)
                yield Store(step, MEMORY)
                held[step] = None
            else:
                level = lasting.pop()[1] + 1
                while lasting[-1][1] < level:
                    dispensable.append(lasting.pop()[0])
            lasting.append((step + 1, level))
            yield Advance(step, step + 1)
            step += 1
        yield Reverse(step)
        while held:
            start, _ = held.popitem()
            yield Load(start, MEMORY)
            yield from revolve(start, step, self.states - len(held), held=True)
            yield Drop(start, MEMORY)
            step = start


@dataclasses.dataclass(frozen=True, slots=True)
class Online:
    """A schedule for a chain of unknown length or uneven steps, with a slow tier whose transfers run beside compute.

    Attributes:
        states: slots in memory, at least 2.
        interval: given a step whose state is about to be stored, how many steps later the next one will be, >= 1.
        tier: the slow tier.

    Raises:
        SequenceError: if there are fewer than 2 slots.
    """

    states: int
    interval: Callable[[int], int]
    tier: str = DISK

    def __post_init__(self) -> None:
        take_whole(self, "states")
        check_multistage(self.states, 1)

    def records(self, more: HasStep, n: int | None = None, newest: int = -1) -> Iterator[Record]:
        """The records of a chain that has a step 0, and any further step that ``more`` says.

        Args:
            more: asked for each next step, unless ``n`` is given.
            n: the number of steps, if it is known after all: the last of them then stay in memory.
            newest: with ``n``, up to this step all states go to the tier: a run that is resumed has them there.

        Raises:
            SequenceError: if ``n < 1``.
        """
        starts, kept = _Starts(), list[tuple[int, int]]()
        if n is not None:
            check_length(n)
            stop = yield from self._to_known_end(starts, kept, as_whole("n", n), newest)
        else:
            stop = yield from self._to_end(starts, more)
        longest = max([starts.longest_part(stop), *(end - start for start, end in kept)])
        inner = min(self.states - max(len(kept), 1), max(longest - 1, 1))
        moved = starts.pop_parts(stop)
        yield from reverse_parts(reversed(kept), moved, tier=self.tier, slots=inner, depth=self.states - inner)

    def _to_end(self, starts: _Starts, more: HasStep) -> Generator[Record, None, int]:
        """Run all steps and reverse the last. Returns that one's number."""
        step = following = 0
        while more(step + 1):
            if step == following:
                following += self._interval(step)
                yield Store(step, self.tier)
                starts.push(step)
            yield Advance(step, step + 1)
            step += 1
        yield Reverse(step)
        return step

    def _to_known_end(
        self, starts: _Starts, kept: list[tuple[int, int]], n: int, newest: int
    ) -> Generator[Record, None, int]:
        """Run ``n`` steps and reverse the last of them, as `Multistage` does where intervals are equal.

        Parts whose first state stays in memory go to ``kept``. Returns the step at which the first of them begins.
        """
        step = 0
        while True:
            interval = self._interval(step)
            inner = inner_slots(self.states, interval)
            depth, turn = self.states - inner, turn_steps(interval, forward_steps(interval, inner), inner)
            if n - step <= (turn + depth * interval if step > newest else interval):
                break
            yield Store(step, self.tier)
            starts.push(step)
            yield Advance(step, step + interval)
            step += interval
        stop = step
        while n - step > max(turn, interval) and len(kept) < depth:
            yield Store(step, MEMORY)
            yield Advance(step, step + interval)
            kept.append((step, step + interval))
            step += interval
            interval = self._interval(step)
        yield from revolve(step, n, inner)
        return stop

    def _interval(self, step: int) -> int:
        return max(as_whole("interval", self.interval(step)), 1)


class _Starts:
    """The states on the slow tier: evenly spaced ones together, so that the list stays short."""

    def __init__(self) -> None:
        self._runs: list[list[int]] = []  # last state, spacing, how many

    def push(self, step: int) -> None:
        if self._runs:
            last, spacing, count = run = self._runs[-1]
            if count == 1 or step - last == spacing:
                run[:] = [step, step - last, count + 1]
                return
        self._runs.append([step, 0, 1])

    def longest_part(self, stop: int) -> int:
        """Steps of the longest part, the last ending with ``stop``."""
        spacings = [spacing for _, spacing, _ in self._runs]
        gaps = [
            later - (later_count - 1) * spacing - earlier
            for (earlier, _, _), (later, spacing, later_count) in itertools.pairwise(self._runs)
        ]
        return max([*spacings, *gaps, *(stop - last for last, _, _ in self._runs[-1:])], default=0)

    def pop_parts(self, stop: int) -> Iterator[tuple[int, int]]:
        """Each state with the one after it, last first, the last with ``stop``; empty parts are left out."""
        while self._runs:
            last, spacing, count = self._runs.pop()
            for start in (last - number * spacing for number in range(count)):
                yield start, stop
                stop = start
