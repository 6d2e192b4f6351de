"""Finding fast plans: greedy choice under prices that are learnt from stalls, then ruin and recreate.

The price of moving a candidate is what it costs compute, plus its transfer time where the simulator saw compute wait
for the link just then. Every complete choice of modes is scheduled and judged by the exact simulator; work is counted,
not timed, so that the same step gives the same plan on every machine.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.compiled import compiled
from ebbtide.plan.caution import NO_CAUTION, Caution
from ebbtide.plan.course import BACK_WAY, LOAD_WAIT, OUT_WAY, RELEASE_WAIT
from ebbtide.plan.fill import Manner
from ebbtide.plan.follow import Course, Follower, Move, Moves
from ebbtide.plan.needs import KEEP, OFFLOAD, RECOMPUTE, Modes, Profile
from ebbtide.plan.problem import CheckedRecipe, Problem
from ebbtide.plan.profile import Candidates, Trips
from ebbtide.plan.queues import Queue
from ebbtide.plan.schedule import Scheduler
from ebbtide.plan.select import Prices, Room, Selector
from ebbtide.plan.walk import Choices, walk

PRICE_ROUNDS = 12
"""Greedy choices from nothing, each with the prices that the one before has taught."""
PEAK_ONLY_EVERY = 3
"""Every so many greedy choices one values what is freed at the worst moment only: see `Wishes.peak_only`."""
PRICE_MEMORY = 0.6
"""Share of the former price that remains when new stalls are seen; prices of links swing without it."""
TIE_SECONDS = 1e-6
"""Seconds that are added to every price, so that among what costs nothing the largest values are taken first."""
PIVOT = 0.5
"""Where a chain of recipes is cut as a rule, as `Wishes.pivot`: in the middle."""
PIVOTS = (0.2, 0.8)
"""Least and greatest `Wishes.pivot` where it is drawn at random."""
RESTART_NOISE = 0.3
"""Size of the random factors on prices, as in `Search.prices`, after a greedy choice that did not fit."""
NOISES = (0.1, 0.3, 0.8)
"""Sizes of the random factors on prices, one of which is drawn each time that a plan is ruined and recreated."""
NEAR_BEST = 1.03
"""A plan that takes up to so many times the best one's time is scheduled again, as that may make it the best."""
SAME_TIMES = 1.0005
"""Ruin and recreate goes on from a plan that takes up to so many times the time of the one before."""
RETURN = 0.02
"""How often ruin and recreate goes back to the best plan when a change made its plan worse."""
MOST_RUINED = 12
"""Candidates that one ruin changes at most."""
RUN_TOGETHER = 0.5
"""How often the candidates of a ruin are neighbours by moment of need; else they are any."""
OTHER_WAY = 0.35
"""A ruin draws a number from 0 to 1: below this it moves its candidates in another way, where there is one. It keeps
all others."""
MAY_NOT_MOVE = 0.7
"""A ruin draws a number from 0 to 1: below this what it keeps must not be moved again in the same turn."""
OTHER_RECIPE = 0.5
"""How often a candidate that is recomputed and has several recipes gets another recipe where a ruin moves it in another
way."""
TURNS = 10
"""How often ruin and recreate and small changes take turns. With two turns plans of six hard cases and three seeds were
8.6 % above the bound in the mean instead of 7.7 %."""
EXPLORING = 0.7
"""Share of the work that goes into ruin and recreate; small changes have the rest."""


class Cost(NamedTuple):
    """Microseconds of something on a common machine.

    Attributes:
        once: whatever the problem.
        per_moment: for each moment of the step.
        per_pair: for each pair of a moment and a candidate.
    """

    once: float
    per_moment: float
    per_pair: float

    def of(self, moments: int, candidates: int) -> float:
        """The cost for a step of so many ``moments`` with so many ``candidates``."""
        return self.once + self.per_moment * moments + self.per_pair * (moments * candidates)


FOLLOW_COST = Cost(60.0, 0.01, 3e-5)
"""What it costs to judge a plan by the simulator."""
PROFILE_COST = Cost(38.0, 0.005, 2e-6)
"""What it costs to find the memory under some modes, as `Selector.profile` does."""


@dataclasses.dataclass(frozen=True, slots=True)
class Found:
    """A complete plan in the making; ``rows`` are the tiers of what is offloaded, as in `Scheduler.moves`."""

    modes: Modes
    rows: Ints
    moves: Moves
    course: Course


class Search:
    """Looks for the fastest plan of one problem within one `Room`.

    Args:
        problem: the problem.
        candidates: its candidates.
        tiers: slow tiers that may be used, by name.
        room: what memory may be used.
        seed: seed of the random choices.
        caution: time to leave free around transfers; plans are compared with some of it added to them.
    """

    def __init__(
        self,
        problem: Problem,
        candidates: Candidates,
        tiers: Sequence[str],
        room: Room,
        seed: int = 0,
        caution: Caution = NO_CAUTION,
    ) -> None:
        self.problem, self.trips = problem, Trips.of(problem, candidates, tiers)
        can_offload = np.logical_or.reduce(self.trips.possible, axis=0, dtype=np.bool_)
        self.room, self.caution = room, caution
        self._equip(dataclasses.replace(candidates, can_offload=can_offload))
        self.random = np.random.default_rng(seed)
        self.best: Found | None = None
        self.count = len(candidates.absence)
        self.out_price, self.in_price = np.zeros((len(tiers), self.count)), np.zeros((len(tiers), self.count))
        self.follows, self.walked = 0, 0.0

    def _equip(self, candidates: Candidates) -> None:
        self.candidates = candidates
        self.selector = Selector(self.problem, candidates, self.room)
        self.scheduler = Scheduler(self.problem, candidates, self.trips, self.room.cap, self.caution)
        self.follower = Follower(self.problem, candidates.replays, self.caution)
        self.choices = _choices(self.problem, candidates, self.trips)
        self.has_deeper = len(candidates.replays) > len(candidates.absence)

    def deepened(self, deeper: Sequence[Sequence[tuple[int, ...]]], seed: int) -> Search:
        """A search with ``deeper`` recipes of each candidate besides its shortest one, that goes on from here."""
        search = self.with_candidates(self.candidates.deepened(self.problem, deeper))
        search.random = np.random.default_rng(seed)
        return search

    def with_candidates(self, candidates: Candidates) -> Search:
        """A search with the same candidates and other recipes besides their own, that goes on from here."""
        search = copy.copy(self)
        search._equip(candidates)
        search.out_price, search.in_price = self.out_price.copy(), self.in_price.copy()
        return search

    def offer(self, modes: Modes, profile: Profile, rows: Ints | None = None) -> Found | None:
        """Schedule and judge ``modes``; keeps them if they are the fastest so far. None if they do not fit.

        Without ``rows`` what is offloaded goes to the first tier that may take it.
        """
        if rows is None:
            rows = self.prices().rows
        starts = self.problem.clock[:-1].copy()
        starts[1:] += np.cumsum(profile.extra_seconds)[:-1]
        found = self._schedule(modes, rows, profile, starts)
        if found is not None and (self.best is None or found.course.seconds < NEAR_BEST * self.best.course.seconds):
            # Scheduled again with what waiting and slowed compute really did to the clock.
            waits = bool((found.course.waited.reason == RELEASE_WAIT).any())
            for put_off in (False, True) if waits else (False,):
                again = self._schedule(modes, rows, profile, found.course.starts, put_off)
                if again is not None and again.course.seconds < found.course.seconds:
                    found = again
        if found is not None and (self.best is None or found.course.seconds < self.best.course.seconds):
            self.best = found
        return found

    def _schedule(
        self, modes: Modes, rows: Ints, profile: Profile, starts: Floats, put_off: bool = False
    ) -> Found | None:
        moves = self.scheduler.moves(modes, rows, profile, starts, put_off=put_off)
        course = None if moves is None else self.judge(moves)
        return None if moves is None or course is None else Found(modes.copy(), rows.copy(), moves, course)

    def eased(self, found: Found, share: float) -> Found | None:
        """``found`` with this share of the time free around transfers that others have. None if that does not fit."""
        caution = self.caution.eased(share)
        scheduler = Scheduler(self.problem, self.candidates, self.trips, self.room.cap, caution)
        moves = scheduler.moves(found.modes, found.rows, self.selector.profile(found.modes), found.course.starts)
        course = None if moves is None else self.judge(moves)
        return None if moves is None or course is None else dataclasses.replace(found, moves=moves, course=course)

    def judge(self, moves: Moves) -> Course | None:
        """What ``moves`` take, or None if they do not fit."""
        self.follows += 1
        course = self.follower.follow(moves)
        room = self.room
        fits = int(course.memory.max()) <= room.limit_bytes and not bool((course.physical > room.ceiling).any())
        return course if fits else None

    def prices(self, noise: float = 0.0) -> Prices:
        """What moving costs as far as known, each price spread by a random factor of size ``noise``."""
        candidates, trips = self.candidates, self.trips
        learnt = self.out_price * trips.out_seconds + self.in_price * trips.in_seconds
        offload = trips.compute_seconds + learnt + TIE_SECONDS
        recompute = candidates.replay_seconds[: self.count] + TIE_SECONDS
        if noise:
            offload = offload * np.exp(noise * self.random.standard_normal(offload.shape))
            recompute = recompute * np.exp(noise * self.random.standard_normal(self.count))
        if not len(trips.tiers):
            return Prices(np.full(self.count, np.inf), recompute, np.zeros(self.count, dtype=np.int64))
        offload = np.where(trips.possible, offload, np.inf)
        rows = np.argmin(offload, axis=0)
        return Prices(offload[rows, np.arange(self.count)], recompute, rows)

    def choose(self, modes: Modes, prices: Prices, manner: Manner, rows: Ints | None = None) -> Found | None:
        """Complete ``modes`` and judge them; ``rows`` are the tiers of what they offload."""
        rows = prices.rows if rows is None else np.where(modes == OFFLOAD, rows, prices.rows)
        profile = self.selector.fill(modes, prices, manner)
        if profile is None:
            return None
        self.selector.prune(modes, profile, prices)
        return self.offer(modes, self.selector.profile(modes), rows)

    def start(self, deepen: bool = False) -> None:
        """Greedy choices from nothing, with prices that follow the stalls of the one before."""
        nothing = np.zeros(self.count, dtype=np.bool_)
        for turn in range(PRICE_ROUNDS):
            modes = np.zeros(self.count, dtype=np.int8)
            manner = Manner(nothing, peak_only=(turn + 1) % PEAK_ONLY_EVERY == 0, pivot=PIVOT, deepen=deepen)
            found = self.choose(modes, self.prices(), manner)
            if found is None:
                pivot = float(self.random.uniform(*PIVOTS))
                modes = np.zeros(self.count, dtype=np.int8)
                manner = Manner(nothing, peak_only=turn % 2 == 0, pivot=pivot, deepen=deepen)
                self.choose(modes, self.prices(RESTART_NOISE), manner)
            else:
                self._learn(found)

    def start_from(self, offloaded: Floats, recomputed: Floats) -> None:
        """Start with what is moved by a larger share than kept; shares are per absence."""
        number, nothing = self.candidates.absence, np.zeros(self.count, dtype=np.bool_)
        offload = np.where(self.candidates.can_offload, offloaded[number], 0.0)
        recompute = np.where(self.candidates.can_recompute, recomputed[number], 0.0)
        moved = np.where(offload > recompute, OFFLOAD, RECOMPUTE)
        for peak_only in (False, True):
            modes = np.where(offload + recompute > 0.5, moved, KEEP).astype(np.int8)
            self.choose(modes, self.prices(), Manner(nothing, peak_only, PIVOT, deepen=True))

    def _learn(self, found: Found) -> None:
        """Raise the price of transfers that compute waited for, and of those right before them on the same link."""
        number, absences = self.candidates.absence, len(self.problem.step.absences)
        sent, waited = found.course.sent, found.course.waited
        row_of = np.zeros(absences, dtype=np.int64)
        row_of[number] = found.rows
        for row in range(len(self.trips.tiers)):
            carried, stalled = row_of[sent.absence] == row, row_of[waited.absence] == row
            outs = Queue.of(sent, carried & (sent.way == OUT_WAY), absences)
            loads = Queue.of(sent, carried & (sent.way == BACK_WAY), absences)
            released = waited.absence[stalled & (waited.reason == RELEASE_WAIT)]
            awaited = waited.absence[stalled & (waited.reason == LOAD_WAIT)]
            in_waited, first = loads.blame(awaited)
            copies = outs.place[loads.absence[first]]
            late = outs.end[copies] >= loads.start[first]
            out_waited, _ = outs.blame(np.concatenate((released, outs.absence[copies[late]])))
            self.out_price[row] = PRICE_MEMORY * self.out_price[row] + (1 - PRICE_MEMORY) * out_waited[number]
            self.in_price[row] = PRICE_MEMORY * self.in_price[row] + (1 - PRICE_MEMORY) * in_waited[number]

    def improve(self, work: float, enough_seconds: float) -> None:
        """Look for faster plans than the best until it takes ``enough_seconds``, or for about ``work`` microseconds.

        Ruin and recreate explores; small changes then finish what it found, and it goes on from there.
        """
        for turn in range(TURNS):
            self._explore((turn + EXPLORING) / TURNS * work, enough_seconds)
            self._polish((turn + 1) / TURNS * work, enough_seconds)

    def _goes_on(self, work: float, enough_seconds: float) -> bool:
        """Whether the best plan still takes longer and fewer than ``work`` microseconds were spent."""
        return self.best is not None and self.best.course.seconds > enough_seconds and self.spent() < work

    def spent(self) -> float:
        """Microseconds spent so far on a common machine: they decide how much is tried."""
        size = self.problem.step.moments, self.count
        return self.walked + self.follows * FOLLOW_COST.of(*size) + self.selector.profiles * PROFILE_COST.of(*size)

    def _explore(self, work: float, enough_seconds: float) -> None:
        current = self.best
        while current is not None and self._goes_on(work, enough_seconds):
            modes = current.modes.copy()
            stay = np.zeros(self.count, dtype=np.bool_)
            self._ruin(modes, stay)
            pivot = float(self.random.uniform(*PIVOTS))
            noise = float(self.random.choice(NOISES))
            prices = self.prices(noise)
            peak_only = bool(self.random.integers(2))
            deepen = self.has_deeper and bool(self.random.integers(2))
            found = self.choose(modes, prices, Manner(stay, peak_only, pivot, deepen), current.rows)
            if found is not None and found.course.seconds <= current.course.seconds * SAME_TIMES:
                current = found
            elif self.random.random() < RETURN:
                current = self.best

    def _polish(self, work: float, enough_seconds: float) -> None:
        if self.best is None or not self.count or not self._goes_on(work, enough_seconds):
            return
        room, start, seed = self.room, self.best.moves.rows(), int(self.random.integers(1 << 31))
        left = work - self.spent()
        rows, seconds, spent = compiled(walk)(
            self.follower.scene, self.choices, start, room.limit_bytes, room.ceiling, left, enough_seconds, seed
        )
        self.walked += spent
        if seconds < self.best.course.seconds:
            self.adopt(Moves(*rows))

    def consider(self, moves: Sequence[Move], cost: float) -> None:
        """`adopt` moves made elsewhere at ``cost`` microseconds, unless they have other recipes than the candidates."""
        self.walked += cost
        columns = Moves.none(len(moves))
        places = {number: place for place, number in enumerate(self.candidates.absence.tolist())}
        for number, move in enumerate(moves):
            if isinstance(move, CheckedRecipe):
                recipe = self._recipe(places.get(number), move)
                if recipe is None:
                    return
                columns.replay[number] = recipe
            elif move is not None:
                columns.send(number, self.follower.tiers[move.tier], move)
        self.adopt(columns)

    def _recipe(self, place: int | None, replay: CheckedRecipe) -> int | None:
        """The number of the candidate's recipe that is the same as ``replay``, or None."""
        if place is None:
            return None
        first, last = self.candidates.first_deeper[place : place + 2].tolist()
        same = (number for number in (place, *range(first, last)) if self.candidates.replays[number] == replay)
        return next(same, None)

    def adopt(self, moves: Moves) -> None:
        """Judge complete moves, and keep them if they fit and are the fastest so far."""
        course = self.judge(moves)
        if course is None or (self.best is not None and course.seconds >= self.best.course.seconds):
            return
        number = self.candidates.absence
        tier, replay = moves.tier[number], moves.replay[number]
        modes = np.where(tier >= 0, OFFLOAD, KEEP).astype(np.int8)
        for place in np.flatnonzero(replay >= 0).tolist():
            modes[place] = self.candidates.mode(place, int(replay[place]))
        rows = self.prices().rows
        if len(self.trips.tiers):
            rows = np.where(modes == OFFLOAD, np.searchsorted(self.trips.tiers, tier), rows)
        self.best = Found(modes, rows, moves, course)

    def _ruin(self, modes: Modes, stay: Mask) -> None:
        """Keep some moved candidates, or change how they are moved; some may not be moved again in this turn."""
        moved = np.flatnonzero(modes)
        if not moved.size:
            return
        count = int(self.random.integers(1, max(2, min(moved.size, MOST_RUINED)) + 1))
        if self.random.random() < RUN_TOGETHER:
            ranked = moved[np.argsort(self.candidates.closes[moved], kind="stable")]
            first = int(self.random.integers(0, max(1, ranked.size - count + 1)))
            chosen = ranked[first : first + count]
        else:
            chosen = self.random.choice(moved, size=min(count, moved.size), replace=False)
        kind, deepest = self.random.random(), self.selector.deepest
        for place in chosen.tolist():
            has_several = modes[place] >= RECOMPUTE and deepest[place] > RECOMPUTE
            if kind < OTHER_WAY and has_several and self.random.random() < OTHER_RECIPE:
                modes[place] = self.random.integers(RECOMPUTE, deepest[place] + 1)
            elif kind < OTHER_WAY and modes[place] == OFFLOAD and self.candidates.replays[place] is not None:
                modes[place] = RECOMPUTE
            elif kind < OTHER_WAY and modes[place] >= RECOMPUTE and self.candidates.can_offload[place]:
                modes[place] = OFFLOAD
            else:
                modes[place] = KEEP
                stay[place] = kind < MAY_NOT_MOVE


def _choices(problem: Problem, candidates: Candidates, trips: Trips) -> Choices:
    return Choices(
        absence=candidates.absence,
        opens=candidates.opens,
        closes=candidates.closes,
        out=candidates.out,
        release=candidates.release,
        final=problem.spans.final[candidates.absence],
        can_recompute=candidates.can_recompute,
        first_deeper=candidates.first_deeper,
        possible=trips.possible,
        in_seconds=trips.in_seconds,
        tiers=trips.tiers,
        slots=np.array(problem.facts.slots, dtype=np.int64),
    )
