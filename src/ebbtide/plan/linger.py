"""Lets what moves out stay for as long as there is room: memory that a plan leaves unused is time for its copies.

A schedule releases a value when its copy is predicted to be done. If the copy is late, compute waits, though the memory
may be wanted much later. And a value for which there is room all the time need not move at all.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ebbtide.compiled import compiled
from ebbtide.plan.follow import Course, Moves
from ebbtide.plan.problem import Ints


def linger(moves: Moves, course: Course, limit_bytes: int, ceiling: Ints, slots: Ints) -> Moves:
    """``moves`` with releases as late as memory allows, and without those that are of no use.

    Those that come last go first: all the copies queued before theirs can make them late.

    Args:
        moves: what is to be done.
        course: what that takes.
        limit_bytes, ceiling: most bytes in all moments; most with workspaces in each.
        slots: moments at which a plan may act, ascending.
    """
    tier, release = compiled(stay)(
        moves.tier, moves.release, moves.load, course.size_bytes, course.memory, course.physical, limit_bytes, ceiling,
        slots,
    )  # fmt: skip
    return Moves(tier, moves.replay, moves.out, release, moves.load)


def stay(
    tier: Any, release: Any, load: Any, size_bytes: Any, memory: Any, physical: Any, limit_bytes: int, ceiling: Any,
    slots: Any,
) -> Any:  # fmt: skip
    """Tier (-1 for what stays) and release of each absence; see `linger`."""
    tier, release = tier.copy(), release.copy()
    room = np.minimum(limit_bytes - memory, ceiling - physical)
    for number in np.argsort(release)[::-1]:
        if tier[number] < 0:
            continue
        size, first = size_bytes[number], release[number] + 1
        stop = first
        while stop < load[number] and room[stop] >= size:
            stop += 1
        if stop == load[number]:
            tier[number] = -1
        else:
            # What is released in a moment is held in it still.
            slot = slots[np.searchsorted(slots, stop) - 1]
            if slot < first:
                continue
            release[number], stop = slot, slot + 1
        room[first:stop] -= size
    return tier, release
