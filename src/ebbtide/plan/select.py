"""Choosing modes by price: what to move so that memory fits, at the least cost for the bytes and moments it frees."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from ebbtide.compiled import compiled
from ebbtide.plan.caution import NO_CEILING
from ebbtide.plan.problem import Floats, Ints, Problem
from ebbtide.plan.profile import KEEP, OFFLOAD, RECOMPUTE, Candidates, Mask, Modes, Profile, needs_of, profile
from ebbtide.plan.spans import add_between

MIDDLE = 0.2
"""How far from the pivot a place to cut may be, as a share of all the bytes that are brought back too early."""


@dataclasses.dataclass(frozen=True, slots=True)
class Room:
    """What memory may be used.

    Attributes:
        limit_bytes: the budget.
        ceiling: bytes allowed per moment, workspaces included.
        cap: bytes allowed per moment, workspaces of the step's own ops taken off.
        headroom: bytes per moment that workspaces of recomputed ops may take beyond the limit.
    """

    limit_bytes: int
    ceiling: Ints
    cap: Ints
    headroom: Ints

    @classmethod
    def of(cls, problem: Problem, limit_bytes: int, ceiling: int | Ints = NO_CEILING) -> Room:
        """The room within ``limit_bytes`` and, with workspaces, within ``ceiling``, for all moments or for each."""
        ceilings = np.full(problem.step.moments, ceiling, dtype=np.int64)
        return cls(limit_bytes, ceilings, np.minimum(limit_bytes, ceilings - problem.workspace), ceilings - limit_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Prices:
    """Seconds that each candidate is thought to cost if offloaded or recomputed, and the row of `Trips` of the tier
    where offloading it costs that."""

    offload: Floats
    recompute: Floats
    rows: Ints


class Selector:
    """Fills and prunes modes for one problem and one `Room`."""

    def __init__(self, problem: Problem, candidates: Candidates, room: Room) -> None:
        self.candidates, self.room, self.needs = candidates, room, needs_of(problem, candidates, room.headroom)
        self.can_recompute, self.deepest = candidates.can_recompute, candidates.deepest()
        self.profiles = self.cuts = 0

    def profile(self, modes: Modes) -> Profile:
        """Memory under ``modes``."""
        self.profiles += 1
        return profile(self.needs, modes)

    def fill(
        self, modes: Modes, prices: Prices, stay: Mask, peak_only: bool, pivot: float, deepen: bool = False
    ) -> Profile | None:
        """Move candidates, in place, until memory fits; returns the profile, or None if that was not reached.

        Args:
            modes: modes to start from.
            prices: what moving costs.
            stay: candidates that must not be moved if they are kept now.
            peak_only: whether to value what is freed at the worst moment only, rather than wherever memory is short.
            pivot: where to cut a chain of recipes that brings back too much at once, as a share of its bytes.
            deepen: whether a chain is cut by deeper recipes, which make again what others bring back, before it is cut
                by moving something in another way.
        """
        locked = ~self.can_recompute
        while True:
            found = self.profile(modes)
            over = found.level - self.room.cap
            moment = int(np.argmax(over))
            if over[moment] <= 0 and not found.nested:
                return found
            if not self._move(modes, prices, stay, locked, over, moment, peak_only) and not self._cut(
                modes, locked, found, moment, pivot, deepen
            ):
                return None

    def _move(
        self, modes: Modes, prices: Prices, stay: Mask, locked: Mask, over: Ints, moment: int, peak_only: bool
    ) -> bool:
        """Move the cheapest kept candidates that free the worst moment; False if there are none."""
        candidates = self.candidates
        if over[moment] <= 0:
            return False
        free = (modes == KEEP) & ~stay & (candidates.closes > moment)
        offload = free & candidates.can_offload & (candidates.release <= moment)
        recompute = free & ~locked & (candidates.opens <= moment)
        if not (offload.any() or recompute.any()):
            return False
        if peak_only:
            gain_offload = gain_recompute = candidates.size_bytes.astype(np.float64)
        else:
            short = np.concatenate(([0.0], np.cumsum(np.maximum(over, 0), dtype=np.float64), [0.0, 0.0]))
            short[-2:] = short[-3]
            gain_offload = candidates.size_bytes * (short[candidates.closes] - short[candidates.release])
            gain_recompute = candidates.size_bytes * (short[candidates.closes] - short[candidates.opens])
        with np.errstate(divide="ignore", invalid="ignore"):
            cost_offload = np.where(offload, prices.offload / gain_offload, np.inf)
            cost_recompute = np.where(recompute, prices.recompute / gain_recompute, np.inf)
        missing = int(over[moment])
        for place in np.argsort(np.minimum(cost_offload, cost_recompute), kind="stable").tolist():
            if missing <= 0 or not (offload[place] or recompute[place]):
                break
            modes[place] = OFFLOAD if cost_offload[place] <= cost_recompute[place] else RECOMPUTE
            missing -= int(candidates.size_bytes[place])
        return True

    def _cut(self, modes: Modes, locked: Mask, found: Profile, moment: int, pivot: float, deepen: bool) -> bool:
        """Stop recomputing one candidate of those whose recipes bring back too much too early, or do it by a deeper
        recipe; False if there is none.

        It is one that brings back, directly or not, about the share ``pivot`` of what is too early, so that a chain
        falls into two; the smallest of such.
        """
        candidates = self.candidates
        self.cuts += 1
        early = (modes != KEEP) & (found.end <= moment) & (candidates.closes > moment)
        if found.nested and not early.any():
            early = modes != KEEP
        brought = np.where(early, candidates.size_bytes, 0)
        # A recipe reads older values than it makes, and candidates are in the order of their values: leaves come first.
        for place in np.flatnonzero(early).tolist():
            if found.parent[place] >= 0:
                brought[found.parent[place]] += brought[place]
        cause = np.zeros(len(modes), dtype=np.bool_)
        cause[found.parent[early & (found.parent >= 0)]] = True
        cause |= (modes >= RECOMPUTE) & (candidates.closes == moment)
        places = np.flatnonzero(cause)
        if deepen and (deeper := places[modes[places] < self.deepest[places]]).size:
            places = deeper
        elif not places.size:
            return False
        distance = np.abs(brought[places] / max(1, int(brought[places].max())) - pivot)
        near = places[distance <= max(MIDDLE, float(distance.min()))]
        place = int(near[np.argmin(candidates.size_bytes[near])])
        if deepen and modes[place] < self.deepest[place]:
            modes[place] += 1
            return True
        locked[place] = True
        modes[place] = OFFLOAD if candidates.can_offload[place] else KEEP
        return True

    def prune(self, modes: Modes, found: Profile, prices: Prices) -> None:
        """Keep, in place, what need not be moved, the dearest first."""
        candidates = self.candidates
        again = candidates.replay_seconds[candidates.recipe(modes)] - candidates.replay_seconds[: len(modes)]
        cost = np.where(modes == OFFLOAD, prices.offload, prices.recompute + again)
        moved = np.flatnonzero(modes)
        dearest = moved[np.argsort(-cost[moved], kind="stable")]
        compiled(keep_where_room)(
            self.room.cap - found.level, dearest, found.begin, found.end, candidates.size_bytes, modes
        )


def keep_where_room(room: Any, places: Any, begin: Any, end: Any, size_bytes: Any, modes: Any) -> None:
    """Set ``modes`` of ``places`` to `KEEP`, one after the other, wherever ``room`` is left; it is used up."""
    tight = 0
    for place in places:
        # Where one did not fit, the next ones rarely do.
        if begin[place] <= tight < end[place] and room[tight] < size_bytes[place]:
            continue
        fits = True
        for moment in range(begin[place], end[place]):
            if room[moment] < size_bytes[place]:
                fits, tight = False, moment
                break
        if fits:
            add_between(room, begin[place], end[place], -size_bytes[place])
            modes[place] = KEEP
