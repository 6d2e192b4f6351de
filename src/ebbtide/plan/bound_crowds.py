"""Moments at which few of the large values can be held together, for the lower bound: rule 13 of NOTE [Relaxation]."""

from __future__ import annotations

import dataclasses

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.plan.bound_absences import Absences
from ebbtide.plan.problem import Problem

MOST_HELD = 3
"""Of how many values at most it is looked at whether one more can be held."""


@dataclasses.dataclass(frozen=True, slots=True)
class Member:
    """A value in a crowd.

    Attributes:
        place: its absence in the program.
        gone: whether it can be away by a trip at that moment.
        soon: whether it is needed soon after the moment; if not, it came just before.
        event: the first event at which it can then be loaded, or the last one by which it has then been released.
    """

    place: int
    gone: bool
    soon: bool
    event: int


@dataclasses.dataclass(frozen=True, slots=True)
class Crowd:
    """Values of which at most ``held`` can be there at some moment."""

    held: int
    members: tuple[Member, ...]


def crowds_of(
    problem: Problem, absences: Absences, excess: Floats, moments: Ints, out_seconds: Floats, in_seconds: Floats
) -> list[Crowd]:
    """The crowds at ``moments``, none of them an event, of values that came, or are needed, within less than the time
    of a transfer; the others can be away without any delay.

    Args:
        problem: the problem.
        absences: those in the program.
        excess: plain bytes less the limit, per moment.
        moments: where to look.
        out_seconds, in_seconds: per absence, the least time of its transfers.
    """
    clock, slots = problem.clock, np.array(problem.facts.slots, dtype=np.int64)
    events = np.array(problem.facts.event_moments, dtype=np.int64)
    begin = np.where(np.isfinite(absences.replay_seconds), absences.opens, absences.release)
    found: dict[Crowd, None] = {}
    for moment in moments[moments < events[-1]].tolist():
        here = np.flatnonzero((begin <= moment) & (moment < absences.closes))
        spare = float(absences.size_bytes[here].sum() - excess[moment])
        slot = int(slots[max(0, int(np.searchsorted(slots, moment)) - 1)])
        event = int(events[np.searchsorted(events, moment)])
        gone = absences.movable[here] & (absences.release[here] <= moment)
        came = ~gone | (clock[slot] - clock[absences.out[here]] < out_seconds[here])
        soon = ~came & (clock[absences.closes[here]] - clock[event] < in_seconds[here])
        for held in range(MOST_HELD + 1):
            chosen = (came | soon) & (absences.size_bytes[here] * (held + 1) > spare * (1 + 1e-9))
            if int(chosen.sum()) > held:
                columns = (here[chosen].tolist(), gone[chosen].tolist(), soon[chosen].tolist())
                rows = zip(*columns, strict=True)
                found[Crowd(held, tuple(Member(*row, event if row[2] else slot) for row in rows))] = None
    return list(found)
