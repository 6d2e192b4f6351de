"""What was measured of steps that ran. Plain records, no torch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator

LATEST = 10_000
"""Of so many steps it is remembered what was measured: a training may have millions."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One step that ran.

    Attributes:
        state: ``observe``, ``verify``, ``audit``, ``rehearse``, ``planned`` or ``idle``.
        seconds: time of the step's context, by the clock of its device; None until the device is known to be done.
        peak_bytes: the most bytes of live tensors, where they were counted.
        rss_bytes: the most resident bytes above rest, where they were read.
        left: why the step left its plan, or how it differs from the recorded one; or an empty string.
    """

    state: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None
    left: str = ""


class Measurements:
    """What was measured of each step, of the latest ones; its length is how many have been measured at all.

    Args:
        most: of how many steps it is remembered.
    """

    def __init__(self, most: int = LATEST) -> None:
        self._count = 0
        self._latest: collections.deque[Measured] = collections.deque(maxlen=most)

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Measured]:
        return iter(self._latest)

    def add(self, measured: Measured) -> int:
        """A step was measured; returns its number, the first one's being 0."""
        self._latest.append(measured)
        self._count += 1
        return self._count - 1

    def correct(self, number: int, measured: Measured) -> None:
        """More is known now of step ``number``, if it is remembered still."""
        place = number - self._count + len(self._latest)
        if place >= 0:
            self._latest[place] = measured
