"""What the lower bound says about single values rather than about flows of bytes: they move whole, or not at all.

Numbers of rules are those of NOTE [Relaxation] in `bound_program`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence, Set

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.plan.bound_crowds import crowds_of
from ebbtide.plan.bound_rows import NARROW, Given, Rows


class Single(Rows):
    """Rows about values that have to be absent at some moment.

    Args:
        given, longer_seconds: as in `Rows`.

    Attributes:
        columns_of: by place of an absence the columns that say how it moves: one for each tier if it can be moved to
            them, then that of its recomputation if it has a recipe.
    """

    def __init__(self, given: Given, longer_seconds: float) -> None:
        super().__init__(given, longer_seconds)
        self.columns_of: list[list[int]] = [[] for _ in given.absences.number]

    def add_needed(self) -> None:
        """Add rows about values that have to be absent at some moment: rule 11."""
        absences, needed, clock = self.absences, self.needed, self.problem.clock / self.unit_seconds
        ways = [
            (self._link_seconds(out, absences.movable), self._link_seconds(back, absences.movable))
            for out, back in self.problem.routes.values()
        ]
        rank = np.cumsum(absences.movable) - 1
        where = {number: here for here, number in enumerate(absences.number.tolist())}
        for number in np.flatnonzero(needed.absent).tolist():
            columns = np.array(self.columns_of[number], dtype=np.int64)
            self.program.put(np.repeat(self.program.rows(1.0, np.inf, 1), len(columns)), columns, 1.0)
            tiers = [(out[rank[number]], back[rank[number]]) for out, back in ways] if absences.movable[number] else []
            out_seconds, in_seconds = np.array(tiers, dtype=np.float64).reshape(-1, 2).T
            opens, leaves_by = int(absences.out[number]), int(needed.leaves_by[number])
            back_from, closes = int(needed.back_from[number]), int(absences.closes[number])
            self._delayed(opens, leaves_by, columns[: len(tiers)], out_seconds - (clock[leaves_by] - clock[opens]))
            plain = float(clock[closes] - clock[back_from])
            again = absences.replay_seconds[number] / self.unit_seconds
            delays = np.array([*(in_seconds - plain), again][: len(columns)])
            self._delayed(back_from, closes, columns, delays)
            if np.isfinite(again) and not self.blocks.merged:
                self._returned(number, columns, delays, plain, where)
                self._queued(number, [back for _, back in ways])

    def add_crowds(self, excess: Floats, moments: Ints) -> None:
        """Add rows about large values that cannot all be held at some of ``moments``: rule 13."""
        absences, links = self.absences, list(self.problem.routes.values())
        seconds = np.full((2, len(links), len(absences.size_bytes)), np.inf)
        for tier, route in enumerate(links):
            for way, link in enumerate(route):
                seconds[way, tier, absences.movable] = self._link_seconds(link, absences.movable)
        least = seconds.min(axis=1, initial=np.inf) * self.unit_seconds
        parts: dict[tuple[bool, int], dict[int, Ints]] = {}
        for crowd in crowds_of(self.problem, absences, excess, moments, least[0], least[1]):
            away: list[int] = []
            for member in crowd.members:
                every = self.columns_of[member.place]
                trips = every[: len(links)] if absences.movable[member.place] else []
                away += every[len(trips) :]
                if member.gone:
                    known = parts.setdefault((member.soon, member.event), {})
                    if member.place not in known:
                        known[member.place] = self._part_of(trips)
                    away += known[member.place].tolist()
            row = self.program.rows(float(len(crowd.members) - crowd.held), np.inf, 1)
            self.program.put(np.repeat(row, len(away)), np.array(away, dtype=np.int64), 1.0)
        for (soon, event), known in parts.items():
            numbers = np.array(list(known), dtype=np.int64)
            ends = (absences.closes if soon else absences.out)[numbers]
            for tier, end in itertools.product(range(len(links)), np.unique(ends).tolist()):
                inside = ends <= end if soon else ends >= end
                columns = np.array([known[number][tier] for number in numbers[inside].tolist()])
                begin, until = (event, end) if soon else (end, event)
                self._within(begin, until, columns, seconds[int(soon), tier, numbers[inside]])

    def _part_of(self, whole: Sequence[int]) -> Ints:
        """A column for each of ``whole`` that is no larger."""
        parts = self.program.columns(len(whole), 1.0)
        rows = self.program.rows(0.0, np.inf, len(parts))
        self.program.put(rows, np.array(whole), 1.0)
        self.program.put(rows, parts, -1.0)
        return parts

    def _queued(self, number: int, in_seconds: Sequence[Floats]) -> None:
        """Add rows by which a value is computed again after the loads of what its recipe reads: rule 12."""
        absences, needed, clock = self.absences, self.needed, self.problem.clock / self.unit_seconds
        begin, end = int(needed.back_from[number]), int(absences.closes[number])
        groups = np.arange(self.blocks.group[begin], self.blocks.group[end] + 1)
        starts = np.maximum(absences.release, needed.back_from)
        inside = absences.movable & (starts >= begin) & (absences.closes < needed.again_from[number])
        inside[number] = absences.movable[number]
        others = np.flatnonzero(inside)
        if len(groups) > NARROW or not len(others):
            return
        rank = np.cumsum(absences.movable) - 1
        for tier, seconds in enumerate(in_seconds):
            columns = np.array([self.columns_of[other][tier] for other in others], dtype=np.int64)
            row = self.program.rows(float(clock[begin] - clock[end]), np.inf, 1)
            self._delay(np.repeat(row, len(groups)), groups, 1.0)
            self.program.put(np.repeat(row, len(columns)), columns, -seconds[rank[others]])
            replay = np.array([-absences.replay_seconds[number] / self.unit_seconds])
            self.program.put(row, np.array(self.columns_of[number][-1:]), replay)

    def _returned(self, number: int, columns: Ints, delays: Floats, plain: float, where: Mapping[int, int]) -> None:
        """Add rows by which a value that is computed again is back after what it is computed from: rule 12."""
        absences, needed = self.absences, self.needed
        begin, end = int(needed.back_from[number]), int(absences.closes[number])
        groups = np.arange(self.blocks.group[begin], self.blocks.group[end] + 1)
        if len(groups) > NARROW:
            return
        again_from = int(needed.again_from[number])

        def seconds(kept: Set[int]) -> tuple[float, set[int]]:
            found, loaded = self.returns.seconds(int(absences.number[number]), again_from, kept)
            return max(found / self.unit_seconds - plain, float(delays[-1])), loaded

        least, loaded = seconds(frozenset())
        load_seconds = {other: self.returns.load_seconds[other] for other in loaded}
        for longest in (-1.0, *sorted(filter(math.isfinite, set(load_seconds.values())))):
            kept = {other for other in loaded if load_seconds[other] <= longest}
            longer = max(least, seconds(kept)[0])
            trips = [column for other in kept for column in self.columns_of[where[other]][: len(self.problem.routes)]]
            others = np.array(trips, dtype=np.int64)
            row = self.program.rows(0.0, np.inf, 1)
            if math.isinf(longer):
                self.program.put(np.repeat(row, len(others)), others, 1.0)
                self.program.put(row, columns[-1:], -1.0)
                return
            self._delay(np.repeat(row, len(groups)), groups, 1.0)
            self.program.put(np.repeat(row, len(columns)), columns, -np.array([*delays[:-1], longer]))
            self.program.put(np.repeat(row, len(others)), others, longer - least)
