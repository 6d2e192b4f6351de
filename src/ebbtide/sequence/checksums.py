"""Whether a step that is run again gives what it gave the first time."""

from __future__ import annotations

import array
import zlib
from collections.abc import Iterable

from ebbtide.errors import SequenceError


class Checksums:
    """CRC-32 of the states after a first step and all later ones, as first computed: 4 bytes for each step.

    Args:
        what: what the user calls that which makes a step.
    """

    def __init__(self, what: str) -> None:
        self._what = what
        self._start: int | None = None
        self._first = array.array("I")

    def compare(self, parts: Iterable[memoryview], step: int) -> None:
        """Note the state after ``step``, or raise `SequenceError` if it differs from the one noted."""
        found = 0
        for part in parts:
            found = zlib.crc32(part, found)
        if self._start is None:
            self._start = step
        place = step - self._start
        if place == len(self._first):
            self._first.append(found)
        elif place >= 0 and self._first[place] != found:
            raise SequenceError(
                f"step {step} gave another state when it was run again: the {self._what} must depend on the state "
                "and the step alone (random numbers, time, or something that it changes itself?)"
            )
