"""Revolve: the fewest forward steps that a number of slots allows."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from ebbtide.sequence.schedules import binomial
from ebbtide.sequence.schedules.records import (
    MEMORY,
    Advance,
    Drop,
    Load,
    Record,
    Reverse,
    Schedule,
    Store,
    check_slots,
    take_whole,
)


@dataclasses.dataclass(frozen=True, slots=True)
class Revolve(Schedule):
    """Binomial checkpointing: the fewest forward steps for equal steps, whatever a reverse step costs.

    Griewank and Walther 2000 (ACM TOMS 26:19-45).

    Attributes:
        n: number of steps.
        states: slots in memory.

    Raises:
        SequenceError: if ``n < 1``, or there is no slot for a chain of more than one step.
    """

    n: int
    states: int

    def __post_init__(self) -> None:
        take_whole(self, "n", "states")
        check_slots(self.n, self.states)

    @property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`."""
        return {MEMORY: min(self.states, self.n - 1)}

    @property
    def forward_steps(self) -> int:
        """See `Schedule.forward_steps`. Time O(log n)."""
        return binomial.forward_steps(self.n, self.states)

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        return revolve(0, self.n, self.states)


def revolve(start: int, stop: int, slots: int, *, held: bool = False) -> Iterator[Record]:
    """Reverse steps ``stop - 1, ..., start`` with ``slots`` slots in memory; the working state is ``start``.

    Args:
        start, stop: the steps.
        slots: slots that may be used, the one of state ``start`` included.
        held: whether state ``start`` is in memory already. Then it is left there.
    """
    # Parts still to be reversed, the next one last: begin, end, slots, whether its first state is stored. A part
    # shrinks in place each time its right side is done, so there are never more parts than slots.
    parts = [(start, stop, slots, held)]
    fresh = True
    while parts:
        begin, end, free, stored = parts.pop()
        if not fresh:
            yield Load(begin, MEMORY)
        if end - begin == 1:
            yield Reverse(begin)
            if stored and not (held and begin == start):
                yield Drop(begin, MEMORY)
            fresh = False
            continue
        if not stored:
            yield Store(begin, MEMORY)
        middle = begin + binomial.split(end - begin, free)
        yield Advance(begin, middle)
        parts.append((begin, middle, free, True))
        parts.append((middle, end, free - 1, False))
        fresh = True
