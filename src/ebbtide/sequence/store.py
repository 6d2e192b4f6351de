"""Where states are while a chain runs: slots in memory, and slow tiers whose copies go on beside compute.

NOTE [Blocks]
A slot in memory is a block of as many bytes as a state has. No more blocks than slots ever exist: a copy on its way out
keeps its block until it is done, and one on its way back takes one at once. Whoever needs a block while all are taken
waits for the oldest copy out. So a slow tier that is late makes compute wait, and nothing is dropped.

Small states go to a slow tier in runs, if that takes them so: see NOTE [Runs] in `ebbtide.sequence.blocks`. A run goes
when it is full, or when one of its states or blocks is wanted; states that are asked for together come back together.
"""

from __future__ import annotations

import collections
import dataclasses
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from ebbtide.errors import SequenceError
from ebbtide.sequence.blocks import Block, Blocks, storage_of
from ebbtide.sequence.disk import StateCopy, StateDisk, StatePlace, joined
from ebbtide.sequence.schedules import MEMORY
from ebbtide.sequence.shelf import Shelf


def unnoted(*_: object) -> None:
    """Do nothing: for what nobody wants to know."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Outgoing:
    """States on their way to a slow tier: by step, each with its block."""

    tier: str
    states: dict[int, Block]
    copy: StateCopy


class StateStore:
    """States by step and tier; a context that lets go of all of them at its end.

    Args:
        blocks: the slots in memory.
        tiers: the slow tiers, by name.
        late: function told the seconds that compute has waited for a copy out, and of how many states.
        written: function told the step and place of each copy out, in order, some time after it is there.
        is_held: says of a block whether somebody has what lies in it still. It then does not serve again.

    Attributes:
        stored: number of states that have been stored, by slow tier.
        waited_seconds: time for which compute has waited for transfers.
    """

    def __init__(
        self,
        blocks: Blocks,
        tiers: Mapping[str, StateDisk],
        *,
        late: Callable[[float, int], None] = unnoted,
        written: Callable[[int, StatePlace], None] = unnoted,
        is_held: Callable[[Block], bool] = lambda _: False,
    ) -> None:
        self.waited_seconds = 0.0
        self._late = late
        self._written = written
        self._is_held = is_held
        self._all = blocks
        self.stored = dict.fromkeys(tiers, 0)
        self._tiers = tiers
        self._memory: dict[int, Block | tuple[StateCopy, Block]] = {}  # the latter while it comes back
        self._shelves = {name: Shelf() for name in tiers}  # what is on the slow tiers, but for what is on its way there
        self._writing: collections.deque[_Outgoing] = collections.deque()
        # The run that is being filled: its tier and the states in it; below, the blocks for those to come.
        self._filled: tuple[str, dict[int, Block]] = (MEMORY, {})
        self._reserved: collections.deque[Block] = collections.deque()
        self._wanted: list[tuple[int, str]] = []  # states that are to come back

    def __enter__(self) -> StateStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.clear()
        self._filled = (MEMORY, {})
        self._reserved.clear()
        self._memory.clear()
        self._shelves.clear()

    def take(self, tier: str) -> Block:
        """A free block for a state that will be stored on ``tier``; if need be, once the oldest copy out is done.

        Raises:
            SpillError: if a copy out has failed.
        """
        if self._wanted:
            self._bring()
        while self._writing and self._writing[0].copy.ready:
            self._reap()
        if self._reserved and self._filled[0] == tier:
            return self._reserved.popleft()
        if tier == MEMORY:
            self._free_one()
            return self._all.take()
        self._check_tier(tier)
        self._send()
        self._free_one()
        self._filled = (tier, {})
        self._reserved += self._all.take_run(self._run_length(tier))
        return self._reserved.popleft()

    def _check_tier(self, tier: str) -> None:
        if tier not in self._tiers:
            raise SequenceError(f"the schedule names a tier {tier!r}, which its slots do not")

    def _run_length(self, tier: str) -> int:
        return self._all.run_length if self._tiers[tier].takes_runs(self._all.block_bytes) else 1

    def _free_one(self) -> None:
        """Wait until a block is free."""
        if self._all.are_taken:
            self._send()
        while self._writing and self._all.are_taken:
            self._reap()
        if self._all.are_taken:
            raise SequenceError(f"the schedule holds more states in memory than its {self._all.count} slots")

    def put(self, step: int, tier: str, block: Block) -> None:
        """Store a state that was copied into a block of `take`."""
        if tier == MEMORY:
            if step in self._memory:
                raise SequenceError(f"the schedule stores state {step} in memory, where it is already")
            self._memory[step] = block
            return
        if self._is_stored(step, tier):
            raise SequenceError(f"the schedule stores state {step} in tier {tier!r}, where it is already")
        self._filled[1][step] = block
        self.stored[tier] += 1
        if not self._reserved:
            self._send()

    def _is_stored(self, step: int, tier: str) -> bool:
        """Whether a state is on a slow tier, or on its way there."""
        if step in self._filled[1] or self._shelves[tier].find(step) is not None:
            return True
        return any(out.tier == tier and step in out.states for out in self._writing)

    def _send(self) -> None:
        """Let the run go that is being filled."""
        (tier, states), self._filled = self._filled, (MEMORY, {})
        self._all.give_back(*self._reserved)
        self._reserved.clear()
        if states:
            copy = self._tiers[tier].store(storage_of([*states.values()]))
            self._writing.append(_Outgoing(tier, states, copy))

    def adopt(self, step: int, tier: str, place: StatePlace) -> None:
        """Take up a state that is on a slow tier already."""
        self._shelves[tier].put(step, place)

    def fetch(self, step: int, tier: str) -> None:
        """Bring a state back from a slow tier into a slot in memory; begins before anything else is done."""
        self._wanted.append((step, tier))

    def _bring(self) -> None:
        """Begin to bring back what is wanted."""
        while self._wanted:
            steps, tier = [self._wanted[0][0]], self._wanted[0][1]
            places = [self._find(*self._wanted[0])]
            for step, other in self._wanted[1 : self._run_length(tier)]:
                if other != tier or not (place := self._find(step, tier)).is_right_before(places[-1]):
                    break
                steps.append(step)
                places.append(place)
            self._free_one()
            run = self._all.take_run(len(places))
            copy = self._tiers[tier].bring(joined(places[: len(run)]), storage_of(run))
            self._memory.update((step, (copy, block)) for step, block in zip(steps, reversed(run), strict=False))
            del self._wanted[: len(run)]

    def get(self, step: int, tier: str) -> Block:
        """A state's block, once it is there. One in memory stays that slot's; one from a slow tier is the caller's."""
        if self._wanted:
            self._bring()
        if tier != MEMORY:
            place, block = self._find(step, tier), self._all.extra()
            return self._wait(self._tiers[tier].bring(place, block.storage), block)
        held = self._memory.get(step)
        if isinstance(held, tuple):
            held = self._memory[step] = self._wait(*held)
        if held is None:
            raise _not_stored("loads", step, tier)
        return held

    def drop(self, step: int, tier: str) -> None:
        """Give a slot back."""
        if self._wanted:
            self._bring()
        if tier == MEMORY:
            held = self._memory.pop(step, None)
            if held is None:
                raise _not_stored("drops", step, tier)
            block = self._wait(*held) if isinstance(held, tuple) else held
            if self._is_held(block):
                self._all.forgo()
            else:
                self._all.give_back(block)
            return
        if isinstance(coming := self._memory.get(step), tuple):  # it is still being read
            self._memory[step] = self._wait(*coming)
        self._settle(step, tier)
        if (place := self._shelves[tier].take(step)) is not None:
            self._tiers[tier].forget(place)

    def _find(self, step: int, tier: str) -> StatePlace:
        """Where a state is on a slow tier, once it is there."""
        self._settle(step, tier)
        place = self._shelves[tier].find(step)
        if place is None:
            raise _not_stored("loads", step, tier)
        return place

    def _settle(self, step: int, tier: str) -> None:
        """Wait until a state is on its tier, if it is on its way there."""
        self._check_tier(tier)
        if self._filled[0] == tier and step in self._filled[1]:
            self._send()
        while any(out.tier == tier and step in out.states for out in self._writing):
            self._reap()

    def _reap(self) -> None:
        """Take back the blocks of the oldest copy out."""
        out = self._writing.popleft()
        self._late(self._time_wait(out.copy), len(out.states))
        self._all.give_back(*out.states.values())
        for step, place in zip(out.states, out.copy.place.split(len(out.states)), strict=True):
            self._written(step, place)
            self._shelves[out.tier].put(step, place)

    def _wait(self, copy: StateCopy, block: Block) -> Block:
        self._time_wait(copy)
        return block

    def _time_wait(self, copy: StateCopy) -> float:
        """Wait for a copy, and return the seconds that this took."""
        if copy.ready:
            copy.wait()
            return 0.0
        start = time.perf_counter()
        copy.wait()
        seconds = time.perf_counter() - start
        self.waited_seconds += seconds
        return seconds


def _not_stored(does: str, step: int, tier: str) -> SequenceError:
    return SequenceError(f"the schedule {does} state {step} from tier {tier!r}, where it is not")
