"""A step carried out on paper: memory byte for byte, time second for second.

NOTE [What happens in a moment]
1. Storages whose life ended are gone; a value to be recomputed is gone from the moment its absence opens.
2. An event at which absences close makes their values present: it waits for a load, or queues it first if that has not
   been done, or runs the recipe. What a recipe reads is made present before it, by the same rule, and then stays.
3. The last event of a tick then acts, in this order: releases, by absence: compute waits for the copy out, then the
   bytes are free; copies out are queued, by absence; loads are queued, by moment of need: their bytes are taken.
4. Each link carries one transfer at a time, in the order they were queued. The load of a value starts after its copy
   out has ended. A transfer costs compute its `Link.lost_seconds` when it is queued.

Memory in a moment is the most that is held at any time in it. It depends on the order of the program alone, never on
durations.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.compiled import compiled
from ebbtide.errors import PlanError
from ebbtide.machine import Link
from ebbtide.plan.caution import EXPECTED, NO_CAUTION, NO_CEILING, Caution
from ebbtide.plan.course import (
    BACK_WAY,
    DEEPEST_NESTING,
    DONE,
    LOAD_WAIT,
    RATES,
    STALE,
    RecomputationRows,
    Scene,
    StallRows,
    TransferRows,
    order_actions,
    run_course,
)
from ebbtide.plan.problem import CheckedRecipe, Problem


@dataclasses.dataclass(frozen=True, slots=True)
class Transfer:
    """One copy between memories; ``out`` leaves the training device, ``in`` comes back to it."""

    absence: int
    direction: Literal["out", "in"]
    issued_seconds: float
    start_seconds: float
    end_seconds: float
    size_bytes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Stall:
    """Time for which compute waited in ``moment``: for a copy out (``release``) or for a copy back (``load``)."""

    moment: int
    seconds: float
    reason: Literal["release", "load"]
    absence: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recomputation:
    """One run of a recipe."""

    absence: int
    moment: int
    start_seconds: float
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Trip:
    """`Offload` in moments; ``load`` equals the absence's ``closes`` if the load is on demand."""

    tier: str
    out: int
    release: int
    load: int


Move = Trip | CheckedRecipe | None
"""What happens to an absence; None keeps its value."""


@dataclasses.dataclass(frozen=True)
class Course:
    """How a step went under a plan.

    Attributes:
        memory, physical: per moment the most bytes held, without and with workspaces.
        starts: per moment when it starts, in seconds.
        seconds: the end of compute.
        size_bytes: per absence the bytes of its value.
        replay_seconds: per absence the time of its recipe; of no meaning where none is run.
        sent, waited, replayed: transfers, waits and recomputations, as arrays.
    """

    memory: Ints
    physical: Ints
    starts: Floats
    seconds: float
    size_bytes: Ints
    replay_seconds: Floats
    sent: TransferRows
    waited: StallRows
    replayed: RecomputationRows

    @functools.cached_property
    def transfers(self) -> list[Transfer]:
        """Copies, in the order in which they were queued."""
        return [
            Transfer(number, "in" if way == BACK_WAY else "out", issued, start, end, int(self.size_bytes[number]))
            for number, way, issued, start, end in _rows(self.sent)
        ]

    @functools.cached_property
    def stalls(self) -> list[Stall]:
        """What compute waited for, in order."""
        return [
            Stall(moment, waited, "load" if reason == LOAD_WAIT else "release", number)
            for moment, reason, number, waited in _rows(self.waited)
        ]

    @functools.cached_property
    def recomputations(self) -> list[Recomputation]:
        """Recipes, in the order in which they ran."""
        return [
            Recomputation(number, moment, start, float(self.replay_seconds[number]))
            for number, moment, start in _rows(self.replayed)
        ]


@dataclasses.dataclass(frozen=True, slots=True)
class Moves:
    """Moves as columns: per absence the tier (or -1), the recipe (or -1), and the moments of a trip."""

    tier: Ints
    replay: Ints
    out: Ints
    release: Ints
    load: Ints

    @classmethod
    def none(cls, count: int) -> Moves:
        """``count`` absences whose values stay."""
        nothing = np.full(count, -1, dtype=np.int64)
        return cls(*(nothing.copy() for _ in dataclasses.fields(cls)))

    def send(self, number: int, tier: int, trip: Trip) -> None:
        """Let the value of absence ``number`` go on ``trip``; ``tier`` is the place of its tier in `Problem.routes`."""
        self.tier[number] = tier
        self.out[number], self.release[number], self.load[number] = trip.out, trip.release, trip.load

    def rows(self) -> Ints:
        """The columns, as the rows of one array."""
        return np.stack([getattr(self, field.name) for field in dataclasses.fields(self)])


class Follower:
    """Carries out plans of one problem with recipes known beforehand: what does not change is put in arrays once.

    Args:
        problem: the problem.
        replays: recipes that the moves may name, by their place; None is never named.
        caution: what transfers are taken to be longer for, by the share `EXPECTED` of it.
    """

    def __init__(
        self, problem: Problem, replays: Sequence[CheckedRecipe | None], caution: Caution = NO_CAUTION
    ) -> None:
        spans = problem.spans
        nothing = CheckedRecipe((), 0.0, 0, 0, 0)
        named = [nothing if replay is None else replay for replay in replays]
        first_leaf, leaves = _leaves(named, spans.storages)
        self.replays = replays
        self.tiers = {tier: place for place, tier in enumerate(problem.routes)}
        self.unlimited = np.full(problem.step.moments, NO_CEILING, dtype=np.int64)
        links = [[part for link in route for part in _rates(link)] for route in problem.routes.values()]
        self.scene = Scene(
            clock=problem.clock,
            plain=problem.plain,
            workspace=problem.workspace,
            opens=spans.opens,
            closes=spans.closes,
            size_bytes=spans.size_bytes,
            storage=spans.storage,
            storages=len(spans.storages),
            final=spans.final,
            links=np.array(links, dtype=np.float64).reshape(-1, 2 * RATES),
            late_share=EXPECTED * np.array([caution.out_share, caution.in_share]),
            late_seconds=EXPECTED * np.array([caution.out_seconds, caution.in_seconds]),
            first_leaf=first_leaf,
            leaves=leaves,
            replay_seconds=np.array([replay.seconds for replay in named], dtype=np.float64),
            replay_peak_bytes=_column(named, "peak_bytes"),
            replay_physical_peak_bytes=_column(named, "physical_peak_bytes"),
            valid_until=_column(named, "valid_until"),
        )

    def follow(self, moves: Moves) -> Course:
        """Carry out ``moves``. Raises `PlanError` as `follow` does."""
        scene = self.scene
        actions = compiled(order_actions)(scene, moves.tier, moves.replay, moves.out, moves.release, moves.load)
        ran = compiled(run_course)(scene, actions, moves.tier, moves.replay, NO_CEILING, self.unlimited, math.inf)
        if ran.ending == STALE:
            until = scene.valid_until[moves.replay[ran.absence]]
            raise PlanError(
                f"absence {ran.absence}: at moment {ran.moment} its recipe reads what was freed or written at moment"
                f" {until}"
            )
        if ran.ending != DONE:
            raise PlanError(f"absence {ran.absence}: more than {DEEPEST_NESTING} recipes wait for each other")
        return Course(
            memory=ran.memory,
            physical=ran.physical,
            starts=ran.starts[:-1],
            seconds=float(ran.starts[-1]),
            size_bytes=scene.size_bytes,
            replay_seconds=(
                scene.replay_seconds[moves.replay] if len(scene.replay_seconds) else np.zeros(len(moves.replay))
            ),
            sent=ran.sent,
            waited=ran.waited,
            replayed=ran.replayed,
        )

    def listed(self, moves: Moves) -> list[Move]:
        """``moves`` one by one."""
        tiers = list(self.tiers)
        trips = zip(moves.tier.tolist(), moves.out.tolist(), moves.release.tolist(), moves.load.tolist(), strict=True)
        return [
            self.replays[recipe] if recipe >= 0 else None if tier < 0 else Trip(tiers[tier], out, release, load)
            for recipe, (tier, out, release, load) in zip(moves.replay.tolist(), trips, strict=True)
        ]


def follow(problem: Problem, moves: Sequence[Move]) -> Course:
    """Carry out ``moves``, one for each absence. See NOTE [What happens in a moment].

    Raises:
        PlanError: if a recipe reads what is not there any more.
    """
    follower, columns = prepared(problem, moves)
    return follower.follow(columns)


def prepared(problem: Problem, moves: Sequence[Move]) -> tuple[Follower, Moves]:
    """What carries out ``moves``, as often as it is asked to, and these as columns."""
    # Long steps have tens of thousands of moves: each column is made at once.
    recomputed = {number: move for number, move in enumerate(moves) if isinstance(move, CheckedRecipe)}
    sent = {number: move for number, move in enumerate(moves) if isinstance(move, Trip)}
    columns, numbers, trips = Moves.none(len(moves)), list(sent), list(sent.values())
    follower = Follower(problem, list(recomputed.values()))
    columns.replay[list(recomputed)] = np.arange(len(recomputed))
    columns.tier[numbers] = [follower.tiers[trip.tier] for trip in trips]
    for name in ("out", "release", "load"):
        getattr(columns, name)[numbers] = _column(trips, name)
    return follower, columns


def _leaves(replays: Sequence[CheckedRecipe], storages: Mapping[int, int]) -> tuple[Ints, Ints]:
    """Where the leaves of each recipe begin, with one entry more; the leaves, as ``storages``."""
    read = [replay.leaves for replay in replays]
    ends = np.cumsum([0, *map(len, read)], dtype=np.int64)
    every = itertools.chain.from_iterable(read)
    found = np.fromiter(map(storages.get, every, itertools.repeat(-1)), np.int64, int(ends[-1]))
    known = found >= 0
    return np.concatenate(([0], np.cumsum(known)))[ends], found[known]


def _rows(columns: tuple[Ints | Floats, ...]) -> Iterator[tuple[Any, ...]]:
    """What ``columns`` of one length have in each row, as Python's numbers."""
    return zip(*(column.tolist() for column in columns), strict=True)


def _column(records: Sequence[Any], name: str) -> Ints:
    """An attribute of all ``records``."""
    return np.fromiter(map(operator.attrgetter(name), records), np.int64, len(records))


def _rates(link: Link) -> tuple[float, float, float, float]:
    return link.latency_seconds, link.bandwidth_bytes_per_second, link.compute_slowdown, link.compute_seconds
