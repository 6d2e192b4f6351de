"""Which candidates may go to slow tiers that hold only so much.

It is settled before a plan is looked for: any of the candidates that may go to a tier fit there together. A value lies
there from its copy out, at the earliest, until it is needed again, as in `ebbtide.run.tiers.layouts`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Literal

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.compiled import compiled
from ebbtide.plan.problem import Problem

TakesFirst = Literal["costliest", "largest", "fullest"]
"""What a slow tier with a limit takes first: what takes longest to compute again, for its bytes; the largest; or what
fills it best at the plain peak."""
PARTS = 1 << 16
"""Sizes of what is to fill a tier are rounded up to its capacity divided by this, unless they have a larger divisor."""
MOST_PACKED = 1000
"""Only so many of the largest values are tried for what fills a tier best: time and memory by their number."""


@dataclasses.dataclass(frozen=True, slots=True)
class Stays:
    """What each candidate would take of a slow tier, as columns.

    Attributes:
        size_bytes: how much.
        first, last: moments of the earliest copy out, and of the need.
        in_time: whether there is time to go there and be back.
        replay_seconds: what it takes to compute the value again instead; infinite where that is impossible.
        takes_first: what tiers with a limit take first.
    """

    size_bytes: Ints
    first: Ints
    last: Ints
    in_time: Mask
    replay_seconds: Floats
    takes_first: TakesFirst


def admitted(problem: Problem, tiers: Sequence[str], stays: Stays) -> Mask:
    """Per tier and candidate, whether it may go there. A tier takes first what none before it may take."""
    found = np.zeros((len(tiers), len(stays.size_bytes)), dtype=np.bool_)
    for row, tier in enumerate(tiers):
        elsewhere = np.logical_or.reduce(found[:row], axis=0, dtype=np.bool_)
        found[row] = _admitted(problem, problem.machine.tier(tier).capacity_bytes, stays, elsewhere)
    return found


def _admitted(problem: Problem, capacity_bytes: int | None, stays: Stays, elsewhere: Mask) -> Mask:
    """Candidates that may go to a tier of ``capacity_bytes``: one after the other, each that still fits.

    Those that `Stays.takes_first` says come first, then the largest. Those that are not away at the plain peak come
    later, and those that may go ``elsewhere`` last.
    """
    if capacity_bytes is None or _most_bytes(problem, stays) <= capacity_bytes:
        return stays.in_time
    peak = int(np.argmax(problem.plain)) if len(problem.plain) else 0
    off_peak = (peak <= stays.first) | (stays.last <= peak)
    merit = np.zeros(len(off_peak))
    if stays.takes_first == "costliest":
        merit = stays.replay_seconds / stays.size_bytes
    elif stays.takes_first == "fullest":
        merit[_filling(stays.size_bytes, np.flatnonzero(stays.in_time & ~off_peak & ~elsewhere), capacity_bytes)] = 1
    order = np.lexsort((-stays.size_bytes, -merit, off_peak, elsewhere))
    order = order[stays.in_time[order]]
    return compiled(take_where_room)(
        order, stays.first, stays.last, stays.size_bytes, capacity_bytes, problem.step.moments + 1
    )


def _filling(size_bytes: Ints, places: Ints, capacity_bytes: int) -> list[int]:
    """Of the candidates at ``places``, those that fill a tier best together: the subset sum problem, by whole parts."""
    part = max(int(np.gcd.reduce(size_bytes[places])), capacity_bytes // PARTS, 1)
    largest = places[np.argsort(-size_bytes[places], kind="stable")[:MOST_PACKED]].tolist()
    parts = [-(-int(size_bytes[place]) // part) for place in largest]
    within = (1 << (capacity_bytes // part + 1)) - 1
    sums = [1]  # bit k: whether some of the first values take k parts
    for size in parts:
        sums.append((sums[-1] | (sums[-1] << size if size <= capacity_bytes // part else 0)) & within)
    left, chosen = sums[-1].bit_length() - 1, []
    for number in range(len(parts) - 1, -1, -1):
        if not sums[number] >> left & 1:
            chosen.append(largest[number])
            left -= parts[number]
    return chosen


def _most_bytes(problem: Problem, stays: Stays) -> int:
    """Most bytes there at once if all go there that can."""
    change, sizes = np.zeros(problem.step.moments + 2, dtype=np.int64), np.where(stays.in_time, stays.size_bytes, 0)
    np.add.at(change, stays.first, sizes)
    np.subtract.at(change, stays.last + 1, sizes)
    return int(np.cumsum(change).max())


def take_where_room(order: Ints, first: Ints, last: Ints, size_bytes: Ints, capacity: int, moments: int) -> Mask:
    """Of the candidates in ``order``, each that fits beside those taken before it in all moments of its stay.

    Steps have 100,000 moments, and as many candidates: bytes are kept in a tree over the moments. What is added to all
    moments below a node is in ``added`` there; ``most`` is the most that any of them has, without what is above it.
    """
    taken = np.zeros(len(first), np.bool_)
    leaves = 1
    while leaves < moments:
        leaves *= 2
    added, most = np.zeros(2 * leaves, np.int64), np.zeros(2 * leaves, np.int64)
    for place in order:
        size = size_bytes[place]
        if _most_between(added, most, leaves + first[place], leaves + last[place]) + size <= capacity:
            _add_between(added, most, leaves + first[place], leaves + last[place], size)
            taken[place] = True
    return taken


def _most_between(added: Ints, most: Ints, left: int, right: int) -> int:
    """The most that any of the leaves from ``left`` to ``right`` has."""
    in_left, in_right = most[left], most[right]
    while left // 2 != right // 2:
        if left % 2 == 0:
            in_left = max(in_left, most[left + 1])
        if right % 2 == 1:
            in_right = max(in_right, most[right - 1])
        left, right = left // 2, right // 2
        in_left += added[left]
        in_right += added[right]
    found = max(in_left, in_right)
    while left > 1:
        left //= 2
        found += added[left]
    return int(found)


def _add_between(added: Ints, most: Ints, left: int, right: int, change: int) -> None:
    """Add ``change`` to all leaves from ``left`` to ``right``."""
    most[left] += change
    if right != left:
        most[right] += change
    while left // 2 != right // 2:
        if left % 2 == 0:
            most[left + 1] += change
            added[left + 1] += change
        if right % 2 == 1:
            most[right - 1] += change
            added[right - 1] += change
        left, right = left // 2, right // 2
        most[left] = added[left] + max(most[2 * left], most[2 * left + 1])
        most[right] = added[right] + max(most[2 * right], most[2 * right + 1])
    while left > 1:
        left //= 2
        most[left] = added[left] + max(most[2 * left], most[2 * left + 1])
