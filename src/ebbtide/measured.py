"""What was measured of steps that ran. Plain records, no torch."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Iterator
from typing import Literal

LATEST = 10_000
"""How many of the latest measurements are kept: a training may have millions of steps."""
StepState = Literal["observe", "verify", "audit", "rehearse", "planned", "idle"]
"""What a step is for: see ``state`` of `ebbtide.Budget`."""


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One step that ran.

    Attributes:
        state: what it was for; None if nobody said.
        seconds: time of the step's context, by the clock of its device; None until the device is known to be done.
        peak_bytes: the most bytes of live tensors, where they were counted.
        left: why the step left its plan, or how it differs from the recorded one; or an empty string.
        kind: the key of the kind of step that it was of, known or not; None if it was observed.
    """

    state: StepState | None = None
    seconds: float | None = None
    peak_bytes: int | None = None
    left: str = ""
    kind: int | None = None


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

    @property
    def latest(self) -> Measured | None:
        """The one of the latest step; None if there was none."""
        return self._latest[-1] if self._latest else None

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
