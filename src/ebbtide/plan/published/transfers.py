"""Placing transfers as the papers do: copies out in order of readiness, copies back in order of need from the end.

Both queues are first in, first out. Times are those of the plain step plus its recomputations: the papers' planners do
not look at their own stalls either. Without a limit compute never waits and memory is what it is; with one, a release
that would come too late for memory is pulled forward and a load that would come too early is put off, and compute waits
(AutoSwap's two modes, section V of arXiv 1903.06631 and the swap pool of its public code).
"""

from __future__ import annotations

import bisect
import dataclasses
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.decisions import Plan
from ebbtide.errors import PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.follow import Move, Trip
from ebbtide.plan.judged import to_plan
from ebbtide.plan.needs import Profile
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates
from ebbtide.plan.published.remembered import remembered
from ebbtide.plan.recipes import find_recipes
from ebbtide.plan.simulate import decisions_of
from ebbtide.step import Step


@dataclasses.dataclass(frozen=True, slots=True)
class Ground:
    """What a policy that moves values decides about.

    Attributes:
        problem: the step on the machine.
        tier: the slow memory used, the one with the fastest return; None if the machine has none.
        recipes: per absence, how its value can be computed again, or None.
        candidates: the absences worth deciding about.
    """

    problem: Problem
    tier: str | None
    recipes: list[tuple[int, ...] | None]
    candidates: Candidates

    @classmethod
    def of(cls, step: Step, machine: Machine, method: str, *, needs_tier: bool = True) -> Ground:
        """The ground of ``method``.

        Raises:
            PolicyError: if the machine has no slow memory, but the method needs one.
        """
        if needs_tier and not machine.slow_tiers():
            raise PolicyError(
                f"{method} offloads, but machine {machine.name} has no slow tier; plan with recomputation"
            )
        return _ground(step, machine)

    def with_recipes(self, recipes: list[tuple[int, ...] | None]) -> Ground:
        """This ground with other recipes."""
        return Ground(self.problem, self.tier, recipes, Candidates.of(self.problem, self.tier, recipes))

    def leaves(self, place: int) -> list[int]:
        """Candidates that the recipe of a candidate reads."""
        first, last = self.candidates.first_leaf[place], self.candidates.first_leaf[place + 1]
        found: list[int] = self.candidates.leaves[first:last].tolist()
        return found

    def trip(self, out: int, release: int, load: int) -> Trip:
        """A trip to the slow tier, in moments."""
        assert self.tier is not None, "only a ground with a slow tier has candidates that may be offloaded"
        return Trip(self.tier, out, release, load)

    def complete(self, moves: Mapping[int, Move]) -> list[Move]:
        """One move for each absence: ``moves``, by candidate; the rest is kept."""
        every: list[Move] = [None] * len(self.problem.step.absences)
        for place, move in moves.items():
            every[int(self.candidates.absence[place])] = move
        return every

    def to_plan(self, limit_bytes: int, moves: Mapping[int, Move], method: str) -> Plan:
        """The plan that does ``moves``, by candidate, and keeps the rest. Raises as `judged.to_plan`."""
        decisions = decisions_of(self.problem, self.complete(moves), self.recipes)
        return to_plan(self.problem, limit_bytes, decisions, method)


@remembered
def _ground(step: Step, machine: Machine) -> Ground:
    problem = Problem.of(step, machine)
    tier, recipes = next(iter(problem.routes), None), find_recipes(step)
    return Ground(problem, tier, recipes, Candidates.of(problem, tier, recipes))


def clock_with(clock: Floats, extra_seconds: Floats) -> Floats:
    """Start of each moment, seconds, and the end, if moments take ``extra_seconds`` longer."""
    return np.asarray(clock + np.concatenate(([0.0], np.cumsum(extra_seconds))))


def held_until(found: Profile, candidates: Candidates, places: Sequence[int]) -> Ints:
    """Bytes per moment if the offloaded candidates ``places`` of a profile stayed where they are."""
    level = found.level.copy()
    for place in places:
        begin = int(found.begin[place])
        level[begin + int(found.busy[begin]) : int(found.end[place])] += candidates.size_bytes[place]
    return level


class Queues:
    """Places the transfers of chosen candidates.

    Args:
        ground: the step, the machine and the candidates.
        level: bytes per moment if none of the chosen moves.
        end: per candidate, the moment at which its value is wanted back.
        starts: start of each moment, seconds.
        limit_bytes: most bytes wanted, or None if compute must not wait.
        peak: moment by which a copy out is waited for at the latest, and behind which a copy back is queued at the
            earliest, if there is a limit; None if there is no such moment.
    """

    def __init__(
        self,
        ground: Ground,
        level: Ints,
        end: Ints,
        starts: Floats,
        limit_bytes: int | None = None,
        peak: int | None = None,
    ) -> None:
        self.ground, self.candidates, self.slots = ground, ground.candidates, ground.problem.facts.slots
        self.level, self.end, self.limit_bytes = level.copy(), end, limit_bytes
        self.starts: list[float] = starts.tolist()
        self.slot_seconds = [self.starts[slot] for slot in self.slots]
        self.peak = peak
        self.outs: dict[int, int] = {}
        self.releases: dict[int, int] = {}
        self.loads: dict[int, int] = {}

    def moves(self, chosen: Iterable[int], *, early: bool = False) -> dict[int, Move]:
        """A trip for each candidate of ``chosen`` that has the time for one.

        Args:
            chosen: candidates that may be offloaded.
            early: copy out as soon as the value is saved, not only after its last use.
        """
        self._send_out(chosen, early)
        if self._bring_back():
            self._send_out(self.loads, early)  # what stays after all leaves the link to the others: they go sooner
        return {
            place: self.ground.trip(self.outs[place], release, self.loads[place])
            for place, release in self.releases.items()
        }

    def _send_out(self, chosen: Iterable[int], early: bool) -> None:
        candidates = self.candidates
        ready = {place: self._ready(place, early) for place in chosen}
        free_seconds = 0.0
        for place in sorted(ready, key=lambda place: (ready[place], place)):
            copied_seconds = max(free_seconds, self.starts[ready[place]]) + float(candidates.out_seconds[place])
            position = bisect.bisect_left(self.slot_seconds, copied_seconds)
            position = max(position, bisect.bisect_right(self.slots, ready[place]))
            first, end = int(candidates.release[place]), int(self.end[place])
            release = max(first, self.slots[position] if position < len(self.slots) else end)
            if self.limit_bytes is not None:
                latest = end - 1 if self.peak is None else min(self.peak, end - 1)
                release = self._pulled_forward(first, min(release, latest))
            elif release >= end:
                continue  # it stays, and leaves the link to those behind it
            free_seconds = copied_seconds
            self.releases[place] = release
            before = self.slots[bisect.bisect_left(self.slots, release) - 1]
            self.outs[place] = min(ready[place], before)
            self.level[release + 1 : end] -= candidates.size_bytes[place]

    def _ready(self, place: int, early: bool) -> int:
        out, opens = int(self.candidates.out[place]), int(self.candidates.opens[place])
        position = bisect.bisect_left(self.slots, out if early else max(out, opens))
        return self.slots[position] if position < len(self.slots) else out

    def _pulled_forward(self, first: int, release: int) -> int:
        """The last slot up to ``release`` that comes before the first moment without room, but not before ``first``."""
        without_room = np.flatnonzero(self.level[first + 1 : release + 1] > (self.limit_bytes or 0))
        if without_room.size:
            release = first + int(without_room[0])
        return max(first, self.slots[bisect.bisect_right(self.slots, release) - 1])

    def _bring_back(self) -> bool:
        """Place the copies back. Returns whether there is no time for some, which then stay."""
        until_seconds, some_stay = float("inf"), False
        for place in sorted(self.releases, key=lambda place: (int(self.end[place]), place), reverse=True):
            end = int(self.end[place])
            start_seconds = min(until_seconds, self.starts[end]) - float(self.candidates.in_seconds[place])
            position = bisect.bisect_right(self.slot_seconds, start_seconds) - 1
            load = self.slots[position] if position >= 0 else -1
            if self.limit_bytes is not None:
                load = self._put_off(place, load)
            elif load <= self.releases[place]:
                # There is no time for the way back: compute would wait. The value stays.
                del self.releases[place]
                some_stay = True
                continue
            until_seconds = start_seconds
            self.loads[place] = load if load < end else int(self.candidates.closes[place])
            self.level[load:end] += self.candidates.size_bytes[place]
        return some_stay

    def _put_off(self, place: int, load: int) -> int:
        """The first slot from ``load`` on from which there is room for the value; its end if there is none."""
        end, size = int(self.end[place]), int(self.candidates.size_bytes[place])
        after = self.releases[place] if self.peak is None else max(self.peak, self.releases[place])
        load = max(load, self._next_slot(after, end))
        without_room = np.flatnonzero(self.level[load:end] + size > (self.limit_bytes or 0))
        return self._next_slot(load + int(without_room[-1]), end) if without_room.size else load

    def _next_slot(self, moment: int, end: int) -> int:
        position = bisect.bisect_right(self.slots, moment)
        return min(end, self.slots[position]) if position < len(self.slots) else end
