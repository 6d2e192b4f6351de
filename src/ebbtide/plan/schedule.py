"""When each offloaded candidate is copied out, released and loaded: as lazily as the limit and the links allow.

Copies out are queued as soon as they may be. A release comes when its copy is predicted to be done, or earlier, with
a stall, where memory needs it; a load comes as late as it can to be there in time, or later where there is no room.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbtide.compiled import compiled
from ebbtide.plan.follow import Moves
from ebbtide.plan.problem import Floats, Ints, Problem
from ebbtide.plan.profile import OFFLOAD, RECOMPUTE, Candidates, Modes, Profile

RELEASE_MARGIN = 0.05
LOAD_MARGIN = 0.2
"""Shares of a transfer's time that plans leave free around it, because measured times vary."""
RELEASE_MARGIN_SECONDS = 1e-3
LOAD_MARGIN_SECONDS = 2e-3
"""The same for what does not depend on size: threads waking up, the clock of a busy machine."""


class Scheduler:
    """Places the transfers of modes, for one problem.

    Args:
        problem: the problem.
        candidates: its candidates.
        tier: the slow tier, or None.
        cap: bytes allowed per moment.
    """

    def __init__(self, problem: Problem, candidates: Candidates, tier: str | None, cap: Ints) -> None:
        self.candidates, self.cap = candidates, cap
        self.tier = -1 if tier is None else list(problem.routes).index(tier)
        self.absences = len(problem.step.absences)
        self.slots = np.array(problem.facts.slots, dtype=np.int64)

    def moves(self, modes: Modes, profile: Profile, starts: Floats) -> Moves | None:
        """A move for each absence of the step, or None if the modes cannot stay within the cap.

        Args:
            modes: one for each candidate; a recomputed one's recipe is named by the candidate's place.
            profile: memory under these modes.
            starts: expected start of each moment, seconds.
        """
        if profile.nested:
            return None
        candidates = self.candidates
        offloaded = np.flatnonzero(modes == OFFLOAD)
        queue = offloaded[np.argsort(candidates.out[offloaded], kind="stable")]
        level = profile.level.copy()
        release = compiled(place_releases)(
            self.slots, starts[self.slots], profile.busy, level, self.cap, queue, candidates.size_bytes,
            profile.begin, profile.end, candidates.out_seconds, starts[candidates.out[queue]],
        )  # fmt: skip
        if release is None:
            return None
        load = compiled(place_loads)(
            self.slots, starts[self.slots], level, self.cap, queue, release, candidates.size_bytes,
            profile.end, candidates.closes, candidates.in_seconds, starts[profile.end[queue]],
        )  # fmt: skip
        moves = Moves.none(self.absences)
        recomputed, numbers = np.flatnonzero(modes == RECOMPUTE), candidates.absence[queue]
        moves.replay[candidates.absence[recomputed]] = recomputed
        moves.tier[numbers] = self.tier
        moves.out[numbers], moves.release[numbers], moves.load[numbers] = candidates.out[queue], release, load
        return moves


def place_releases(
    slots: Any, slot_seconds: Any, busy: Any, level: Any, cap: Any, queue: Any, size_bytes: Any,
    begin: Any, end: Any, out_seconds: Any, queued_seconds: Any,
) -> Any:  # fmt: skip
    """Slot of each release in ``queue``, when copied or as early as memory needs; None if memory needs more.

    ``level`` is changed to the bytes held then. A release relieves its own moment, unless something is brought back in
    it (``busy``).
    """
    count = len(queue)
    release = np.empty(count, np.int64)
    free_seconds = 0.0
    for rank in range(count):
        place = queue[rank]
        seconds = out_seconds[place]
        free_seconds = max(free_seconds, queued_seconds[rank]) + seconds
        copied = free_seconds + RELEASE_MARGIN * seconds + RELEASE_MARGIN_SECONDS
        first = begin[place]
        last = slots[np.searchsorted(slots, end[place]) - 1]
        position = min(np.searchsorted(slot_seconds, copied), len(slots) - 1)
        slot = max(first, min(last, slots[position]))
        release[rank] = slot
        level[first + busy[first] : slot + busy[slot]] += size_bytes[place]
    moment = 0
    while moment < len(level):
        if level[moment] <= cap[moment]:
            moment += 1
            continue
        # The copies queued first are done first.
        relieved = False
        for rank in range(count):
            place = queue[rank]
            first, slot = begin[place], release[rank]
            late = slot + busy[slot]
            if slot > first and first + busy[first] <= moment < late:
                position = np.searchsorted(slots, moment, side="right") - 1
                if slots[position] + busy[slots[position]] > moment:
                    position -= 1
                slot = max(first, slots[position]) if position >= 0 else first
                level[slot + busy[slot] : late] -= size_bytes[place]
                release[rank] = slot
                relieved = True
                break
        if not relieved:
            return None
    return release


def place_loads(
    slots: Any, slot_seconds: Any, level: Any, cap: Any, queue: Any, release: Any, size_bytes: Any,
    end: Any, closes: Any, in_seconds: Any, due_seconds: Any,
) -> Any:  # fmt: skip
    """Slot of each load in ``queue``: in time if there is room, else the first with room, else on demand."""
    count = len(queue)
    load = np.empty(count, np.int64)
    keys = np.empty(count, np.int64)
    for rank in range(count):
        keys[rank] = end[queue[rank]] * (len(end) + 1) + queue[rank]
    order = np.argsort(keys)
    wanted = np.empty(count)
    free_until = np.inf
    for turn in range(count - 1, -1, -1):
        rank = order[turn]
        free_until = min(free_until, due_seconds[rank])
        free_until -= (1 + LOAD_MARGIN) * in_seconds[queue[rank]] + LOAD_MARGIN_SECONDS
        wanted[rank] = free_until
    for rank in order:
        place = queue[rank]
        position = np.searchsorted(slot_seconds, wanted[rank], side="right") - 1
        position = max(position, np.searchsorted(slots, release[rank], side="right"))
        slot = slots[position] if position < len(slots) else end[place]
        for moment in range(end[place] - 1, slot - 1, -1):
            if cap[moment] - level[moment] < size_bytes[place]:
                position = np.searchsorted(slots, moment, side="right")
                slot = slots[position] if position < len(slots) else end[place]
                break
        if slot < end[place]:
            load[rank] = slot
            level[slot : end[place]] += size_bytes[place]
        else:
            load[rank] = closes[place]
    return load
