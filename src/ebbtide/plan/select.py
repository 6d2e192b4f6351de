"""Choosing modes by price: what to move so that memory fits, at the least cost for the bytes and moments it frees."""

from __future__ import annotations

import dataclasses

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.compiled import compiled
from ebbtide.plan.caution import NO_CEILING
from ebbtide.plan.fill import Manner, Wishes, fill_modes
from ebbtide.plan.needs import KEEP, OFFLOAD, Modes, Profile
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates, needs_of, profile
from ebbtide.plan.spans import add_between
from ebbtide.step import MOST_BYTES


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
        limit_bytes = min(max(limit_bytes, -MOST_BYTES), MOST_BYTES)  # further no step goes, and no number of 64 bits
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

    def fill(self, modes: Modes, prices: Prices, manner: Manner) -> Profile | None:
        """Move candidates, in place, until memory fits; returns the profile, or None if that was not reached.

        Args:
            modes: modes to start from.
            prices: what moving costs.
            manner: how to choose besides.
        """
        wishes = Wishes(prices.offload, prices.recompute, self.candidates.can_offload, self.deepest, *manner)
        found, fits, profiles, cuts = compiled(fill_modes)(
            self.needs, wishes, self.room.cap, ~self.can_recompute, modes
        )
        self.profiles += profiles
        self.cuts += cuts
        return found if fits else None

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


def keep_where_room(room: Ints, places: Ints, begin: Ints, end: Ints, size_bytes: Ints, modes: Modes) -> None:
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
