"""A step carried out on paper: memory byte for byte, time second for second.

NOTE [What happens in a moment]
1. Storages whose life ended are gone; a value to be recomputed is gone from the moment its absence opens.
2. An event at which absences close makes their values present: it waits for a load, or queues it first if that has not
   been done, or runs the recipe. What a recipe reads is made present before it, by the same rule, and then stays.
3. The last event of a tick then acts, in this order: releases, by absence: compute waits for the copy out, then the
   bytes are free; copies out are queued, by absence; loads are queued, by moment of need: their bytes are taken.
4. Each link carries one transfer at a time, in the order they were queued. The load of a value starts after its copy
   out has ended. A transfer costs compute its `Link.compute_slowdown` when it is queued.

Memory in a moment is the most that is held at any time in it. It depends on the order of the program alone, never on
durations.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ebbtide.errors import PlanError
from ebbtide.machine import Link
from ebbtide.plan.problem import Floats, Ints, Problem
from ebbtide.plan.replay import Replay


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


Move = Trip | Replay | None
"""What happens to an absence; None keeps its value."""


@dataclasses.dataclass(frozen=True, slots=True)
class Course:
    """What `follow` found: memory with and without workspaces per moment, start of each moment, and the end."""

    memory: Ints
    physical: Ints
    starts: Floats
    seconds: float
    transfers: list[Transfer]
    stalls: list[Stall]
    recomputations: list[Recomputation]


def follow(problem: Problem, moves: Sequence[Move]) -> Course:
    """Carry out ``moves``, one for each absence. See NOTE [What happens in a moment].

    Raises:
        PlanError: if a recipe reads what is not there any more.
    """
    run = _Run(problem, moves)
    for moment, phase, _, number in _script(problem, moves):
        if moment != run.moment:
            run.enter(moment)
        run.act(phase, number)
    return run.finish()


_GONE, _NEED, _RELEASE, _OUT, _LOAD = range(5)
_PRESENT, _AWAY, _COMING = range(3)

DEEPEST_NESTING = 100
"""Recipes that wait for each other at most, each for a value that the next one makes; Python's own stack is finite."""


def _script(problem: Problem, moves: Sequence[Move]) -> list[tuple[int, int, int, int]]:
    """What is to be done, in order: moment, phase, rank within the phase, absence."""
    script: list[tuple[int, int, int, int]] = []
    for number, move in enumerate(moves):
        if move is None:
            continue
        absence = problem.step.absences[number]
        script.append((absence.closes, _NEED, number, number))
        if isinstance(move, Replay):
            script.append((absence.opens, _GONE, number, number))
            continue
        script.append((move.out, _OUT, number, number))
        script.append((move.release, _RELEASE, number, number))
        if move.load < absence.closes:
            script.append((move.load, _LOAD, absence.closes, number))
    script.sort()
    return script


class _Wire:
    """One direction of transfer of one tier."""

    __slots__ = ("direction", "free_seconds", "link")

    def __init__(self, link: Link, direction: Literal["out", "in"]) -> None:
        self.link = link
        self.direction = direction
        self.free_seconds = 0.0


class _Run:
    """The state of a step under way: what is where, the time, the bytes relative to the plain step."""

    def __init__(self, problem: Problem, moves: Sequence[Move]) -> None:
        self.problem = problem
        self.moves = moves
        self.wires = {tier: (_Wire(out, "out"), _Wire(back, "in")) for tier, (out, back) in problem.routes.items()}
        self.state = [_PRESENT] * len(moves)
        self.absent: dict[int, int] = {}
        self.written = [0.0] * len(moves)
        self.loaded = [0.0] * len(moves)
        self.moment = -1
        self.depth = 0
        self.delay = 0.0
        self.offset = self.high = self.physical_high = 0
        self.marks: list[tuple[int, int, int, int, float]] = []
        self.transfers: list[Transfer] = []
        self.stalls: list[Stall] = []
        self.recomputations: list[Recomputation] = []

    @property
    def now(self) -> float:
        """Compute's clock, seconds."""
        return float(self.problem.clock[self.moment]) + self.delay

    def enter(self, moment: int) -> None:
        """Close the last moment and go on to ``moment``."""
        self._mark()
        self.moment = moment
        self.high = self.physical_high = self.offset

    def act(self, phase: int, number: int) -> None:
        """Do one thing of the script."""
        if phase == _NEED:
            self._bring(number)
        elif phase == _LOAD:
            if self.state[number] == _AWAY:
                self._load(number)
        elif phase == _OUT:
            move = self.moves[number]
            assert isinstance(move, Trip)
            self.written[number] = self._send(self.wires[move.tier][0], number, 0.0)
        else:
            if phase == _RELEASE:
                self._wait(self.written[number], number, "release")
            self._drop(number)
            if phase == _GONE:
                self.high = self.physical_high = self.offset

    def finish(self) -> Course:
        """Memory and time of the whole step."""
        self._mark()
        problem = self.problem
        count = problem.step.moments
        offsets, delays = np.zeros(count, dtype=np.int64), np.zeros(count + 1)
        before, waited = 0, 0.0
        for moment, _, _, after, delay in self.marks:
            offsets[moment] = after - before
            delays[moment + 1] = delay - waited
            before, waited = after, delay
        memory = problem.plain + np.cumsum(offsets)
        physical = memory + problem.workspace
        for moment, high, physical_high, _, _ in self.marks:
            memory[moment] = problem.plain[moment] + high
            physical[moment] = problem.plain[moment] + max(high + problem.workspace[moment], physical_high)
        starts = problem.clock + np.cumsum(delays)
        return Course(
            memory, physical, starts[:count], float(starts[count]), self.transfers, self.stalls, self.recomputations
        )

    def _mark(self) -> None:
        if self.moment >= 0:
            self.marks.append((self.moment, self.high, self.physical_high, self.offset, self.delay))

    def _size(self, number: int) -> int:
        return self.problem.step.values[self.problem.step.absences[number].value].size_bytes

    def _storage(self, number: int) -> int:
        return self.problem.step.values[self.problem.step.absences[number].value].storage

    def _drop(self, number: int) -> None:
        self.state[number] = _AWAY
        self.absent[self._storage(number)] = number
        self.offset -= self._size(number)

    def _take(self, number: int) -> None:
        self.offset += self._size(number)
        self.high = max(self.high, self.offset)

    def _load(self, number: int) -> None:
        move = self.moves[number]
        assert isinstance(move, Trip)
        self._take(number)
        self.loaded[number] = self._send(self.wires[move.tier][1], number, self.written[number])
        self.state[number] = _COMING

    def _send(self, wire: _Wire, number: int, after_seconds: float) -> float:
        """Queue a transfer; returns its end."""
        size_bytes, now = self._size(number), self.now
        seconds = wire.link.seconds(size_bytes)
        start = max(now, wire.free_seconds, after_seconds)
        wire.free_seconds = start + seconds
        self.delay += wire.link.compute_slowdown * seconds
        self.transfers.append(Transfer(number, wire.direction, now, start, start + seconds, size_bytes))
        return start + seconds

    def _wait(self, until_seconds: float, number: int, reason: Literal["release", "load"]) -> None:
        seconds = until_seconds - self.now
        if seconds > 0:
            self.delay += seconds
            self.stalls.append(Stall(self.moment, seconds, reason, number))

    def _bring(self, number: int) -> None:
        """Make the value of an absence present: point 2 of the note."""
        if self.state[number] == _PRESENT:
            return
        move = self.moves[number]
        if isinstance(move, Replay):
            self._recompute(number, move)
        else:
            if self.state[number] == _AWAY:
                self._load(number)
            self._wait(self.loaded[number], number, "load")
        self.state[number] = _PRESENT
        del self.absent[self._storage(number)]

    def _recompute(self, number: int, replay: Replay) -> None:
        if self.moment >= replay.valid_until:
            raise PlanError(
                f"absence {number}: at moment {self.moment} its recipe reads what was freed or written at moment"
                f" {replay.valid_until}"
            )
        self.depth += 1
        # The depth is checked before anything is brought: Python's own limit would end the recursion less kindly.
        if self.depth > DEEPEST_NESTING:
            raise PlanError(f"absence {number}: more than {DEEPEST_NESTING} recipes wait for each other")
        for storage in replay.leaves:
            if storage in self.absent:
                self._bring(self.absent[storage])
        self.depth -= 1
        self.high = max(self.high, self.offset + replay.peak_bytes)
        self.physical_high = max(self.physical_high, self.offset + replay.physical_peak_bytes)
        self._take(number)
        self.recomputations.append(Recomputation(number, self.moment, self.now, replay.seconds))
        self.delay += replay.seconds
