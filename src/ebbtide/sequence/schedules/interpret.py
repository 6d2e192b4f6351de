"""The judge of schedules: follows the records on paper, checks every rule, and counts.

With costs it also tells how long it takes: transfers of an *asynchronous* tier run beside compute, one at a time in
each direction and in issue order; those of a synchronous one make compute wait.
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping

from ebbtide.errors import SequenceError
from ebbtide.sequence.schedules.records import MEMORY, Advance, Drop, Load, Record, Reverse, Store


@dataclasses.dataclass(frozen=True, slots=True)
class Costs:
    """What steps and transfers take, in seconds or any other unit.

    Attributes:
        forward, reverse: time of one step forward; of one step reversed, with what it runs forward itself.
        write, read: by tier, time of one state to it and from it; 0 for tiers not named.
        overlaps: tiers whose transfers run beside compute. A copy out holds a slot in memory until it is done;
            where there is none, compute waits for it.
    """

    forward: float = 1.0
    reverse: float = 1.0
    write: Mapping[str, float] = dataclasses.field(default_factory=dict)
    read: Mapping[str, float] = dataclasses.field(default_factory=dict)
    overlaps: frozenset[str] = frozenset()


@dataclasses.dataclass(slots=True)
class Count:
    """What a schedule does.

    Attributes:
        forward_steps: steps run by `Advance`.
        replayed_steps: steps that `Reverse` had to run itself, having no tape.
        reversed_steps: steps reversed.
        stores, loads: how many, by tier. A load into another tier counts for the one that it comes from.
        most: the most slots in use at once, by tier.
        seconds: time at which compute ends.
    """

    forward_steps: int = 0
    replayed_steps: int = 0
    reversed_steps: int = 0
    stores: dict[str, int] = dataclasses.field(default_factory=dict)
    loads: dict[str, int] = dataclasses.field(default_factory=dict)
    most: dict[str, int] = dataclasses.field(default_factory=dict)
    seconds: float = 0.0


def interpret(records: Iterable[Record], n: int, slots: Mapping[str, int | None], costs: Costs | None = None) -> Count:
    """Follow a schedule on paper, check every rule of the records, and count.

    Args:
        records: the schedule's, as `Schedule.records` gives them.
        n: number of steps of the chain.
        slots: the most slots that may be in use at once, by tier; None for any number.
        costs: what steps and transfers take; if not given, each step takes 1, and transfers nothing.

    Returns:
        How many steps and transfers there were, the most slots in use, and the time in the unit of ``costs``.

    Raises:
        SequenceError: at the first record that breaks a rule, or at the end if steps are left.
    """
    machine = _Machine(n, slots, costs or Costs())
    for number, record in enumerate(records):
        try:
            machine.follow(record)
        except SequenceError as fault:
            raise SequenceError(f"record {number}, {record}: {fault}") from None
    if machine.next_reverse >= 0:
        raise SequenceError(f"the schedule ends with step {machine.next_reverse} not yet reversed")
    left = [f"{step} in {tier}" for tier, held in machine.held.items() for step, _ in held]
    if left:
        raise SequenceError(f"the schedule ends with states {', '.join(left[:5])} not dropped")
    return machine.count


class _Machine:
    """The working state, the slots, and the clock."""

    def __init__(self, n: int, slots: Mapping[str, int | None], costs: Costs) -> None:
        self.count = Count()
        self.slots = slots
        self.costs = costs
        self.working: int | None = 0
        self.tape: int | None = None
        self.next_reverse = n - 1
        # Of each tier the slots in use, and since when their contents are there.
        self.held: dict[str, dict[tuple[int, bool], float]] = {tier: {} for tier in slots}
        self.now = 0.0
        self.link_free: dict[tuple[str, str], float] = {}
        self.writes_under_way: list[float] = []  # when each is done, ascending

    def follow(self, record: Record) -> None:
        match record:
            case Advance():
                self._advance(record)
            case Store():
                self._store(record)
            case Load():
                self._load(record)
            case Drop():
                if self._tier(record.tier).pop((record.step, record.tape), None) is None:
                    raise SequenceError("it is not there")
            case Reverse():
                self._reverse(record)
        self.count.seconds = self.now

    def _advance(self, record: Advance) -> None:
        if self.working != record.start:
            raise SequenceError(f"the working state is {self.working}")
        steps = record.stop - record.start
        # State n is made by whoever runs the schedule: rule 4 of the records.
        if steps < 1 or record.stop > self.next_reverse or (record.tape and steps != 1):
            raise SequenceError(f"the next step to reverse is {self.next_reverse}")
        self.working = record.stop
        self.tape = record.start if record.tape else None
        self.count.forward_steps += steps
        self.now += steps * self.costs.forward

    def _store(self, record: Store) -> None:
        if record.step != (self.tape if record.tape else self.working):
            raise SequenceError(f"the working state is {self.working}, the tape that of {self.tape}")
        key = (record.step, record.tape)
        self._make_way(record.tier, key)
        write = self.costs.write.get(record.tier, 0.0)
        if record.tier in self.costs.overlaps:
            done = self._transfer("out", record.tier, self.now, write)
            if self._has_no_slots:  # as of a schedule for a synchronous disk: it is the working state that goes out
                self.now = done
            else:
                bisect.insort(self.writes_under_way, done)
        else:
            self.now += write
            done = self.now
        self._take(record.tier, key, done)
        self.count.stores[record.tier] = self.count.stores.get(record.tier, 0) + 1

    def _load(self, record: Load) -> None:
        key = (record.step, record.tape)
        there = self._tier(record.tier).get(key)
        if there is None:
            raise SequenceError("it is not there")
        if record.into is not None:
            self._make_way(record.into, key)
        read = self.costs.read.get(record.tier, 0.0)
        if record.tier in self.costs.overlaps:
            done = self._transfer("back", record.tier, max(self.now, there), read)
        else:
            done = max(self.now, there) + read
        self.count.loads[record.tier] = self.count.loads.get(record.tier, 0) + 1
        if record.into is None or record.tier not in self.costs.overlaps:
            self.now = max(self.now, done)
        if record.into is not None:
            self._take(record.into, key, done)
        elif record.tape:
            self.tape, self.working = record.step, None
        else:
            self.tape, self.working = None, record.step

    def _reverse(self, record: Reverse) -> None:
        if record.step != self.next_reverse:
            raise SequenceError(f"the next step to reverse is {self.next_reverse}")
        if self.tape != record.step:
            if self.working != record.step:
                raise SequenceError(f"the working state is {self.working}")
            self.count.replayed_steps += 1
        self.next_reverse -= 1
        self.working = self.tape = None
        self.count.reversed_steps += 1
        self.now += self.costs.reverse

    def _tier(self, tier: str) -> dict[tuple[int, bool], float]:
        if tier not in self.held:
            raise SequenceError(f"there is no tier {tier!r}")
        return self.held[tier]

    @property
    def _has_no_slots(self) -> bool:
        return self.slots.get(MEMORY) == 0

    def _make_way(self, tier: str, key: tuple[int, bool]) -> None:
        """Free a slot in memory for a copy to ``tier``, which needs one, be it on its way out or for good."""
        if key in self._tier(tier):
            raise SequenceError("it is there already")
        if tier == MEMORY or (tier in self.costs.overlaps and not self._has_no_slots):
            self._wait_for_slot()

    def _take(self, tier: str, key: tuple[int, bool], done: float) -> None:
        held = self._tier(tier)
        held[key] = done
        most = self.slots[tier]
        if most is not None and len(held) > most:
            raise SequenceError(f"{tier} has {most} slots")
        self.count.most[tier] = max(self.count.most.get(tier, 0), len(held))

    def _wait_for_slot(self) -> None:
        """Wait for the earliest copy out if all slots in memory are taken; `SequenceError` if states hold them all."""
        most = self.slots.get(MEMORY)
        self.writes_under_way = [done for done in self.writes_under_way if done > self.now]
        while (
            most is not None and self.writes_under_way and len(self.held[MEMORY]) + len(self.writes_under_way) >= most
        ):
            self.now = max(self.now, self.writes_under_way.pop(0))
        if most is not None and len(self.held[MEMORY]) >= most:
            raise SequenceError(f"{MEMORY} has {most} slots")

    def _transfer(self, direction: str, tier: str, earliest: float, seconds: float) -> float:
        end = max(earliest, self.link_free.get((tier, direction), 0.0)) + seconds
        self.link_free[tier, direction] = end
        return end
