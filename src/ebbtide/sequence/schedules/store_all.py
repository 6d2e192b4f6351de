"""Storing every state: no step is run twice, but for what the reverse steps do themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping

from ebbtide.sequence.schedules.records import (
    MEMORY,
    Advance,
    Drop,
    Load,
    Record,
    Reverse,
    Schedule,
    Store,
    check_length,
    take_whole,
)


@dataclasses.dataclass(frozen=True, slots=True)
class StoreAll(Schedule):
    """All states but the last in one tier.

    Attributes:
        n: number of steps.
        tier: where states are stored.

    Raises:
        SequenceError: if ``n < 1``.
    """

    n: int
    tier: str = MEMORY

    def __post_init__(self) -> None:
        take_whole(self, "n")
        check_length(self.n)

    @property
    def slots(self) -> Mapping[str, int]:
        """See `Schedule.slots`."""
        return {self.tier: self.n - 1}

    @property
    def forward_steps(self) -> int:
        """See `Schedule.forward_steps`."""
        return self.n - 1

    def records(self) -> Iterator[Record]:
        """See `Schedule.records`."""
        for step in range(self.n - 1):
            yield Store(step, self.tier)
            yield Advance(step, step + 1)
        yield Reverse(self.n - 1)
        for step in range(self.n - 2, -1, -1):
            yield Load(step, self.tier)
            yield Reverse(step)
            yield Drop(step, self.tier)
