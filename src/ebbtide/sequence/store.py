"""Where states are while a chain runs: slots in memory, and slow tiers whose copies go on beside compute.

NOTE [Blocks]
A slot in memory is a block of as many bytes as a state has. No more blocks than slots ever exist: a copy on its way out
keeps its block until it is done, and one on its way back takes one at once. Whoever needs a block while all are taken
waits for the oldest copy out. So a slow tier that is late makes compute wait, and nothing is dropped.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from types import TracebackType

from ebbtide.errors import SequenceError
from ebbtide.sequence.blocks import Block, Blocks
from ebbtide.sequence.disk import Copy, StateDisk, StatePlace
from ebbtide.sequence.schedules import MEMORY
from ebbtide.sequence.shelf import Shelf


def unnoted(*_: object) -> None:
    """Nobody wants to know."""


class StateStore:
    """States by step and tier; a context that lets go of all of them at its end.

    Args:
        blocks: the slots in memory.
        tiers: the slow tiers, by name.
        late: told the seconds that compute has waited for a copy out.
        written: told the step and place of each copy out, in order, some time after it is there.

    Attributes:
        stored: by slow tier, how many states have been stored there.
        waited_seconds: how long compute has waited for transfers.
    """

    def __init__(
        self,
        blocks: Blocks,
        tiers: Mapping[str, StateDisk],
        *,
        late: Callable[[float], None] = unnoted,
        written: Callable[[int, StatePlace], None] = unnoted,
    ) -> None:
        self.waited_seconds = 0.0
        self._late = late
        self._written = written
        self._all = blocks
        self.stored = dict.fromkeys(tiers, 0)
        self._tiers = tiers
        self._memory: dict[int, Block | tuple[Copy, Block]] = {}  # the latter while it comes back
        self._shelves = {name: Shelf() for name in tiers}  # what is on the slow tiers, but for what is on its way there
        self._writing: collections.deque[tuple[int, str, Copy, Block]] = collections.deque()

    def __enter__(self) -> StateStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.clear()
        self._memory.clear()
        self._shelves.clear()

    def take(self) -> Block:
        """A block that is free: one given back, a new one, or the one of the oldest copy out, once that is done.

        Raises:
            SpillError: if a copy out has failed.
        """
        while self._writing and (self._writing[0][2].ready or self._all.are_taken):
            self._reap()
        if self._all.are_taken:
            raise SequenceError(f"the schedule holds more states in memory than its {self._all.count} slots")
        return self._all.take()

    def put(self, step: int, tier: str, block: Block) -> None:
        """Store a state that was copied into a block of `take`."""
        if tier == MEMORY:
            self._memory[step] = block
        else:
            self._writing.append((step, tier, self._tiers[tier].store(block.storage), block))
            self.stored[tier] += 1

    def adopt(self, step: int, tier: str, place: StatePlace) -> None:
        """Take up a state that is on a slow tier already."""
        self._shelves[tier].put(step, place)

    def fetch(self, step: int, tier: str) -> None:
        """Begin to bring a state back from a slow tier into a slot in memory."""
        block = self.take()
        self._memory[step] = (self._read(step, tier, block), block)

    def get(self, step: int, tier: str) -> Block:
        """A state's block, once it is there. One in memory stays that slot's; one from a slow tier is the caller's."""
        if tier != MEMORY:
            block = self._all.extra()
            return self._wait(self._read(step, tier, block), block)
        held = self._memory[step]
        if isinstance(held, tuple):
            held = self._memory[step] = self._wait(*held)
        return held

    def drop(self, step: int, tier: str) -> None:
        """Give a slot back."""
        if tier == MEMORY:
            held = self._memory.pop(step)
            self._all.give_back(self._wait(*held) if isinstance(held, tuple) else held)
            return
        if isinstance(coming := self._memory.get(step), tuple):  # it is still being read
            self._memory[step] = self._wait(*coming)
        self._settle(step, tier)
        if (place := self._shelves[tier].take(step)) is not None:
            self._tiers[tier].forget(place)

    def _read(self, step: int, tier: str, block: Block) -> Copy:
        """Begin to bring a state back into a block."""
        self._settle(step, tier)
        place = self._shelves[tier].find(step)
        if place is None:
            raise SequenceError(f"the schedule loads state {step} from tier {tier!r}, where it is not")
        return self._tiers[tier].bring(place, block.storage)

    def _settle(self, step: int, tier: str) -> None:
        """Wait until a state is on its tier, if it is on its way there."""
        while any(writing[:2] == (step, tier) for writing in self._writing):
            self._reap()

    def _reap(self) -> None:
        """Take back the block of the oldest copy out."""
        step, tier, copy, block = self._writing.popleft()
        self._late(self._waited(copy))
        self._all.give_back(block)
        self._written(step, copy.place)
        self._shelves[tier].put(step, copy.place)

    def _wait(self, copy: Copy, block: Block) -> Block:
        self._waited(copy)
        return block

    def _waited(self, copy: Copy) -> float:
        """Wait for a copy; the seconds that it took."""
        if copy.ready:
            copy.wait()
            return 0.0
        start = time.perf_counter()
        copy.wait()
        seconds = time.perf_counter() - start
        self.waited_seconds += seconds
        return seconds
