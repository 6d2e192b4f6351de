"""Finding fast plans: greedy choice under prices that are learnt from stalls, then ruin and recreate.

The price of moving a candidate is what it costs compute, plus its transfer time where the simulator saw compute wait
for the link just then. Every complete choice of modes is scheduled and judged by the exact simulator; work is counted,
not timed, so that the same step gives the same plan on every machine.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from ebbtide.plan.follow import Course, Follower, Moves, Transfer
from ebbtide.plan.problem import Floats, Ints, Problem
from ebbtide.plan.profile import KEEP, OFFLOAD, RECOMPUTE, Candidates, Mask, Modes, Profile
from ebbtide.plan.schedule import Scheduler
from ebbtide.plan.select import Prices, Room, Selector

PRICE_ROUNDS = 12
PRICE_MEMORY = 0.6
"""Share of the former price that remains when new stalls are seen; prices of links swing without it."""
TIE_SECONDS = 1e-6
"""Added to every price, so that among what costs nothing the largest values are taken first."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A complete plan in the making."""

    modes: Modes
    moves: Moves
    course: Course


class Search:
    """Looks for the fastest plan of one problem within one `Room`.

    Args:
        problem: the problem.
        candidates: its candidates.
        tier: the slow tier, or None.
        room: what memory may be used.
        limit_bytes: the budget.
        ceiling: physical bytes allowed per moment.
        seed: seed of the random choices.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Candidates,
        tier: str | None,
        room: Room,
        limit_bytes: int,
        ceiling: Ints,
        seed: int,
    ) -> None:
        self.problem, self.candidates = problem, candidates
        self.limit_bytes, self.ceiling = limit_bytes, ceiling
        self.selector = Selector(problem, candidates, room)
        self.scheduler = Scheduler(problem, candidates, tier, room.cap)
        self.follower = Follower(problem, candidates.replays)
        self.random = np.random.default_rng(seed)
        self.best: Found | None = None
        self.count = len(candidates.absence)
        self.out_price, self.in_price = np.zeros(self.count), np.zeros(self.count)
        self.follows = 0

    def offer(self, modes: Modes, profile: Profile) -> Found | None:
        """Schedule and judge ``modes``; keeps them if they are the fastest so far. None if they do not fit."""
        starts = self.problem.clock[:-1].copy()
        starts[1:] += np.cumsum(profile.extra_seconds)[:-1]
        found = self._judge(modes, profile, starts)
        if found is not None and (self.best is None or found.course.seconds < 1.03 * self.best.course.seconds):
            # Scheduled again with what waiting and slowed compute really did to the clock.
            again = self._judge(modes, profile, found.course.starts)
            if again is not None and again.course.seconds < found.course.seconds:
                found = again
        if found is not None and (self.best is None or found.course.seconds < self.best.course.seconds):
            self.best = found
        return found

    def _judge(self, modes: Modes, profile: Profile, starts: Floats) -> Found | None:
        moves = self.scheduler.moves(modes, profile, starts)
        if moves is None:
            return None
        self.follows += 1
        course = self.follower.follow(moves)
        if int(course.memory.max()) > self.limit_bytes or bool((course.physical > self.ceiling).any()):
            return None
        return Found(modes.copy(), moves, course)

    def prices(self, noise: float = 0.0) -> Prices:
        """What moving costs as far as known, each price spread by a random factor of size ``noise``."""
        candidates = self.candidates
        offload = (
            candidates.out_compute_seconds
            + candidates.in_compute_seconds
            + self.out_price * candidates.out_seconds
            + self.in_price * candidates.in_seconds
        )
        prices = [offload + TIE_SECONDS, candidates.replay_seconds + TIE_SECONDS]
        if noise:
            prices = [price * np.exp(noise * self.random.standard_normal(self.count)) for price in prices]
        return Prices(prices[0], prices[1])

    def choose(self, modes: Modes, prices: Prices, stay: Mask, peak_only: bool, pivot: float) -> Found | None:
        """Complete ``modes`` and judge them."""
        profile = self.selector.fill(modes, prices, stay, peak_only, pivot)
        if profile is None:
            return None
        self.selector.prune(modes, profile, prices)
        return self.offer(modes, self.selector.profile(modes))

    def start(self) -> None:
        """Greedy choices from nothing, with prices that follow the stalls of the one before."""
        nothing = np.zeros(self.count, dtype=np.bool_)
        for turn in range(PRICE_ROUNDS):
            modes = np.zeros(self.count, dtype=np.int8)
            found = self.choose(modes, self.prices(), nothing, turn % 3 == 2, 0.5)
            if found is None:
                pivot = float(self.random.uniform(0.2, 0.8))
                self.choose(np.zeros(self.count, dtype=np.int8), self.prices(0.3), nothing, turn % 2 == 0, pivot)
            else:
                self._learn(found.course)

    def _learn(self, course: Course) -> None:
        """Raise the price of transfers that compute waited for, and of those right before them on the same link."""
        out_waited, in_waited = np.zeros(len(self.problem.step.absences)), np.zeros(len(self.problem.step.absences))
        outs = [transfer for transfer in course.transfers if transfer.direction == "out"]
        loads = [transfer for transfer in course.transfers if transfer.direction == "in"]
        out_place = {transfer.absence: place for place, transfer in enumerate(outs)}
        in_place = {transfer.absence: place for place, transfer in enumerate(loads)}
        for stall in course.stalls:
            if stall.reason == "load":
                first = _blame(loads, in_place[stall.absence], in_waited)
                copy = out_place[first.absence]
                if outs[copy].end_seconds >= first.start_seconds:
                    _blame(outs, copy, out_waited)
            else:
                _blame(outs, out_place[stall.absence], out_waited)
        number = self.candidates.absence
        self.out_price = PRICE_MEMORY * self.out_price + (1 - PRICE_MEMORY) * out_waited[number]
        self.in_price = PRICE_MEMORY * self.in_price + (1 - PRICE_MEMORY) * in_waited[number]

    def improve(self, work: int, enough_seconds: float) -> None:
        """Ruin and recreate the best plan until it takes ``enough_seconds``, or for about ``work`` microseconds."""
        per_follow, per_profile = self._costs()
        current = self.best
        while current is not None and self.follows * per_follow + self.selector.profiles * per_profile < work:
            assert self.best is not None
            if self.best.course.seconds <= enough_seconds:
                break
            modes = current.modes.copy()
            stay = np.zeros(self.count, dtype=np.bool_)
            self._ruin(modes, stay)
            pivot = float(self.random.uniform(0.2, 0.8))
            noise = float(self.random.choice([0.1, 0.3, 0.8]))
            found = self.choose(modes, self.prices(noise), stay, bool(self.random.integers(2)), pivot)
            if found is not None and found.course.seconds <= current.course.seconds * 1.0005:
                current = found
            elif self.random.random() < 0.02:
                current = self.best

    def _costs(self) -> tuple[float, float]:
        """Microseconds of a judgement and of a profile on a common machine: they decide how much is tried."""
        moments, both = self.problem.step.moments, self.problem.step.moments * self.count
        return 40.0 + 0.025 * moments + 3e-5 * both, 45.0 + 0.012 * moments + 1.3e-4 * both

    def _ruin(self, modes: Modes, stay: Mask) -> None:
        """Keep some moved candidates, or change how they are moved; some may not be moved again in this turn."""
        moved = np.flatnonzero(modes)
        if not moved.size:
            return
        count = int(self.random.integers(1, max(2, min(moved.size, 12)) + 1))
        if self.random.random() < 0.5:
            ranked = moved[np.argsort(self.candidates.closes[moved], kind="stable")]
            first = int(self.random.integers(0, max(1, ranked.size - count + 1)))
            chosen = ranked[first : first + count]
        else:
            chosen = self.random.choice(moved, size=min(count, moved.size), replace=False)
        kind = self.random.random()
        for place in chosen.tolist():
            if kind < 0.35 and modes[place] == OFFLOAD and self.candidates.replays[place] is not None:
                modes[place] = RECOMPUTE
            elif kind < 0.35 and modes[place] == RECOMPUTE and self.candidates.can_offload[place]:
                modes[place] = OFFLOAD
            else:
                modes[place] = KEEP
                stay[place] = kind < 0.7


def _blame(transfers: list[Transfer], place: int, waited: Floats) -> Transfer:
    """Mark a transfer and those before it without a pause; returns the first of them."""
    waited[transfers[place].absence] = 1.0
    while (
        place and transfers[place - 1].end_seconds >= transfers[place].start_seconds > transfers[place].issued_seconds
    ):
        place -= 1
        waited[transfers[place].absence] = 1.0
    return transfers[place]
