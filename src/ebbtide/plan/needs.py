"""The inner loop of `profile`: which values are brought back when, because something else is computed from them.

Modes, which it is given, are defined here: `Modes`, `KEEP`, `OFFLOAD` and `RECOMPUTE`.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.plan.course import DEEPEST_NESTING

Modes = npt.NDArray[np.int8]

KEEP, OFFLOAD, RECOMPUTE = range(3)
"""Modes: one for each candidate. `RECOMPUTE` is by its shortest recipe; numbers above are its deeper recipes."""


class Needs(NamedTuple):
    """What is known of some candidates, as arrays.

    Attributes:
        plain, headroom: per moment, bytes without a plan, and what workspaces of recomputed ops may take besides.
        size_bytes, opens, closes, release: per candidate.
        order: candidates by moment of need.
        first_deeper: per candidate the number of its first deeper recipe; that of the shortest is the candidate's own.
        first_leaf, leaves: per recipe where its leaves begin, with one entry more; leaves, as candidates that it reads.
        replay_seconds: per recipe.
        replay_bytes: per recipe the most bytes, and the same with workspaces.
    """

    plain: Ints
    headroom: Ints
    size_bytes: Ints
    opens: Ints
    closes: Ints
    release: Ints
    order: Ints
    first_deeper: Ints
    first_leaf: Ints
    leaves: Ints
    replay_seconds: Floats
    replay_bytes: Ints


class Profile(NamedTuple):
    """Memory under some modes.

    Attributes:
        level: bytes per moment with every release and load at its least; a moment's recomputations included.
        begin, end: moments between which a candidate is absent in `level`.
        parent: per candidate, the one whose recipe brought it back before its own time, or -1.
        busy: per moment, whether something is brought back in it.
        extra_seconds: recomputation per moment.
        nested: whether recipes wait for each other too deeply for this to be run.
    """

    level: Ints
    begin: Ints
    end: Ints
    parent: Ints
    busy: Mask
    extra_seconds: Floats
    nested: bool


def bring_back(needs: Needs, modes: Modes) -> Profile:
    """Memory under ``modes``, one for each candidate, with every release and load at its least.

    Recipes are gone through in here because they share all of the state with what they wait for; recursion is a stack.
    """
    size_bytes, closes, first_leaf = needs.size_bytes, needs.closes, needs.first_leaf
    moments, count = len(needs.plain), len(modes)
    begin, end, parent = needs.opens.copy(), closes.copy(), np.full(count, -1, np.int64)
    done, recipe = np.zeros(count, np.bool_), np.arange(count)
    for place in range(count):
        if modes[place] == OFFLOAD:
            begin[place] = needs.release[place]
        elif modes[place] > RECOMPUTE:
            recipe[place] = needs.first_deeper[place] + modes[place] - RECOMPUTE - 1
    extra_seconds, excess = np.zeros(moments), np.zeros(moments, np.int64)
    waiting, position = np.empty(DEEPEST_NESTING + 2, np.int64), np.empty(DEEPEST_NESTING + 2, np.int64)
    nested = False
    for first in needs.order:
        if modes[first] < RECOMPUTE or done[first]:
            continue
        moment, added, high, depth = closes[first], 0, 0, 0
        waiting[0], position[0], parent[first] = first, -1, -1
        while depth >= 0:
            place = waiting[depth]
            if position[depth] < 0:
                done[place], end[place] = True, moment
                position[depth] = first_leaf[recipe[place]]
                if modes[place] >= RECOMPUTE and depth >= DEEPEST_NESTING:
                    nested = True
                    position[depth] = first_leaf[recipe[place] + 1]
            if modes[place] >= RECOMPUTE:
                if position[depth] < first_leaf[recipe[place] + 1]:
                    leaf = needs.leaves[position[depth]]
                    position[depth] += 1
                    # A release happens after the recomputations of its own event: the value is still there in them.
                    away = begin[leaf] + (1 if modes[leaf] == OFFLOAD else 0) <= moment < closes[leaf]
                    if modes[leaf] != KEEP and not done[leaf] and away:
                        depth += 1
                        waiting[depth], position[depth], parent[leaf] = leaf, -1, place
                    continue
                own_bytes, with_workspaces = needs.replay_bytes[recipe[place]]
                taken = max(own_bytes, with_workspaces - needs.headroom[moment])
                high = max(high, added + taken)
                extra_seconds[moment] += needs.replay_seconds[recipe[place]]
            added += size_bytes[place]
            high = max(high, added)
            depth -= 1
        excess[moment] = max(excess[moment], high - added)
    busy = np.zeros(moments + 2, np.bool_)
    for place in range(count):
        if modes[place] != KEEP:
            busy[end[place]] = True
    level = _levels(needs, modes, begin, end, busy, excess)
    return Profile(level, begin, end, parent, busy, extra_seconds, nested)


def _levels(needs: Needs, modes: Modes, begin: Ints, end: Ints, busy: Mask, excess: Ints) -> Ints:
    """`Profile.level`; ``excess`` are the bytes that recomputations take besides in each moment."""
    moments, size_bytes = len(needs.plain), needs.size_bytes
    change = np.zeros(moments + 2, np.int64)
    for place in range(len(modes)):
        if modes[place] != KEEP:
            # Where a value is brought back, releases of the same event come too late for that moment's memory.
            late = modes[place] == OFFLOAD and busy[begin[place]]
            change[begin[place] + (1 if late else 0)] -= size_bytes[place]
            change[end[place]] += size_bytes[place]
    level, moved = np.empty(moments, np.int64), 0
    for moment in range(moments):
        moved += change[moment]
        level[moment] = needs.plain[moment] + moved + excess[moment]
    return level
