"""What the lower bound says about the values that recipes read: rule 14 of NOTE [Relaxation] in `bound_program`."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence, Set
from typing import NamedTuple

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.plan.bound_absences import Absences, Needed
from ebbtide.plan.bound_recipes import Again
from ebbtide.plan.bound_rows import Given
from ebbtide.plan.bound_single import Single
from ebbtide.plan.problem import Problem
from ebbtide.plan.replay import is_replayable

Moments = dict[int, list[int]]
"""Ascending moments, by place of an absence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """Something that every recipe of a value reads unless it makes it itself.

    Attributes:
        reader: place of the absence whose value is computed again.
        read: place of an absence of what is read, open before the recipe can run and until after it has run.
        maker: the op that makes what is read.
        seconds: time of that op; infinite if it cannot be run again.
    """

    reader: int
    read: int
    maker: int
    seconds: float


class Parts(NamedTuple):
    """What comes back, or leaves, and when: one entry for each column that says so.

    Attributes:
        which: place of the value in an array of the caller's.
        columns: column of the program with the share of the value that is meant.
        signs: 1 where that share is added, -1 where it is taken off.
        moments: when that happens.
    """

    which: Ints
    columns: Ints
    signs: Floats
    moments: Ints

    def some(self, chosen: Mask) -> Parts:
        """The entries of values that are ``chosen``, by their place in the array."""
        kept = chosen[self.which]
        return Parts(self.which[kept], self.columns[kept], self.signs[kept], self.moments[kept])


def reads_of(
    problem: Problem, absences: Absences, needed: Needed, again: Sequence[Again], banned: Set[int]
) -> list[Read]:
    """What the recipes of the ``absences`` read; ``again`` is per absence of the step."""
    step = problem.step
    never = step.values_of(banned)
    by_value: dict[int, list[int]] = {}
    for where, number in enumerate(absences.number.tolist()):
        by_value.setdefault(step.absences[number].value, []).append(where)
    found = []
    for reader, number in enumerate(absences.number.tolist()):
        if math.isinf(absences.replay_seconds[reader]):
            continue
        runs_from, runs_by = needed.again_from[reader], absences.closes[reader]
        for value in again[number].reads:
            maker = step.values[value].maker
            can_run = maker >= 0 and value not in never and is_replayable(problem.facts, maker)
            seconds = step.ops[maker].duration_seconds if can_run else math.inf
            found += [
                Read(reader, read, maker, seconds)
                for read in by_value.get(value, ())
                if absences.opens[read] < runs_from and runs_by < absences.closes[read]
            ]
    return found


class Reading(Single):
    """Rows about what recipes read.

    Args:
        given: as in `Rows`.
        reads: from `reads_of`.
    """

    def __init__(self, given: Given, reads: Sequence[Read]) -> None:
        makers = {(read.reader, read.maker): read.seconds for read in reads if math.isfinite(read.seconds)}
        super().__init__(given, math.fsum(makers.values()))
        self.reads, self.makers = reads, makers
        self.early, self.late = self._moments()
        self.back_by: dict[tuple[int, int], list[int]] = {}
        self.leaves_after: dict[tuple[int, int], list[int]] = {}

    def _moments(self) -> tuple[Moments, Moments]:
        """By which moments what is read may have to be back before it closes; after which it may leave instead."""
        absences, needed = self.absences, self.needed
        early: dict[int, set[int]] = {}
        late: dict[int, set[int]] = {}
        for read in self.reads:
            early.setdefault(read.read, set()).add(int(absences.closes[read.reader]))
            runs_from = int(needed.again_from[read.reader])
            if not needed.absent[read.read] or needed.leaves_by[read.read] >= runs_from:
                late.setdefault(read.read, set()).add(runs_from)
        early_moments, late_moments = (
            {where: sorted(moments) for where, moments in found.items()} for found in (early, late)
        )
        return early_moments, late_moments

    def _back(self, chosen: Ints, columns: Ints) -> Parts:
        """When what ``columns`` move, one for each place in ``chosen``, has to be back."""
        rows: list[tuple[int, int, float, int]] = []
        for which, (where, whole) in enumerate(zip(chosen.tolist(), columns.tolist(), strict=True)):
            moments = self.early.get(where, [])
            parts = [*self._rising(len(moments), whole), whole]
            last: int | None = None
            for part, moment in zip(parts, [*moments, int(self.absences.closes[where])], strict=True):
                if part != whole:
                    self.back_by.setdefault((where, moment), []).append(part)
                rows.append((which, part, 1.0, moment))
                if last is not None:
                    rows.append((which, last, -1.0, moment))
                last = part
        return _parts(rows)

    def _leaving(self, chosen: Ints, columns: Ints) -> Parts:
        """From when on what ``columns`` move, one for each place in ``chosen``, may be released."""
        rows: list[tuple[int, int, float, int]] = []
        for which, (where, whole) in enumerate(zip(chosen.tolist(), columns.tolist(), strict=True)):
            moments = self.late.get(where, [])
            last, moment = whole, int(self.absences.release[where])
            for part, after in zip(reversed(self._rising(len(moments), whole)), moments, strict=True):
                self.leaves_after.setdefault((where, after), []).append(part)
                rows += [(which, last, 1.0, moment), (which, part, -1.0, moment)]
                last, moment = part, max(moment, after)
            rows.append((which, last, 1.0, moment))
        return _parts(rows)

    def _rising(self, count: int, whole: int) -> list[int]:
        """Columns each of which is no larger than the next one, the last no larger than the column ``whole``."""
        parts = self.program.columns(count, 1.0)
        rows = self.program.rows(0.0, np.inf, count)
        self.program.put(rows, parts, -1.0)
        self.program.put(rows, np.append(parts, whole)[1:], 1.0)
        found: list[int] = parts.tolist()
        return found

    def add_reads(self) -> None:
        """What recipes read is there, or comes back for them, or is made again by them: rule 14."""
        absences, needed, program, group = self.absences, self.needed, self.program, self.blocks.group
        made = dict(zip(self.makers, program.columns(len(self.makers), 1.0).tolist(), strict=True))
        if made:
            readers = np.array([reader for reader, _ in made], dtype=np.int64)
            columns = np.array(list(made.values()), dtype=np.int64)
            seconds = np.array(list(self.makers.values())) / self.unit_seconds
            program.put(self.ready_rows[group[needed.again_from[readers]]], columns, -seconds)
            program.put(self.ahead_rows[group[absences.closes[readers]]], columns, seconds)
        for read in self.reads:
            moved = [self.columns_of[read.reader][-1], *self.columns_of[read.read]]
            allowed = [
                *self.back_by.get((read.read, int(absences.closes[read.reader])), ()),
                *self.leaves_after.get((read.read, int(needed.again_from[read.reader])), ()),
            ]
            if (read.reader, read.maker) in made:
                allowed.append(made[read.reader, read.maker])
            row = program.rows(-np.inf, 1.0, 1)
            program.put(np.repeat(row, len(moved)), np.array(moved, dtype=np.int64), 1.0)
            program.put(np.repeat(row, len(allowed)), np.array(allowed, dtype=np.int64), -1.0)


def _parts(rows: Sequence[tuple[int, int, float, int]]) -> Parts:
    which, columns, signs, moments = zip(*rows, strict=True) if rows else ((), (), (), ())
    return Parts(
        np.array(which, dtype=np.int64),
        np.array(columns, dtype=np.int64),
        np.array(signs, dtype=np.float64),
        np.array(moments, dtype=np.int64),
    )
