"""Capuchin: swap what hides behind compute, else swap or recompute, whichever is cheaper; then tune by feedback.

Peng, Shi, Dai, Jin, Ma, Xiong, Yang, Qian: Capuchin: Tensor-based GPU Memory Management for Deep Learning. ASPLOS 2020.
"""

from __future__ import annotations

import bisect
import dataclasses

import numpy as np

from ebbtide.arguments import as_switch
from ebbtide.arrays import Floats, Ints
from ebbtide.decisions import Plan
from ebbtide.errors import PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.follow import Move, Trip, follow
from ebbtide.plan.needs import KEEP, OFFLOAD, RECOMPUTE, Modes, Profile
from ebbtide.plan.profile import needs_of, profile
from ebbtide.plan.published.layers import slot_after, slot_before
from ebbtide.plan.published.switches import check_count
from ebbtide.plan.published.transfers import Ground, Queues, clock_with, held_until
from ebbtide.step import Step

METHOD = "capuchin"


def capuchin(step: Step, machine: Machine, limit_bytes: int, *, recompute: bool = True, feedback: int = 10) -> Plan:
    """Capuchin's guided execution; its measured execution is the observed step.

    Candidates are the absences that span the peak, by falling free time: seconds between the end of the copy out and
    the start of the copy back, each queued behind the others'. They are swapped while no free time is negative. The
    rest follow by falling memory saved per second of recomputation, each by what costs less: its recomputation, or the
    free time that its swap lacks. What no event lets go before the peak is swapped last, for what memory lacks behind
    it. A load starts its own transfer time before the value is needed; then every load that compute waited for starts
    earlier by the wait, if there is room, and the step is looked at again.

    Args:
        step, machine, limit_bytes: the problem.
        recompute: whether values may be computed again.
        feedback: rounds of tuning at most.

    Raises:
        BudgetError: if the candidates do not bring the step within ``limit_bytes``.
        PolicyError: if the machine has no slow tier and nothing may be computed again, or ``feedback`` is below 0.
        ArgumentError: if ``recompute`` is neither True nor False.
    """
    check_count("capuchin's feedback", feedback, 0)
    recompute = as_switch("recompute", recompute)
    ground = Ground.of(step, machine, METHOD, needs_tier=False)
    if ground.tier is None and not recompute:
        raise PolicyError(f"{METHOD} without recomputation needs a slow tier; machine {machine.name} has none")
    choice = _Choice(ground, limit_bytes)
    choice.swap_what_is_hidden()
    choice.take_the_cheaper(recompute)
    choice.swap_behind_the_peak()
    moves = choice.moves()
    for _ in range(feedback):
        if not _loads_earlier(ground, limit_bytes, moves):
            break
    return ground.to_plan(limit_bytes, moves, METHOD)


class _Choice:
    """What happens to each candidate, in the making."""

    def __init__(self, ground: Ground, limit_bytes: int) -> None:
        self.ground, self.candidates, self.limit_bytes = ground, ground.candidates, limit_bytes
        problem, candidates = ground.problem, ground.candidates
        self.modes: Modes = np.zeros(len(candidates.absence), dtype=np.int8)
        self._needs = needs_of(problem, candidates)
        self.found: Profile = profile(self._needs, self.modes)
        peak = int(np.argmax(problem.plain)) if problem.plain.size else 0
        self.places: list[int] = np.flatnonzero((candidates.opens <= peak) & (peak < candidates.closes)).tolist()
        self.can_swap = candidates.can_offload & (candidates.release < peak)
        self.swapped: list[int] = []
        self.lacking_seconds = 0.0

    def swap_what_is_hidden(self) -> None:
        """Swap by falling free time while that costs nothing."""
        able = [place for place in self.places if self.can_swap[place]]
        alone = {place: float(self._free_seconds([place])[0]) for place in able}
        for place in sorted(able, key=lambda place: (-alone[place], place)):
            if self._fits():
                return
            if self._lacking([*self.swapped, place]) <= 0:
                self._set(place, OFFLOAD)

    def take_the_cheaper(self, recompute: bool) -> None:
        """Swap or recompute what is left, by falling memory saved per second of recomputation."""
        candidates = self.candidates
        left = [place for place in self.places if self.modes[place] == KEEP]
        again = {
            place: replay.seconds for place in left if recompute and (replay := candidates.replays[place]) is not None
        }
        saved = {place: int(candidates.size_bytes[place]) / max(seconds, 1e-12) for place, seconds in again.items()}
        for place in sorted(left, key=lambda place: (-saved.get(place, 0.0), place)):
            if self._fits():
                return
            swap_seconds = float("inf")
            if self.can_swap[place]:
                swap_seconds = self._lacking([*self.swapped, place]) - self.lacking_seconds
            if again.get(place, float("inf")) <= swap_seconds:
                if place in again:
                    self._set(place, RECOMPUTE)
            else:
                self._set(place, OFFLOAD)

    def swap_behind_the_peak(self) -> None:
        """Swap what can only be released after the peak, if memory is short there still."""
        for place in self.places:
            if self._fits():
                return
            if self.modes[place] == KEEP and self.candidates.can_offload[place]:
                self._set(place, OFFLOAD)

    def moves(self) -> dict[int, Move]:
        """The choice with its transfers placed."""
        problem, found = self.ground.problem, self.found
        level = held_until(found, self.candidates, self.swapped)
        starts = clock_with(problem.clock, found.extra_seconds)
        queues = Queues(self.ground, level, found.end, starts, self.limit_bytes)
        moves = queues.moves(self.swapped)
        for place in self.swapped:
            trip, end = moves[place], int(found.end[place])
            assert isinstance(trip, Trip)
            wanted = starts[end] - self.candidates.in_seconds[place]
            # The first guess knows nothing of the queue: the access at which a swap in, alone, would just be in time.
            load = slot_before(problem, int(np.searchsorted(starts, wanted, side="right")) - 1)
            if trip.load < load < end:
                moves[place] = dataclasses.replace(trip, load=load)
        for place in np.flatnonzero(self.modes == RECOMPUTE).tolist():
            moves[place] = self.candidates.replays[place]
        return moves

    def _fits(self) -> bool:
        return int(self.found.level.max(initial=0)) <= self.limit_bytes

    def _set(self, place: int, mode: int) -> None:
        """Choose ``mode``, unless recipes would then wait for each other too deeply."""
        self.modes[place] = mode
        found = profile(self._needs, self.modes)
        if found.nested:
            self.modes[place] = KEEP
            return
        self.found = found
        if mode == OFFLOAD:
            self.swapped.append(place)
            self.lacking_seconds = self._lacking(self.swapped)

    def _lacking(self, places: list[int]) -> float:
        return float(-np.minimum(self._free_seconds(places), 0.0).sum())

    def _free_seconds(self, places: list[int]) -> Floats:
        """Start of the copy back less end of the copy out, of each, in queues that hold just these."""
        clock, column = self.ground.problem.clock, np.array(places, dtype=np.int64)
        opens, closes = self.candidates.opens[column], self.candidates.closes[column]
        ends = _queue(clock[opens], self.candidates.out_seconds[column], opens)
        # The way back is a queue too if time runs backwards.
        back = -_queue(-clock[closes], self.candidates.in_seconds[column], -closes)
        return back - ends


def _queue(ready_seconds: Floats, seconds: Floats, rank: Ints) -> Floats:
    """End of each transfer of a queue that serves one at a time, in the order of ``rank``."""
    order = np.argsort(rank, kind="stable")
    before = np.cumsum(seconds[order]) - seconds[order]
    ends = np.empty(len(order))
    ends[order] = np.maximum.accumulate(ready_seconds[order] - before) + before + seconds[order]
    return ends


def _loads_earlier(ground: Ground, limit_bytes: int, moves: dict[int, Move]) -> bool:
    """Start, in place, the loads that compute waits for earlier by the wait, where there is room.

    Returns whether that made the step faster; if not, ``moves`` are as before.
    """
    problem, place_of = ground.problem, {int(n): place for place, n in enumerate(ground.candidates.absence.tolist())}
    course = follow(problem, ground.complete(moves))
    changed: dict[int, Move] = {}
    memory = course.memory.copy()
    for stall in course.stalls:
        place = place_of[stall.absence]
        trip = moves[place]
        if stall.reason == "load" and isinstance(trip, Trip):
            wanted = float(course.starts[trip.load]) - stall.seconds
            position = bisect.bisect_right(problem.facts.slots, wanted, key=lambda slot: float(course.starts[slot])) - 1
            load = max(problem.facts.slots[max(position, 0)], slot_after(problem, trip.release + 1))
            size = int(ground.candidates.size_bytes[place])
            if load < trip.load and int(memory[load : trip.load].max()) + size <= limit_bytes:
                memory[load : trip.load] += size
                changed[place] = dataclasses.replace(trip, load=load)
    if not changed or follow(problem, ground.complete({**moves, **changed})).seconds >= course.seconds:
        return False
    moves.update(changed)
    return True
