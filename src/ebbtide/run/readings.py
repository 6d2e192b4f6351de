"""Times of steps that ran: read once the device has got to their end, so that nobody has to wait for it."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Sequence

from ebbtide.observe.clock import Clock, Mark, Span, total_seconds

Then = Callable[[float, list[float]], None]
"""Gets the seconds of a step, and those between one of its stamps and the next."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Reading:
    step: Span
    spans: list[Span]
    then: Then


class Readings:
    """Marks of steps that were not read yet, in the order in which the steps ran."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._unread: collections.deque[_Reading] = collections.deque()

    def add(self, start: Mark, stamps: Sequence[Span], end: Mark, then: Then) -> None:
        """A step ran from ``start`` to ``end``, and the runtime was busy during each of ``stamps``."""
        starts = [start, *(after for _, after in stamps)]
        ends = [*(before for before, _ in stamps), end]
        self._unread.append(_Reading((start, end), list(zip(starts, ends, strict=True)), then))

    def collect(self, *, wait: bool = False) -> None:
        """Read what the device has done, or all of it, if need be by waiting."""
        while self._unread and (wait or self._clock.passed(self._unread[0].step[1])):
            reading = self._unread.popleft()
            seconds = [total_seconds(self._clock, [span]) for span in reading.spans]
            reading.then(total_seconds(self._clock, [reading.step]), seconds)
