"""The interval of a multistage schedule, chosen again while a chain runs."""

from __future__ import annotations

import statistics

RECENT = 16
"""After this many intervals it is looked whether steps and the disk are still what they were."""
STEADY = 2.0
"""Steps that take up to this factor more or less count as before: times vary so with what else the core does."""
LATE_SHARE = 0.1
"""Compute may wait for the disk for this share of an interval."""


class IntervalController:
    """The interval of a multistage schedule, chosen again as steps or the disk become slower or quicker than planned.

    An interval is meant to last as long as a transfer, or some multiple of it: so its seconds are kept, not its steps.
    Where compute waits for the disk in most intervals, the disk has become slower, and the interval longer. All of it
    goes by medians: a disk that stands still once is no slower for it.

    Args:
        interval: the interval as planned, in steps.
        step_seconds: time of a step for which it was planned.
        least: the shortest interval for which the slow tier has room.
        late_seconds: time for which compute is expected to wait in each interval.
    """

    def __init__(self, interval: int, step_seconds: float, least: int = 1, late_seconds: float = 0.0) -> None:
        self._seconds = interval * step_seconds
        self._step_seconds = step_seconds
        self._least = least
        self._late_seconds = late_seconds
        self._interval = max(interval, least, 1)
        self._took: list[float] = []
        self._waits: list[float] = []
        self._intervals = 0

    def steps_took(self, steps: int, seconds: float) -> None:
        """Note what steps of the first sweep took, from one stored state to the next."""
        self._took.append(seconds / steps)

    def was_late(self, seconds: float, states: int = 1) -> None:
        """Note how long compute has waited for a copy out of so many states."""
        self._waits += [seconds / states] * states

    def interval(self, _step: int) -> int:
        """Steps from a state that is about to be stored to the next."""
        self._intervals += 1
        if self._intervals > RECENT:
            self._follow()
            self._took, self._waits, self._intervals = [], [], 0
        return self._interval

    def _follow(self) -> None:
        step_seconds = statistics.median(self._took) if self._took else self._step_seconds
        late_seconds = (statistics.median(self._waits) if self._waits else 0.0) - self._late_seconds
        is_late = late_seconds > LATE_SHARE * self._seconds
        if is_late:
            self._seconds += late_seconds
        if is_late or not self._step_seconds / STEADY < step_seconds < self._step_seconds * STEADY:
            self._step_seconds = max(step_seconds, 1e-9)
            self._interval = max(round(self._seconds / self._step_seconds), self._least, 1)
