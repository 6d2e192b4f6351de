"""How long the ops of a step take when nothing but the plan watches: durations refined from planned steps.

The observed durations contain the observer. Planned steps give the time between one event and the next, without the
time that the conductor itself took there; the median over a few steps, shared out over the ops in between in
proportion to their observed durations, is the better estimate. In each step some ops are held up, not the same ones, so
that the medians add up to less than a step: they are scaled to the median of the steps. What is left contains what
transfers beside compute cost it, which the simulator adds by itself; so that much is taken off again.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Sequence

from ebbtide.decisions import Decision
from ebbtide.machine import Machine
from ebbtide.plan import simulate
from ebbtide.step import Step

WARM_UP = 2
"""Planned steps to leave out: pages are still being faulted in."""
LOOKS = (3, 6, 12)
"""Numbers of steps watched after those of `WARM_UP`: after each of these, durations are refined, and after the last of
them no more steps are watched."""
SETTLED = LOOKS[1]
"""Number of steps watched after those of `WARM_UP` from which on durations are good enough to plan with."""


class Pace:
    """Collects the times of events over planned steps of one kind, and refines from them how long ops take."""

    def __init__(self) -> None:
        self._runs: list[list[float]] = []

    @property
    def due(self) -> bool:
        """Whether it is time to refine."""
        return len(self._runs) - WARM_UP in LOOKS

    @property
    def settled(self) -> bool:
        """Whether durations are those of planned steps, and good enough to plan with."""
        return len(self._runs) - WARM_UP >= SETTLED

    @property
    def done(self) -> bool:
        """Whether no more steps are to be watched."""
        return len(self._runs) == WARM_UP + LOOKS[-1]

    def add(self, seconds: Sequence[float]) -> None:
        """Add a step: the seconds to its first event, from each event to the next, and from the last one to its end.

        For a step at whose events nobody watches, only its whole time is known.
        """
        self._runs.append(list(seconds))

    def refine(self, step: Step) -> Step:
        """``step`` with the durations of its ops refined."""
        ticks = [0, *step.event_ticks(), len(step.ops)]
        if len(self._runs[0]) == 1:
            ticks = [0, len(step.ops)]
        ops = list(step.ops)
        between, held_up = self._medians()
        for index in range(len(ticks) - 1):
            span = range(ticks[index], ticks[index + 1])
            observed = math.fsum(ops[tick].duration_seconds for tick in span)
            if observed > 0:
                scale = held_up * between[index] / observed
                for tick in span:
                    seconds = ops[tick].duration_seconds * scale
                    ops[tick] = dataclasses.replace(ops[tick], duration_seconds=round(seconds, 9))
        return dataclasses.replace(step, ops=tuple(ops))

    def _medians(self) -> tuple[list[float], float]:
        """Seconds from each event to the next, medians over the steps; and how many times their sum a step takes."""
        runs = self._runs[WARM_UP:]
        between = [statistics.median(seconds) for seconds in zip(*runs, strict=True)]
        return between, statistics.median(map(math.fsum, runs)) / max(math.fsum(between), 1e-9)


def without_slowdown(step: Step, machine: Machine, decisions: Sequence[Decision]) -> Step:
    """``step``, whose durations were measured beside the transfers of a plan, without what these cost compute."""
    links = (dataclasses.replace(link, compute_slowdown=0.0, compute_seconds=0.0) for link in machine.links)
    quiet = dataclasses.replace(machine, links=tuple(links))
    lost = simulate(step, machine, decisions).seconds - simulate(step, quiet, decisions).seconds
    if lost <= 0 or step.plain_seconds <= 0:
        return step
    share = max(0.0, 1 - lost / step.plain_seconds)
    ops = tuple(dataclasses.replace(op, duration_seconds=round(share * op.duration_seconds, 9)) for op in step.ops)
    return dataclasses.replace(step, ops=ops)
