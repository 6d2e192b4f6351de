"""Slots that hold either a state or a step's tape (Maddison 2024, J. Comput. Sci. 82:102405)."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ebbtide.errors import SequenceError
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

TABLE_WORK = 1_000_000_000
"""Most terms of all minima, ``slots x n^2 / 2``: a few seconds."""


@dataclasses.dataclass(frozen=True)
class Mixed(Schedule):
    """Fewest forward steps, those within reverse steps included, if a tape takes as much memory as a state.

    Maddison 2024 (J. Comput. Sci. 82:102405).

    Attributes:
        n: number of steps.
        states: slots in memory, for states and tapes.

    Raises:
        SequenceError: if there are too few slots, or the table would be too large.
    """

    n: int
    states: int

    def __post_init__(self) -> None:
        take_whole(self, "n", "states")
        check_slots(self.n, self.states)
        states = min(self.states, self.n - 1)
        if states * self.n**2 / 2 > TABLE_WORK:
            raise SequenceError(f"a mixed schedule of {self.n} steps and {states} slots is too large; take Revolve")
        total, advance = _table(self.n, states)
        object.__setattr__(self, "total_steps", int(total[states, self.n]))
        object.__setattr__(self, "_advance", advance)

    total_steps: int = dataclasses.field(init=False, compare=False)
    """Steps run forward, those that reverse steps run themselves included."""
    _advance: npt.NDArray[np.int32] = dataclasses.field(init=False, compare=False, repr=False)

    @property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`."""
        return {MEMORY: min(self.states, self.n - 1)}

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        # What is still to be done, the next one last. A part is (begin, end, free slots, its first state is stored);
        # that slot is among the free ones, as it may be used for the step's tape instead.
        first = (0, self.n, min(self.states, self.n - 1), False)
        todo: list[Record | tuple[int, int, int, bool]] = [first]
        while todo:
            part = todo.pop()
            if not isinstance(part, tuple):
                yield part
                continue
            begin, end, free, stored = part
            distance = 0 if end - begin == 1 else int(self._advance[free, end - begin])
            if stored and distance == 0:
                yield Drop(begin, MEMORY)
            if end - begin == 1:
                yield Reverse(begin)
            elif distance == 0:
                yield Advance(begin, begin + 1, tape=True)
                yield Store(begin, MEMORY, tape=True)
                todo += [
                    Drop(begin, MEMORY, tape=True),
                    Reverse(begin),
                    Load(begin, MEMORY, tape=True),
                    (begin + 1, end, free - 1, False),
                ]
            else:
                if not stored:
                    yield Store(begin, MEMORY)
                yield Advance(begin, begin + distance)
                middle = begin + distance
                todo += [(begin, middle, free, True), Load(begin, MEMORY), (middle, end, free - 1, False)]


def _table(n: int, states: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int32]]:
    """Fewest steps by (slots, n), and how far to advance from a stored state: 0 where the tape is stored instead.

    ``total[s, n] = min(1 + total[s - 1, n - 1], min_i i + total[s, i] + total[s - 1, n - i])``. Time O(states n^2).
    """
    total = np.full((states + 1, n + 1), np.iinfo(np.int64).max // 4, dtype=np.int64)
    advance = np.zeros((states + 1, n + 1), dtype=np.int32)
    total[:, 1] = 1
    distances = np.arange(n + 1)
    for s in range(1, states + 1):
        for length in range(2, n + 1):
            total[s, length] = 1 + total[s - 1, length - 1]
            if length <= s + 1:
                continue  # every tape is stored: no step is run twice
            times = distances[1:length] + total[s, 1:length] + total[s - 1, length - 1 : 0 : -1]
            best = int(np.argmin(times))
            if times[best] < total[s, length]:
                total[s, length], advance[s, length] = times[best], best + 1
    return total, advance
