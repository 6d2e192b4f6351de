"""When each offloaded candidate is copied out, released and loaded: as lazily as the limit and the links allow.

Copies out are queued as soon as they may be. A release comes when its copy is predicted to be done, or earlier, with
a stall, where memory needs it; a load comes as late as it can to be there in time, or later where there is no room.
"""

from __future__ import annotations

import bisect

import numpy as np

from ebbtide.plan.follow import Move, Trip
from ebbtide.plan.problem import Floats, Ints, Problem
from ebbtide.plan.profile import OFFLOAD, RECOMPUTE, Candidates, Modes, Profile

RELEASE_MARGIN = 0.05
LOAD_MARGIN = 0.2
"""Shares of a transfer's time that plans leave free around it, because measured times vary."""
RELEASE_MARGIN_SECONDS = 1e-3
LOAD_MARGIN_SECONDS = 2e-3
"""The same for what does not depend on size: threads waking up, the clock of a busy machine."""


class Schedule:
    """Places the transfers of one set of modes.

    Args:
        problem: the problem.
        candidates: its candidates.
        modes: one for each candidate.
        profile: memory under these modes.
        cap: bytes allowed per moment.
        starts: expected start of each moment, seconds.
    """

    def __init__(
        self, problem: Problem, candidates: Candidates, modes: Modes, profile: Profile, cap: Ints, starts: Floats
    ) -> None:
        self.problem, self.candidates, self.modes, self.profile, self.cap = problem, candidates, modes, profile, cap
        self.starts: list[float] = starts.tolist()
        self.slots = problem.facts.slots
        self.slot_seconds = [self.starts[slot] for slot in self.slots]
        self.level = profile.level.copy()
        self.sizes: list[int] = candidates.size_bytes.tolist()
        self.end: list[int] = profile.end.tolist()
        offloaded: list[int] = np.flatnonzero(modes == OFFLOAD).tolist()
        self.queue = sorted(offloaded, key=lambda place: (int(candidates.out[place]), place))
        self.release: dict[int, int] = {}
        self.load: dict[int, int] = {}

    def moves(self, tier: str | None) -> list[Move] | None:
        """A move for each absence of the step, or None if the modes cannot stay within the cap."""
        if self.profile.nested:
            return None
        self._release_when_copied()
        if not self._release_earlier():
            return None
        self._load_in_time()
        moves: list[Move] = [None] * len(self.problem.step.absences)
        for place in np.flatnonzero(self.modes == RECOMPUTE).tolist():
            moves[self.candidates.absence[place]] = self.candidates.replays[place]
        for place in self.queue:
            assert tier is not None
            out = int(self.candidates.out[place])
            moves[self.candidates.absence[place]] = Trip(tier, out, self.release[place], self.load[place])
        return moves

    def _relieved(self, release: int) -> int:
        """The first moment whose memory a release at ``release`` lowers."""
        return release + int(self.profile.busy[release])

    def _release_when_copied(self) -> None:
        outs, seconds = self.candidates.out.tolist(), self.candidates.out_seconds.tolist()
        free_seconds = 0.0
        for place in self.queue:
            free_seconds = max(free_seconds, self.starts[outs[place]]) + seconds[place]
            copied = free_seconds + RELEASE_MARGIN * seconds[place] + RELEASE_MARGIN_SECONDS
            first = int(self.profile.begin[place])
            last = self.slots[bisect.bisect_left(self.slots, self.end[place]) - 1]
            position = min(bisect.bisect_left(self.slot_seconds, copied), len(self.slots) - 1)
            slot = max(first, min(last, self.slots[position]))
            self.release[place] = slot
            self.level[self._relieved(first) : self._relieved(slot)] += self.sizes[place]

    def _release_earlier(self) -> bool:
        """Move releases forward until memory fits: the copies queued first are done first."""
        pending = [place for place in self.queue if self.release[place] > self.profile.begin[place]]
        while True:
            over = self.level > self.cap
            moment = int(np.argmax(over))
            if not over[moment]:
                return True
            for place in pending:
                first, late = int(self.profile.begin[place]), self._relieved(self.release[place])
                if self._relieved(first) <= moment < late:
                    slot = max(first, self._last_slot_relieving(moment))
                    self.level[self._relieved(slot) : late] -= self.sizes[place]
                    self.release[place] = slot
                    break
            else:
                return False

    def _last_slot_relieving(self, moment: int) -> int:
        position = bisect.bisect_right(self.slots, moment) - 1
        if self._relieved(self.slots[position]) > moment:
            position -= 1
        return self.slots[position] if position >= 0 else -1

    def _load_in_time(self) -> None:
        order = sorted(self.queue, key=lambda place: (self.end[place], place))
        seconds = self.candidates.in_seconds.tolist()
        wanted: dict[int, float] = {}
        free_until = float("inf")
        for place in reversed(order):
            due = min(free_until, self.starts[self.end[place]])
            free_until = wanted[place] = due - (1 + LOAD_MARGIN) * seconds[place] - LOAD_MARGIN_SECONDS
        for place in order:
            position = bisect.bisect_right(self.slot_seconds, wanted[place]) - 1
            after_release = bisect.bisect_right(self.slots, self.release[place])
            slot = self._first_load_with_room(place, max(position, after_release))
            self.load[place] = int(self.candidates.closes[place]) if slot is None else slot
            if slot is not None:
                self.level[slot : self.end[place]] += self.sizes[place]

    def _first_load_with_room(self, place: int, position: int) -> int | None:
        """The first slot from ``position`` on from which the value may be held until needed; None for on demand."""
        end = self.end[place]
        if position >= len(self.slots) or self.slots[position] >= end:
            return None
        slot = self.slots[position]
        room = self.cap[slot:end] - self.level[slot:end]
        full = np.flatnonzero(room < self.sizes[place])
        if full.size:
            position = bisect.bisect_right(self.slots, slot + int(full[-1]))
            slot = self.slots[position] if position < len(self.slots) else end
        return slot if slot < end else None
