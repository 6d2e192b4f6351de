"""Times of a device's work, noted without waiting for it and read afterwards."""

from __future__ import annotations

import time
from collections.abc import Iterable
from typing import Any, Protocol, TypeAlias

Mark: TypeAlias = Any
"""A point in a device's work: a number or an event, which only the clock that made it can read."""


class Clock(Protocol):
    """Notes where a device is in its work. The host runs on meanwhile."""

    def mark(self) -> Mark:
        """The point after all that the calling thread has given the device to do. Never waits."""
        ...

    def passed(self, mark: Mark, /) -> bool:
        """Whether the device has got to ``mark``. Never waits."""
        ...

    def seconds(self, earlier: Mark, later: Mark, /) -> float:
        """Seconds from one mark to another. Waits until the device has got to both."""
        ...

    def fall_behind(self) -> None:
        """Keep the device from what it is given next, for longer than the host takes to give it: what is marked then
        is the device's own time, and not that in which it waited for the host."""
        ...

    def is_behind(self, mark: Mark, /) -> bool:
        """Whether the device may have had something to do right up to ``mark``. Never waits."""
        ...


class HostClock:
    """The clock of a CPU, which has done its work by the time it is back. Marks are seconds."""

    mark = staticmethod(time.perf_counter)

    def passed(self, _mark: float) -> bool:
        """See `Clock.passed`."""
        return True

    def seconds(self, earlier: float, later: float) -> float:
        """See `Clock.seconds`."""
        return later - earlier

    def fall_behind(self) -> None:
        """See `Clock.fall_behind`. A CPU is the host."""

    def is_behind(self, _mark: float) -> bool:
        """See `Clock.is_behind`."""
        return True


Span = tuple[Mark, Mark]
"""Two marks of one clock, the earlier one first."""


def total_seconds(clock: Clock, spans: Iterable[Span]) -> float:
    """Seconds of all ``spans`` together, none of them less than 0. Waits for the device."""
    return sum(max(0.0, clock.seconds(*span)) for span in spans)
