"""The truth for short chains: the cheapest way to reverse them at all, by Dijkstra's algorithm over all situations.

It may do anything that is possible, one step at a time, with slots of given prices; nothing of the structure of any
published schedule is assumed.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator, Sequence

# The working state (or None), the working tape, by tier the states and the tapes held, and the next step to reverse.
Situation = tuple[int | None, int | None, tuple[frozenset[int], ...], frozenset[int], int]


def least_time(
    n: int,
    tiers: Sequence[tuple[int, float, float]],
    forward: float = 1.0,
    reverse: float = 1.0,
    *,
    tapes: bool = False,
) -> float:
    """Least time to reverse ``n`` steps; tiers are (slots, write, read). With tapes: of the one tier, and a reverse
    without a tape runs a step forward, too."""
    first: Situation = (0, None, tuple(frozenset() for _ in tiers), frozenset(), n - 1)
    best: dict[Situation, float] = {first: 0.0}
    numbers = itertools.count()
    queue = [(0.0, next(numbers), first)]
    while queue:
        time, _, situation = heapq.heappop(queue)
        if situation[4] < 0:
            return time
        if time > best[situation]:
            continue
        for cost, following in moves(situation, tiers, forward, reverse, tapes):
            if time + cost < best.get(following, float("inf")):
                best[following] = time + cost
                heapq.heappush(queue, (time + cost, next(numbers), following))
    raise AssertionError("cannot be reversed at all")


def moves(
    situation: Situation, tiers: Sequence[tuple[int, float, float]], forward: float, reverse: float, tapes: bool
) -> Iterator[tuple[float, Situation]]:
    working, tape, held, stored_tapes, goal = situation
    if working is not None and working < goal:
        yield forward, (working + 1, working if tapes else None, held, stored_tapes, goal)
    if working == goal:
        yield reverse + (forward if tapes else 0.0), (None, None, held, stored_tapes, goal - 1)
    if goal in stored_tapes or tape == goal:
        yield reverse, (None, None, held, stored_tapes - {goal}, goal - 1)
    for number, (slots, write, read) in enumerate(tiers):
        here = held[number]

        def other(states: frozenset[int], number: int = number) -> tuple[frozenset[int], ...]:
            return (*held[:number], states, *held[number + 1 :])

        # To make room later costs nothing, so states are dropped when room is needed.
        used = len(here) + len(stored_tapes)
        rooms = [here] if used < slots else [here - {state} for state in here]
        if slots and working is not None and working not in here:
            for room in rooms:
                yield write, (working, tape, other(room | {working}), stored_tapes, goal)
        if slots and tape is not None and tape not in stored_tapes:
            for room in rooms:
                yield write, (working, None, other(room), stored_tapes | {tape}, goal)
        for state in here:
            if state <= goal and state != working:
                yield read, (state, None, held, stored_tapes, goal)
