"""Going on from the states that a run has left on a disk, wherever they are."""

from __future__ import annotations

import collections
import dataclasses
import itertools
from collections.abc import Iterable, Iterator, Mapping

from ebbtide.arrays import Floats, Ints
from ebbtide.sequence.schedules.disk_revolve import DiskCosts, once_times, reverse_from_disk, steps_from_disk
from ebbtide.sequence.schedules.records import DISK, MEMORY, Advance, Drop, Load, Record, Schedule, Store


@dataclasses.dataclass(frozen=True)
class Continued(Schedule):
    """States at given steps on a synchronous disk, 1D-Revolve between them; after the last of them, another schedule.

    Attributes:
        starts: the steps of these states, ascending; the first is 0.
        tail: schedule for the steps from the last of ``starts`` on, which is its step 0.
        states: slots in memory.
        costs: times for which the parts between two states are optimal.
        tier: the disk.
        n: number of steps.
    """

    starts: tuple[int, ...]
    tail: Schedule
    states: int
    costs: DiskCosts
    tier: str = DISK
    n: int = dataclasses.field(init=False)
    _once: Floats = dataclasses.field(init=False, compare=False, repr=False)
    _advance: Ints = dataclasses.field(init=False, compare=False, repr=False)

    def __post_init__(self) -> None:
        once, advance = once_times(max(self._parts, default=1) - 1, self.states, self.costs)
        for name, value in (("n", self.starts[-1] + self.tail.n), ("_once", once), ("_advance", advance)):
            object.__setattr__(self, name, value)

    @property
    def _parts(self) -> collections.Counter[int]:
        """How many parts there are of each length."""
        return collections.Counter(stop - start for start, stop in itertools.pairwise(self.starts))

    @property
    def _own(self) -> int:
        """How many of the states at ``starts`` the tail does not store: it does its first, if any, on the disk."""
        return len(self.starts) - (self.tail.slots.get(self.tier, 0) > 0)

    @property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`."""
        tail = self.tail.slots
        memory = max(tail.get(MEMORY, 0), min(self.states, max(self._parts, default=1) - 1))
        return {**tail, MEMORY: memory, self.tier: self._own + tail.get(self.tier, 0)}

    @property
    def forward_steps(self) -> int:
        """See `Schedule.forward_steps`."""
        parts = (count * steps_from_disk(steps, self.states, self._advance) for steps, count in self._parts.items())
        return self.starts[-1] + self.tail.forward_steps + sum(parts)

    def seconds(self, tail_seconds: float) -> float:
        """Time of all steps and transfers, of which the tail takes ``tail_seconds``, in the unit of the costs."""
        costs, parts = self.costs, self._parts
        swept = self.starts[-1] * costs.forward + self._own * costs.write
        back = sum(count * (costs.read + float(self._once[steps - 1])) for steps, count in parts.items())
        return tail_seconds + swept + back

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        for start, stop in itertools.pairwise(self.starts):
            yield Store(start, self.tier)
            yield Advance(start, stop)
        last = self.starts[-1]
        yield Store(last, self.tier)
        for record in self.tail.records():
            if not (isinstance(record, (Store, Drop)) and record.step == 0 and record.tier == self.tier):
                yield _later(record, last)
        yield Drop(last, self.tier)
        for stop, start in itertools.pairwise(reversed(self.starts)):
            yield Load(start, self.tier)
            yield from reverse_from_disk(start, stop, self.states, self.tier, self._advance)
            yield Drop(start, self.tier)


def resumed(records: Iterable[Record], there: Iterable[int], tier: str) -> Iterator[Record]:
    """``records`` of a chain of which some states are on ``tier`` already: what led to these is left out.

    Args:
        records: the records for the whole chain.
        there: the steps whose states are there, ascending.
        tier: the tier that has these states.
    """
    left = dict.fromkeys(there)
    newest = max(left, default=0)
    position = 0
    skipping = bool(left)
    for record in records:
        if isinstance(record, Store) and record.tier == tier and record.step in left:
            continue
        if skipping and isinstance(record, Advance):
            position = record.stop
            if position <= newest:
                continue
            skipping = False
            yield Load(newest, tier)
            yield Advance(newest, position)
            continue
        if skipping:
            skipping = False
            start = max((step for step in left if step <= position), default=0)
            if start in left:
                yield Load(start, tier)
            if start < position:
                yield Advance(start, position)
        if isinstance(record, Drop) and record.tier == tier:
            left.pop(record.step, None)
        yield record


def _later(record: Record, steps: int) -> Record:
    """``record`` of a chain that begins so many steps later."""
    if isinstance(record, Advance):
        return dataclasses.replace(record, start=record.start + steps, stop=record.stop + steps)
    return dataclasses.replace(record, step=record.step + steps)
