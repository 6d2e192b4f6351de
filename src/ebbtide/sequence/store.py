"""Where states are while a chain runs: slots in memory, and slow tiers whose copies go on beside compute.

NOTE [Blocks]
A slot in memory is a block of as many bytes as a state has. No more blocks than slots ever exist: a copy on its way out
keeps its block until it is done, and one on its way back takes one at once. They are made once and used again: blocks
that came and went between the operators' own arrays would leave the heap full of holes. Whoever needs a block while all
are taken waits for the oldest copy out. So a slow tier that is late makes compute wait, and nothing is dropped.
"""

from __future__ import annotations

import collections
import time
from collections.abc import Callable, Mapping
from types import TracebackType

import torch

from ebbtide.errors import SequenceError
from ebbtide.run.tiers import Load, QueuedTier, Slot
from ebbtide.run.tiers.memory import CONGRUENCE_BYTES, take_memory
from ebbtide.sequence.schedules import MEMORY
from ebbtide.units import format_bytes

Block = torch.UntypedStorage
Fill = Callable[[Block], None]


class StateStore:
    """States by step and tier; a context that lets go of all of them at its end.

    Args:
        state_bytes: size of a state.
        slots: slots in memory.
        tiers: the slow tiers, by name.

    Attributes:
        waited_seconds: how long compute has waited for transfers.
    """

    def __init__(self, state_bytes: int, slots: int, tiers: Mapping[str, QueuedTier]) -> None:
        self.waited_seconds = 0.0
        self._state_bytes = state_bytes
        self._slots = slots
        self._tiers = tiers
        # What comes back must lie as it lay when it left: so that all blocks are alike.
        self._alignment_bytes = max([CONGRUENCE_BYTES, *(tier.congruence_bytes for tier in tiers.values())])
        self._blocks = 0
        self._free: list[Block] = []
        self._memory: dict[int, Block | Load] = {}
        self._slow: dict[str, dict[int, Slot]] = {name: {} for name in tiers}
        self._writing: collections.deque[tuple[Slot, Block]] = collections.deque()

    def __enter__(self) -> StateStore:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._writing.clear()
        self._memory.clear()
        self._free.clear()
        self._slow.clear()

    def put(self, step: int, tier: str, fill: Fill) -> None:
        """Store a state: ``fill`` copies it into a block. Raises `SpillError` if an earlier copy out has failed."""
        block = self._block()
        fill(block)
        if tier == MEMORY:
            self._memory[step] = block
        else:
            slot = self._tiers[tier].write(block)
            self._slow[tier][step] = slot
            self._writing.append((slot, block))

    def fetch(self, step: int, tier: str) -> None:
        """Begin to bring a state back from a slow tier into a slot in memory."""
        self._memory[step] = self._tiers[tier].read(self._slow[tier][step], self._block())

    def get(self, step: int, tier: str) -> Block:
        """A state's block, once it is there. One in memory stays that slot's; one from a slow tier is the caller's."""
        if tier != MEMORY:
            return self._wait(self._tiers[tier].read(self._slow[tier][step]))
        held = self._memory[step]
        if isinstance(held, Load):
            held = self._memory[step] = self._wait(held)
        return held

    def drop(self, step: int, tier: str) -> None:
        """Give a slot back."""
        if tier == MEMORY:
            held = self._memory.pop(step)
            self._free.append(self._wait(held) if isinstance(held, Load) else held)
        else:
            self._tiers[tier].free(self._slow[tier].pop(step))

    def _block(self) -> Block:
        """A block that is free: one given back, a new one, or the one of the oldest copy out, once that is done."""
        while self._writing and (self._writing[0][0].finished.is_set() or self._full):
            slot, block = self._writing.popleft()
            start = time.perf_counter()
            slot.wait()
            self.waited_seconds += time.perf_counter() - start
            self._free.append(block)
        if self._free:
            return self._free.pop()
        if self._full:
            raise SequenceError(f"the schedule holds more states in memory than its {self._slots} slots")
        try:
            block = take_memory(self._state_bytes, 0, self._alignment_bytes)
        except OSError as fault:
            size = format_bytes(self._state_bytes)
            raise SequenceError(f"no RAM for a state of {size} ({fault.strerror}); give less memory=...") from fault
        self._blocks += 1
        return block

    @property
    def _full(self) -> bool:
        return not self._free and self._blocks >= self._slots

    def _wait(self, load: Load) -> Block:
        start = time.perf_counter()
        block = load.wait()
        self.waited_seconds += time.perf_counter() - start
        return block
