"""The inner loop of `Selector.fill`: move what costs least until memory fits, compiled by numba."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.heaps import make_heap, take_least
from ebbtide.plan.needs import KEEP, OFFLOAD, RECOMPUTE, Modes, Needs, Profile, bring_back

MIDDLE = 0.2
"""How far from the pivot a place to cut may be, as a share of all the bytes that are brought back too early."""


class Manner(NamedTuple):
    """How modes are completed, besides by price: the last attributes of `Wishes`, which says what they mean."""

    stay: Mask
    peak_only: bool
    pivot: float
    deepen: bool


class Wishes(NamedTuple):
    """How to choose what moves, as arrays per candidate and numbers.

    Attributes:
        offload, recompute: seconds that each candidate is thought to cost if it is offloaded or recomputed.
        can_offload: whether it may be offloaded.
        deepest: the highest mode that it may have.
        stay: whether it must not be moved if it is kept now.
        peak_only: whether to value what is freed at the worst moment only, rather than wherever memory is short.
        pivot: where to cut a chain of recipes that brings back too much at once, as a share of its bytes.
        deepen: whether a chain is cut by deeper recipes, which make again what others bring back, before it is cut by
            moving something in another way.
    """

    offload: Floats
    recompute: Floats
    can_offload: Mask
    deepest: Modes
    stay: Mask
    peak_only: bool
    pivot: float
    deepen: bool


def fill_modes(needs: Needs, wishes: Wishes, cap: Ints, locked: Mask, modes: Modes) -> tuple[Profile, bool, int, int]:
    """Move candidates, in place, until no moment holds more than ``cap``.

    Args:
        needs: as in `bring_back`.
        wishes: how to choose.
        cap: bytes allowed per moment.
        locked: per candidate, whether it must not be computed again; more of them in the end.
        modes: modes to start from.

    Returns:
        The profile of `bring_back`; whether it fits; how many profiles and cuts that took.
    """
    profiles = cuts = 0
    while True:
        found = bring_back(needs, modes)
        profiles += 1
        over = found.level - cap
        moment = int(np.argmax(over))
        if over[moment] <= 0 and not found.nested:
            return found, True, profiles, cuts
        if over[moment] > 0 and _move(needs, wishes, locked, over, moment, modes):
            continue
        cuts += 1
        if not _cut(needs, wishes, locked, found, moment, modes):
            return found, False, profiles, cuts


def _move(needs: Needs, wishes: Wishes, locked: Mask, over: Ints, moment: int, modes: Modes) -> bool:
    """Move the cheapest kept candidates that free the worst moment; False if there are none."""
    count, closes = len(modes), needs.closes
    short = np.zeros(len(over) + 3)
    for at in range(len(over) + 2):
        short[at + 1] = short[at] + (max(over[at], 0) if at < len(over) else 0)
    offload, recompute, least = np.empty(count), np.empty(count), np.empty(count)
    cheapest, left = np.empty(count, np.int64), 0
    for place in range(count):
        offload[place] = recompute[place] = least[place] = np.inf
        if modes[place] != KEEP or wishes.stay[place] or closes[place] <= moment:
            continue
        size, release, opens = float(needs.size_bytes[place]), needs.release[place], needs.opens[place]
        if wishes.can_offload[place] and release <= moment:
            gain = size if wishes.peak_only else size * (short[closes[place]] - short[release])
            offload[place] = wishes.offload[place] / gain
        if not locked[place] and opens <= moment:
            gain = size if wishes.peak_only else size * (short[closes[place]] - short[opens])
            recompute[place] = wishes.recompute[place] / gain
        least[place] = min(offload[place], recompute[place])
        if least[place] < np.inf:
            cheapest[left] = place
            left += 1
    make_heap(cheapest, left, least)
    missing, moved = over[moment], False
    while left and missing > 0:
        place = take_least(cheapest, left, least)
        left -= 1
        modes[place] = OFFLOAD if offload[place] <= recompute[place] else RECOMPUTE
        missing -= needs.size_bytes[place]
        moved = True
    return moved


def _cut(needs: Needs, wishes: Wishes, locked: Mask, found: Profile, moment: int, modes: Modes) -> bool:
    """Stop recomputing one candidate of those whose recipes bring back too much too early, or do it by a deeper
    recipe; False if there is none.

    The candidate is the smallest of those that bring back, directly or not, about the share ``pivot`` of what is too
    early, so that a chain falls into two.
    """
    brought, cause = _causes(needs, found, moment, modes)
    only_deeper = False
    for place in range(len(modes)):
        only_deeper |= wishes.deepen and cause[place] and modes[place] < wishes.deepest[place]
    most, nearest = 1, np.inf
    for place in range(len(modes)):
        cause[place] &= not only_deeper or modes[place] < wishes.deepest[place]
        if cause[place]:
            most = max(most, brought[place])
    for place in range(len(modes)):
        if cause[place]:
            nearest = min(nearest, abs(brought[place] / most - wishes.pivot))
    chosen = -1
    for place in range(len(modes)):
        is_near = cause[place] and abs(brought[place] / most - wishes.pivot) <= max(MIDDLE, nearest)
        if is_near and (chosen < 0 or needs.size_bytes[place] < needs.size_bytes[chosen]):
            chosen = place
    if chosen < 0:
        return False
    if only_deeper:
        modes[chosen] += 1
    else:
        locked[chosen] = True
        modes[chosen] = OFFLOAD if wishes.can_offload[chosen] else KEEP
    return True


def _causes(needs: Needs, found: Profile, moment: int, modes: Modes) -> tuple[Ints, Mask]:
    """Bytes that each candidate brings back too early, directly or not, and whether it does."""
    count, closes, end, parent, whole = len(modes), needs.closes, found.end, found.parent, found.nested
    for place in range(count):
        whole &= not (modes[place] != KEEP and end[place] <= moment < closes[place])
    brought, cause = np.zeros(count, np.int64), np.zeros(count, np.bool_)
    # A recipe reads older values than it makes, and candidates are in the order of their values: leaves come first.
    for place in range(count):
        cause[place] |= modes[place] >= RECOMPUTE and closes[place] == moment
        if modes[place] != KEEP and (whole or end[place] <= moment < closes[place]):
            brought[place] += needs.size_bytes[place]
            if parent[place] >= 0:
                brought[parent[place]] += brought[place]
                cause[parent[place]] = True
    return brought, cause
