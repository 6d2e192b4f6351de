"""Blocks of moments in the program of the lower bound: see the notes in `bound_program`."""

from __future__ import annotations

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.plan.problem import Problem


class Blocks:
    """The blocks of a step, merged into groups.

    Attributes:
        count: number of groups.
        merged: whether there are fewer groups than blocks.
        event: per moment, whether it is an event.
        block, group: per moment, the block and the group it is in.
        first_block, last_block: per group.
        start, seconds: per group, its start in the plain step and its duration there.
        waits: per group, whether compute can be delayed in it.
    """

    def __init__(self, problem: Problem, most_groups: int) -> None:
        self.clock = problem.clock
        self.event = np.zeros(problem.step.moments, dtype=np.bool_)
        self.event[problem.facts.event_moments] = True
        self.block = np.cumsum(self.event & ~np.concatenate(([False], self.event[:-1])))
        blocks = int(self.block[-1]) + 1
        self.count = min(blocks, most_groups)
        self.merged = self.count < blocks
        self.group = self.block * self.count // blocks
        bounds = np.searchsorted(self.group, np.arange(self.count + 1))
        self.first_block, self.last_block = self.block[bounds[:-1]], self.block[bounds[1:] - 1]
        self.start, self.seconds = self.clock[bounds[:-1]], np.diff(self.clock[bounds])
        self.waits = np.bincount(self.group[self.event], minlength=self.count) > 0

    def plain_until(self, moments: Ints) -> Floats:
        """Per group, the plain seconds from its start to the last of ``moments`` that is in it."""
        until = np.zeros(self.count)
        groups = self.group[moments]
        np.maximum.at(until, groups, self.clock[moments] - self.start[groups])
        return until


AFTER, WITHIN, BEFORE, CLOSING = range(4)
"""What is away in a row of memory: that of the group's end, of any time in the group, of its start as it was, and of
its start less all that closes up to the moment."""


def memory_rows(excess: Floats, blocks: Blocks, closes: Ints) -> tuple[Ints, Ints]:
    """Moments of the rows of rule 7, ascending, and the kind of each; ``excess`` are plain bytes less the limit."""
    rows: list[tuple[int, int]] = []
    highest: dict[int, float] = {}
    within: dict[int, int] = {}
    closing = set(closes.tolist())
    short: list[int] = np.flatnonzero(excess > 0).tolist()
    for moment in short:
        block, group = int(blocks.block[moment]), int(blocks.group[moment])
        if blocks.event[moment]:
            if moment in closing and block == blocks.first_block[group]:
                rows += [(moment, BEFORE), (moment, CLOSING)]
        elif block != blocks.last_block[group]:
            if group not in within or excess[moment] > excess[within[group]]:
                within[group] = moment
        elif excess[moment] > highest.get(block, 0.0):
            highest[block] = float(excess[moment])
            rows.append((moment, AFTER))
    rows += [(moment, WITHIN) for moment in within.values()]
    rows.sort()
    found = np.array(rows, dtype=np.int64).reshape(-1, 2)
    return found[:, 0], found[:, 1]
