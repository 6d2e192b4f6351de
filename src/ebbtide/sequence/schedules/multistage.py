"""Multistage asynchronous checkpointing: every ``interval``-th state goes to a slow tier while compute goes on.

Kukreja, Hueckelheim and Gorman 2018 (arXiv 1806.01117). Between two stored states Revolve runs in memory, while the
next stored state comes back. The forward steps per step do not depend on the chain's length.

NOTE [Slots]
Of ``states`` slots in memory ``depth`` are for states that come back, the others for Revolve: one stored state's slot
passes from the first to the second when its part is reversed. If a part is so short that Revolve cannot use all of
them, more states are brought back ahead, which evens out a tier of uneven speed. During the forward sweep all slots
serve copies on their way out.

NOTE [The turn]
The last steps are left to Revolve in memory, without a second sweep: as many as that makes fewer forward steps. With
``r`` more steps to go, one more part pays if ``interval + F(interval) + F(r - interval) < F(r)``; as ``F`` is convex,
that holds for all ``r`` from some threshold on. Of the parts before, the last ``depth`` keep their first state in
memory.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
from collections.abc import Iterable, Iterator, Mapping

from ebbtide.arguments import as_whole
from ebbtide.errors import SequenceError
from ebbtide.sequence.schedules.binomial import forward_steps
from ebbtide.sequence.schedules.records import (
    DISK,
    MEMORY,
    Advance,
    Drop,
    Load,
    Record,
    Schedule,
    Store,
    check_length,
    take_whole,
)
from ebbtide.sequence.schedules.revolve import revolve

MOST_AHEAD = 16
"""States brought back ahead of their turn: more would not be in the processor's caches any more when it comes."""


@dataclasses.dataclass(frozen=True)
class Multistage(Schedule):
    """Every ``interval``-th state on a slow tier, Revolve in between, and at the turn all in memory.

    Kukreja, Hueckelheim and Gorman 2018 (arXiv 1806.01117). Transfers run beside compute.

    Attributes:
        n: number of steps.
        states: slots in memory, at least 2.
        interval: steps from one state on the slow tier to the next.
        tier: the slow tier.

    Raises:
        SequenceError: if ``n < 1``, ``interval < 1``, or there are fewer than 2 slots.
    """

    n: int
    states: int
    interval: int
    tier: str = DISK

    def __post_init__(self) -> None:
        take_whole(self, "n", "states", "interval")
        check_length(self.n)
        check_multistage(self.states, self.interval)

    @property
    def inner_slots(self) -> int:
        """Slots for Revolve inside a part."""
        return inner_slots(self.states, self.interval)

    @property
    def depth(self) -> int:
        """Slots for states that come back."""
        return self.states - self.inner_slots

    @property
    def part_steps(self) -> int:
        """Steps that one part runs forward once more."""
        return forward_steps(self.interval, self.inner_slots)

    @functools.cached_property
    def parts(self) -> int:
        """Parts before the turn; 0 where plain Revolve runs no more steps forward."""
        left = turn_steps(self.interval, self.part_steps, self.states - self.depth)
        # The turn needs a step of its own.
        parts = min(-(-max(self.n - left, 0) // self.interval), (self.n - 1) // self.interval)
        return parts if self._steps(parts) < forward_steps(self.n, self.states) else 0

    def _steps(self, parts: int) -> int:
        swept = parts * self.interval
        return swept + parts * self.part_steps + forward_steps(self.n - swept, self.states - self.depth)

    @property
    def kept_parts(self) -> int:
        """Parts whose first state stays in memory."""
        return min(self.depth, self.parts)

    @property
    def forward_steps(self) -> int:
        """See `Schedule.forward_steps`. Time O(log^2 n)."""
        return self._steps(self.parts) if self.parts else forward_steps(self.n, self.states)

    @property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`."""
        states = self.states if self.parts else min(self.states, self.n - 1)  # as those of Revolve
        return {MEMORY: states, self.tier: self.parts - self.kept_parts}

    def seconds(self, forward: float, reverse: float, write: float, read: float) -> float:
        """Predicted time: compute, and what it waits for where a part takes less than the transfer beside it.

        Args:
            forward, reverse: seconds of a step.
            write, read: seconds of one state to and from the slow tier.
        """
        moved = self.parts - self.kept_parts
        compute = self.forward_steps * forward + self.n * reverse
        late_out = max(write - self.interval * forward, 0.0)
        late_back = max(read - self.part_steps * forward - self.interval * reverse, 0.0)
        return compute + moved * (late_out + late_back)

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        if not self.parts:
            yield from revolve(0, self.n, self.states)
            return
        first_kept = self.parts - self.kept_parts
        for part in range(self.parts):
            start = part * self.interval
            yield Store(start, self.tier if part < first_kept else MEMORY)
            yield Advance(start, start + self.interval)
        yield from revolve(self.parts * self.interval, self.n, self.states - self.depth)
        starts = range((self.parts - 1) * self.interval, -1, -self.interval)
        kept = [(start, start + self.interval) for start in starts[: self.kept_parts]]
        moved = ((start, start + self.interval) for start in starts[self.kept_parts :])
        yield from reverse_parts(kept, moved, tier=self.tier, slots=self.inner_slots, depth=self.depth)


def inner_slots(states: int, interval: int) -> int:
    """Slots for Revolve inside a part of ``interval`` steps, of ``states`` slots in memory. See NOTE [Slots]."""
    return min(states - 1, max(interval - 1, 1))


def check_multistage(states: int, interval: int) -> None:
    """Raise `SequenceError` unless parts of ``interval`` steps can be reversed beside a state that comes back, or
    `ArgumentError`."""
    if as_whole("states", states) < 2:
        raise SequenceError(
            f"a multistage schedule needs 2 slots in memory, one for a state that comes back, not {states}"
        )
    if as_whole("interval", interval) < 1:
        raise SequenceError(f"the interval between states on the slow tier must be at least 1, not {interval}")


@functools.lru_cache(maxsize=64)
def turn_steps(interval: int, part_steps: int, tail_slots: int) -> int:
    """The most steps that are left to Revolve at the end: from one more on, a part pays. See NOTE [The turn].

    Args:
        interval: steps of a part.
        part_steps: steps that a part runs forward once more.
        tail_slots: slots in memory for Revolve at the end.
    """

    def part_pays(remaining: int) -> bool:
        after = forward_steps(remaining - interval, tail_slots)
        return interval + part_steps + after < forward_steps(remaining, tail_slots)

    low, high = interval, 2 * interval
    while not part_pays(high):
        low, high = high, 2 * high
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if part_pays(middle) else (middle, high)
    return low


def reverse_parts(
    kept: Iterable[tuple[int, int]],
    moved: Iterator[tuple[int, int]],
    *,
    tier: str,
    slots: int,
    depth: int,
) -> Iterator[Record]:
    """Reverse parts, last first; each runs from a start, which is stored, to a stop.

    Args:
        kept: parts whose first state is in memory, last first.
        moved: the parts before them, whose first state is on ``tier``, last first.
        tier: the slow tier.
        slots: slots in memory for Revolve.
        depth: slots in memory for states that come back.
    """
    ready = collections.deque((part, False) for part in kept)
    most = min(depth, MOST_AHEAD)

    def fetch() -> Iterator[Record]:
        if len(ready) > most // 2:  # several together may come in one go
            return
        while len(ready) < most and (part := next(moved, None)) is not None:
            ready.append((part, True))
            yield Load(part[0], tier, into=MEMORY)

    yield from fetch()
    while ready:
        (start, stop), was_moved = ready.popleft()
        yield from fetch()
        yield Load(start, MEMORY)
        if was_moved:
            yield Drop(start, tier)
        yield from revolve(start, stop, slots, held=True)
        yield Drop(start, MEMORY)
