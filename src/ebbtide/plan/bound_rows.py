"""What the rules of the lower bound are written with: delay, what a link carries, pools that fill and empty.

Numbers of rules are those of NOTE [Relaxation] in `bound_program`.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.machine import Link
from ebbtide.plan.bound_absences import Absences, Needed
from ebbtide.plan.bound_blocks import Blocks
from ebbtide.plan.bound_recipes import Returns
from ebbtide.plan.linear import Program
from ebbtide.plan.problem import Problem

NARROW = 64
"""Groups between two events at most for a link's work between them to be looked at on its own: rule 11."""
LEAST_SHARE = 1e-4
"""Share of the time of all transfers that a step counts as at least, where seconds get their unit."""


@dataclasses.dataclass(frozen=True, slots=True)
class Given:
    """What the program of the bound is about.

    Attributes:
        problem: what plans are for.
        absences: those that count, and how long it takes to compute each again.
        needed: which values have to be absent, and when.
        returns: how soon they can be computed again.
        blocks: groups of blocks.
    """

    problem: Problem
    absences: Absences
    needed: Needed
    returns: Returns
    blocks: Blocks


class Rows:
    """A program in which compute may be delayed, and the rows that several rules have in common.

    Seconds and bytes are in its own units, in which a step has about 100 of each, and of seconds fewer where transfers
    take far longer.

    Args:
        given: what the program is about; its parts are attributes here, too.
        longer_seconds: by how much recipes can be longer than `Absences.replay_seconds`, as far as the program says.

    Attributes:
        unit_seconds, unit_bytes: what 1 means.
        program: what was written so far.
        stall, work: columns of the delay of each group by stalls, and by recomputation and slowed compute.
        stall_limit, extra: the most that they can be of use for.
        ready_rows, ahead_rows: rows of recomputation that is possible but not done, and done but not due.
        replay, replayed: time of each recomputation, and whose it is.
    """

    def __init__(self, given: Given, longer_seconds: float) -> None:
        problem, absences = self.problem, self.absences = given.problem, given.absences
        self.blocks = given.blocks
        self.needed, self.returns = given.needed, given.returns
        links = [link for route in problem.routes.values() for link in route]
        sizes = absences.size_bytes[absences.movable].tolist()
        moved = math.fsum(link.seconds(size) for link in links for size in sizes)
        # Where transfers take far longer than compute, they set the unit: numbers that are too large or too far apart
        # make the solver call programs infeasible that have a solution.
        self.unit_seconds = max(problem.step.plain_seconds, LEAST_SHARE * moved, 1e-9) / 100
        self.unit_bytes = max(float(problem.plain.max(initial=0)) - problem.resting_bytes, 1.0) / 100
        every = [self._link_seconds(link, absences.movable) for link in links]
        slowed = [self._lost_seconds(link, seconds) for link, seconds in zip(links, every, strict=True)]
        can_replay = np.isfinite(absences.replay_seconds)
        self.replay = absences.replay_seconds[can_replay] / self.unit_seconds
        self.replayed = np.flatnonzero(can_replay)
        self.stall_limit = 2 * sum(float(seconds.sum()) for seconds in every)
        self.extra = float(self.replay.sum()) + sum(float(seconds.sum()) for seconds in slowed)
        self.extra += longer_seconds / self.unit_seconds

        self.program = Program()
        count, waits = self.blocks.count, self.blocks.waits
        self.stall = self.program.columns(count, np.where(waits, self.stall_limit, 0.0), cost=1.0)
        self.work = self.program.columns(count, np.where(waits, self.extra, 0.0), cost=1.0)
        _, self.ready_rows = self._pool(self.extra, empty_end=True)
        self.program.put(self.ready_rows, self.work, 1.0)
        _, self.ahead_rows = self._pool(self.extra)
        self.program.put(self.ahead_rows, self.work, -1.0)

    def _link_seconds(self, link: Link, chosen: Mask) -> Floats:
        """Time of a transfer of each chosen absence."""
        seconds = link.latency_seconds + self.absences.size_bytes[chosen] / link.bandwidth_bytes_per_second
        return seconds / self.unit_seconds

    def _lost_seconds(self, link: Link, seconds: Floats) -> Floats:
        """Compute time that transfers which take ``seconds`` cost."""
        return link.compute_slowdown * seconds + link.compute_seconds / self.unit_seconds

    def _pool(self, upper: float, *, empty_end: bool = False) -> tuple[Ints, Ints]:
        """What is in a pool at the end of each group, and rows that say so: what flows in has the factor -1 in them."""
        count = self.blocks.count
        limits = np.full(count, upper)
        if empty_end:
            limits[-1] = 0.0
        columns, rows = self.program.columns(count, limits), self.program.rows(0.0, 0.0, count)
        self.program.put(rows, columns, 1.0)
        self.program.put(rows[1:], columns[:-1], -1.0)
        return columns, rows

    def _delay(self, rows: Ints, groups: Ints | slice, factor: float) -> None:
        self.program.put(rows, self.stall[groups], factor)
        self.program.put(rows, self.work[groups], factor)

    def _flow(self, upper: float) -> Ints:
        """What a link carries in each group, in seconds: rule 2."""
        columns = self.program.columns(self.blocks.count, upper)
        rows = self.program.rows(-np.inf, self.blocks.seconds / self.unit_seconds, self.blocks.count)
        self.program.put(rows, columns, 1.0)
        self._delay(rows, slice(None), -1.0)
        return columns

    def _done_by(self, flow: Ints, trips: Ints, seconds: Floats, moments: Ints) -> None:
        """Add rows that want the ``seconds`` of ``trips`` done by the events at ``moments``, as part of a link's work
        ``flow``."""
        program, due = self.program, self.blocks.group[moments]
        prepared, rows = self._pool(float(self.stall_limit))
        program.put(rows, flow, -1.0)
        program.put(rows[due], trips, seconds)
        groups = np.unique(due)
        until = self.blocks.plain_until(moments)[groups] / self.unit_seconds
        rows = program.rows(-until, np.inf, len(groups))
        later = groups > 0
        program.put(rows[later], prepared[groups[later] - 1], 1.0)
        self._delay(rows, groups, 1.0)
        program.put(rows[np.searchsorted(groups, due)], trips, -seconds)

    def _between(self, trips: Ints, seconds: Floats, begin: Ints, end: Ints, needed: Mask) -> None:
        """Add rows by which all trips that begin and end within those of a needed one are done in its time: rule 11."""
        clock, group = self.problem.clock / self.unit_seconds, self.blocks.group
        for number in np.flatnonzero(needed).tolist():
            first, last = int(group[begin[number]]), int(group[end[number]])
            inside = np.flatnonzero((begin >= begin[number]) & (end <= end[number]))
            plain = float(clock[end[number]] - clock[begin[number]])
            if last - first < NARROW and float(seconds[inside].sum()) > plain:
                row = self.program.rows(-plain, np.inf, 1)
                groups = np.arange(first, last + 1)
                self._delay(np.repeat(row, len(groups)), groups, 1.0)
                self.program.put(np.repeat(row, len(inside)), trips[inside], -seconds[inside])

    def _delayed(self, begin: int, end: int, columns: Ints, seconds: Floats) -> None:
        """Add a row that delays compute between two events by the ``seconds`` of whichever of ``columns`` is chosen."""
        groups = np.arange(self.blocks.group[begin], self.blocks.group[end] + 1)
        if len(groups) <= NARROW and (seconds > 0).any():
            row = self.program.rows(0.0, np.inf, 1)
            self._delay(np.repeat(row, len(groups)), groups, 1.0)
            self.program.put(np.repeat(row, len(columns)), columns, -np.maximum(seconds, 0.0))

    def _within(self, begin: int, end: int, columns: Ints, seconds: Floats) -> None:
        """Add a row that wants a link's work between two events: the ``seconds`` of those of ``columns`` chosen."""
        plain = float(self.problem.clock[end] - self.problem.clock[begin]) / self.unit_seconds
        groups = np.arange(self.blocks.group[begin], self.blocks.group[end] + 1)
        if len(groups) <= NARROW and float(seconds.sum()) > plain:
            row = self.program.rows(-plain, np.inf, 1)
            self._delay(np.repeat(row, len(groups)), groups, 1.0)
            self.program.put(np.repeat(row, len(columns)), columns, -seconds)
