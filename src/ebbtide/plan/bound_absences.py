"""What the program of the lower bound decides about: the absences in it, and which of them no plan can do without.

Numbers of rules are those of NOTE [Relaxation] in `bound_program`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Set

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.plan.bound_recipes import Gone, computed_again, recompute_moments
from ebbtide.plan.problem import Problem, bytes_within
from ebbtide.plan.profile import first_slots

NEGLIGIBLE = 1e-3
"""Share of the bytes above rest that values may have together to be left out of the program."""


@dataclasses.dataclass(frozen=True, slots=True)
class Absences:
    """Absences in the program, as columns.

    Attributes:
        number: number of the absence in the step.
        size_bytes: bytes of its value.
        opens, closes: as in the step, moments.
        out: slot at which its copy out is queued.
        release: first slot at which it can be released.
        movable: whether there is a link that it may take, and time for it to be back.
        replay_seconds: time of what every recipe of it runs again at least; infinite if there is none.
    """

    number: Ints
    size_bytes: Floats
    opens: Ints
    closes: Ints
    out: Ints
    release: Ints
    movable: Mask
    replay_seconds: Floats

    def some(self, chosen: Mask | Ints) -> Absences:
        """The ``chosen`` ones of these absences."""
        return Absences(*(getattr(self, field.name)[chosen] for field in dataclasses.fields(self)))


def absences_of(problem: Problem, banned: Set[int]) -> tuple[Absences, Floats]:
    """What the program decides about, and plain memory less the values of rule 9."""
    step, facts = problem.step, problem.facts
    numbers = np.array(
        [n for n, absence in enumerate(step.absences) if step.values[absence.value].storage not in facts.external],
        dtype=np.int64,
    )
    chosen = [step.absences[number] for number in numbers]
    out, release, movable = first_slots(problem, numbers)
    again = computed_again(facts, banned, more_seconds=problem.machine.replay_seconds)
    replay_seconds = np.array([one.seconds for one in again])[numbers]
    every = Absences(
        numbers,
        np.array([step.values[absence.value].size_bytes for absence in chosen], dtype=np.float64),
        np.array([absence.opens for absence in chosen], dtype=np.int64),
        np.array([absence.closes for absence in chosen], dtype=np.int64),
        out,
        release,
        movable & bool(problem.routes),
        replay_seconds,
    )
    every = every.some(every.movable | np.isfinite(every.replay_seconds))
    order = np.argsort(every.size_bytes, kind="stable")
    moved_bytes = np.cumsum(every.size_bytes[order])
    above_rest = float(problem.plain.max(initial=0) - problem.resting_bytes)
    small = np.union1d(order[moved_bytes <= NEGLIGIBLE * above_rest], np.flatnonzero(problem.spans.final[every.number]))
    gone = bytes_within(every.opens[small], every.closes[small], every.size_bytes[small], step.moments)
    left = np.ones(len(order), dtype=np.bool_)
    left[small] = False
    return every.some(left), problem.plain.astype(np.float64) - gone


@dataclasses.dataclass(frozen=True, slots=True)
class Needed:
    """Which values have to be absent, and when: rule 11. Columns have an entry for each of some absences.

    Attributes:
        absent: whether the value has to be absent at some moment.
        leaves_by: the event by which it has then left; the last moment if it may stay.
        back_from: the event from which on it may be back; the first moment if it may stay.
        again_from: the event from which on it may be computed again, whether it may stay or not.
    """

    absent: Mask
    leaves_by: Ints
    back_from: Ints
    again_from: Ints

    def gone(self, absences: Absences) -> Gone:
        """What has to be absent, and when, by absence."""
        spans = zip(self.leaves_by.tolist(), self.back_from.tolist(), strict=True)
        every = zip(absences.number.tolist(), self.absent.tolist(), spans, strict=True)
        return {number: span for number, absent, span in every if absent}


def needed_absences(problem: Problem, absences: Absences, excess: Floats) -> Needed:
    """Which values have to be absent: rule 11. ``excess`` are plain bytes less the limit."""
    count, events = len(absences.size_bytes), np.array(problem.facts.event_moments, dtype=np.int64)
    begin = np.where(np.isfinite(absences.replay_seconds), absences.opens, absences.release)
    spare = bytes_within(begin, absences.closes, absences.size_bytes, len(excess)) - excess
    spare[events] = np.inf
    tight = np.flatnonzero(spare < absences.size_bytes.max(initial=0.0))
    leaves_by, back_from = np.full(count, len(excess) - 1), np.zeros(count, dtype=np.int64)
    needed = np.zeros(count, dtype=np.bool_)
    bounds = np.searchsorted(tight, np.stack((begin, absences.closes)))
    for number, (first, last) in enumerate(bounds.T.tolist()):
        held = tight[first:last][spare[tight[first:last]] < absences.size_bytes[number]]
        if held.size:
            needed[number] = True
            leaves_by[number] = events[max(0, int(np.searchsorted(events, held[0])) - 1)]
            back_from[number] = events[np.searchsorted(events, held[-1])]
    found = Needed(needed, leaves_by, back_from, back_from)
    again_from = np.array(recompute_moments(problem.facts, found.gone(absences)), dtype=np.int64)
    return dataclasses.replace(found, again_from=again_from[absences.number])
