"""What steps and transfers take, measured: before a chain is run, and while it runs."""

from __future__ import annotations

import ctypes
import statistics
import time
from collections.abc import Callable

from ebbtide.machine import Link
from ebbtide.run.calibrate import time_trip
from ebbtide.run.tiers import QueuedTier
from ebbtide.run.tiers.memory import take_memory
from ebbtide.sequence.choose import SlowMemory

TRIALS = 5
TRIAL_SECONDS = 0.5
"""Calls of a step that are timed before a chain is run: so many, or for so long."""
TRANSFERS = 3
STEADY = 1.3
"""The interval is left as planned while steps take up to this factor more or less than they did when it was."""
MEAN_STEPS = 16
"""About so many of the last steps count in their mean."""


def time_step(call: Callable[[], object]) -> float:
    """Least seconds of ``call``: whatever else runs can only make it slower."""
    seconds: list[float] = []
    end = time.perf_counter() + TRIAL_SECONDS
    while len(seconds) < TRIALS and (not seconds or time.perf_counter() < end):
        start = time.perf_counter()
        call()
        seconds.append(time.perf_counter() - start)
    return min(seconds)


def time_transfers(tier: QueuedTier, state_bytes: int, capacity_bytes: int | None) -> SlowMemory:
    """Measure how long one state takes to ``tier`` and back.

    Raises:
        SpillError: if it cannot be moved.
    """
    block = take_memory(state_bytes)
    ctypes.memset(block.data_ptr(), 1, state_bytes)  # so that its pages are there
    trips = [time_trip(tier, block) for _ in range(TRANSFERS)]
    out, back = (statistics.median(way) for way in zip(*trips, strict=True))
    return SlowMemory(
        tier.name,
        _link("memory", tier.name, state_bytes, out),
        _link(tier.name, "memory", state_bytes, back),
        capacity_bytes,
    )


def _link(source: str, target: str, state_bytes: int, seconds: float) -> Link:
    rate = state_bytes / max(seconds, 1e-9)
    return Link(source, target, 0.0, rate, rate)


class Pace:
    """Re-chooses the interval of a multistage schedule as steps become slower or quicker than planned.

    An interval is meant to last as long as a transfer, or some multiple of it: so its seconds are kept, not its steps.

    Args:
        interval: as planned.
        step_seconds: for which it was.
        least: the shortest interval for which the slow tier has room.
    """

    def __init__(self, interval: int, step_seconds: float, least: int = 1) -> None:
        self._planned = interval
        self._planned_seconds = step_seconds
        self._least = least
        self._mean_seconds = step_seconds

    def step_took(self, seconds: float) -> None:
        """Note what a step of the first sweep took."""
        self._mean_seconds += (seconds - self._mean_seconds) / MEAN_STEPS

    def interval(self, step: int) -> int:  # noqa: ARG002
        """Steps from a state that is about to be stored to the next."""
        ratio = self._planned_seconds / max(self._mean_seconds, 1e-9)
        if 1 / STEADY < ratio < STEADY:
            return self._planned
        return max(round(self._planned * ratio), self._least, 1)
