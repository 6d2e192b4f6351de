"""H-Revolve: the least time with any number of tiers whose transfers compute waits for.

Herrmann and Pallez 2020 (ACM TOMS 46(2)).

NOTE [Tables]
For level ``k``, ``m`` free slots in it and ``l`` steps forward (``l + 1`` reversed; in code ``length``),
``stored[k][m, l]`` is the least time if the first state is in level ``k`` already, and ``least[k][m, l]`` if it is not:

    stored[k][m, l] = min(least[k-1][all, l], min_j j f + least[k][m-1, l-j] + read_k + stored[k][m, j-1]),  1 <= j <= l
    least[k][m, l] = min(least[k-1][all, l], write_k + stored[k][m, l]),  least[k][0, l] = least[k-1][all, l]

Below level 0 there is nothing: one step is reversed at once, and more than one not at all. A level of any number of
slots, or of as many as there are states, has one row, which refers to itself. The papers let ``j`` end at ``l - 1``,
with a closed form for one slot; ``j = l`` covers that case, and is needed where reading from memory costs something.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterator, Mapping

import numpy as np
import numpy.typing as npt

from ebbtide.arguments import as_whole
from ebbtide.arrays import Floats, Mask
from ebbtide.errors import SequenceError
from ebbtide.sequence.schedules.records import (
    Advance,
    Drop,
    Load,
    Record,
    Reverse,
    Schedule,
    Store,
    check_length,
    check_times,
    take_whole,
)

TABLE_WORK = 2_000_000_000
"""Most terms of all minima, ``slots x n^2 / 2``: a few seconds."""

_Advances = npt.NDArray[np.int32]
"""Steps to advance by; whole numbers of this size halve the tables of them."""


@dataclasses.dataclass(frozen=True, slots=True)
class Level:
    """A tier whose transfers compute waits for.

    Attributes:
        name: the tier.
        slots: states that it can hold, or None for any number.
        write: time to write one state to it, in the unit of `HRevolve.forward`.
        read: time to read one state from it, in the same unit.
    """

    name: str
    slots: int | None
    write: float = 0.0
    read: float = 0.0

    def __post_init__(self) -> None:
        if self.slots is not None:
            object.__setattr__(self, "slots", as_whole("slots", self.slots, 0))
        check_times(write=self.write, read=self.read)


@dataclasses.dataclass(frozen=True)
class _Table:
    """``least`` of one level by (slots, l), whether that stores, and how far ``stored`` advances (0: a level down)."""

    least: Floats
    stores: Mask
    advance: _Advances


@dataclasses.dataclass(frozen=True)
class HRevolve(Schedule):
    """The least time with tiers of given slots whose transfers compute waits for.

    Herrmann and Pallez 2020, "H-Revolve: a framework for adjoint computation on synchronous hierarchical platforms"
    (ACM TOMS 46(2)).

    Attributes:
        n: number of steps.
        levels: the tiers, fastest first.
        forward: time of one step forward, in any unit; all others are in the same one.
        reverse: time of one step reversed, with what it runs forward itself.

    Raises:
        SequenceError: if ``n < 1``, there is no level, or no slot for more than one step, or the tables would be too
            large.
    """

    n: int
    levels: tuple[Level, ...]
    forward: float = 1.0
    reverse: float = 1.0

    def __post_init__(self) -> None:
        take_whole(self, "n")
        check_length(self.n)
        check_times(forward=self.forward, reverse=self.reverse)
        if not self.levels:
            raise SequenceError("H-Revolve needs a level at least: Level(MEMORY, slots), say")
        if self.n > 1 and all(level.slots == 0 for level in self.levels):
            raise SequenceError(f"a chain of {self.n} steps needs at least 1 slot besides the working state")
        if (work := table_work(self.n, self.levels)) > TABLE_WORK:
            raise SequenceError(
                f"H-Revolve for {self.n} steps would take {work:.1e} comparisons, and {TABLE_WORK:.0e} is the most; "
                "take Multistage or PeriodicDiskRevolve, or fewer slots"
            )
        object.__setattr__(self, "_tables", _tables(self.n, self.levels, self.forward, self.reverse))
        object.__setattr__(self, "seconds", float(self._tables[-1].least[-1, -1]))

    seconds: float = dataclasses.field(init=False, compare=False)
    """Time of all steps and transfers, in the unit of the costs."""
    _tables: tuple[_Table, ...] = dataclasses.field(init=False, compare=False, repr=False)

    @functools.cached_property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`. Counted."""
        held = {level.name: 0 for level in self.levels}
        most = dict(held)
        for record in self.records():
            if isinstance(record, (Store, Drop)):
                held[record.tier] += 1 if isinstance(record, Store) else -1
                most[record.tier] = max(most[record.tier], held[record.tier])
        return most

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        top = len(self.levels) - 1
        # What is still to be done, the next one last. A part is (level, start, length, slots, first state is stored).
        todo: list[Record | tuple[int, int, int, int, bool]] = [(top, 0, self.n - 1, self._row(top), False)]
        while todo:
            part = todo.pop()
            if not isinstance(part, tuple):
                yield part
                continue
            level, start, length, row, stored = part
            table, name = self._tables[level], self.levels[level].name
            if length == 0:
                yield Reverse(start)
            elif not stored and table.stores[row, length]:
                yield Store(start, name)
                todo += [Drop(start, name), (level, start, length, row, True)]
            elif stored and (distance := int(table.advance[row, length])):
                yield Advance(start, start + distance)
                right = max(row - 1, 0)  # one row alone refers to itself
                todo += [
                    (level, start, distance - 1, row, True),
                    Load(start, name),
                    (level, start + distance, length - distance, right, False),
                ]
            else:
                todo.append((level - 1, start, length, self._row(level - 1), False))

    def _row(self, level: int) -> int:
        """The row of a level of which all slots are free."""
        return len(self._tables[level].least) - 1


def table_work(n: int, levels: tuple[Level, ...]) -> float:
    """Terms of all minima that a schedule would be made from."""
    limits = (_limit(level, n) for level in levels)
    return sum(1 if limit is None else limit for limit in limits) * n * n / 2


def _limit(level: Level, n: int) -> int | None:
    """The level's slots; None if it takes the states of all ``n`` steps but the last: more would be as good."""
    return None if level.slots is None or level.slots >= n - 1 else level.slots


def _tables(n: int, levels: tuple[Level, ...], forward: float, reverse: float) -> tuple[_Table, ...]:
    below = np.full(n, np.inf)
    below[0] = reverse
    tables = []
    for level in levels:
        tables.append(_table(level, below, forward))
        below = tables[-1].least[-1]
    return tuple(tables)


def _table(level: Level, below: Floats, forward: float) -> _Table:
    """One level on top of those whose least times are ``below``. Time O(slots n^2), a row of minima at a time."""
    n = len(below)
    slots = _limit(level, n)
    rows = 1 if slots is None else slots + 1
    first = 0 if slots is None else 1  # row 0 of a limited level has no slot
    least = np.tile(below, (rows, 1))
    stored = np.tile(below, (rows, 1))
    stores = np.zeros((rows, n), dtype=np.bool_)
    advance = np.zeros((rows, n), dtype=np.int32)
    # least[m - 1, length - j] for j = 1..length is read backwards: kept mirrored, the slice is contiguous.
    mirrored = np.ascontiguousarray(least[:, ::-1])
    steps = forward * np.arange(n)
    index = np.arange(rows - first)
    for length in range(1, n) if rows > first else ():
        right = mirrored[: rows - first, n - length :]
        times = right + stored[first:, :length]
        times += steps[1 : length + 1] + level.read
        best = times.argmin(axis=1)
        time = times[index, best]
        better = time < below[length]
        stored[first:, length] = np.where(better, time, below[length])
        advance[first:, length] = np.where(better, best + 1, 0)
        with_store = level.write + stored[first:, length]
        stores[first:, length] = with_store < below[length]
        least[first:, length] = np.minimum(with_store, below[length])
        mirrored[:, n - 1 - length] = least[:, length]
    return _Table(least, stores, advance)
