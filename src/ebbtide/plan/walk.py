"""Small changes to complete plans: when a value leaves and comes back, to which tier, or whether it moves at all.

A schedule made from modes (`schedule`) queues copies in one order and loads as late as they are in time. Where compute
still waits, another order or another moment may be better; where memory falls short by little, another choice of what
moves. These changes are made at random, most of them near the moments where time is lost; the exact simulator judges
each. It is simulated annealing: at first a plan may get worse by a little, in the end only better.

All of this is compiled by numba, with the simulator in its middle.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.plan.course import DONE, Scene, order_actions, run_course
from ebbtide.plan.dice import draw, draw_below, new_dice
from ebbtide.plan.spans import copy_rows, count_below, count_to

TIER, REPLAY, OUT, RELEASE, LOAD = range(5)
"""Rows of a plan: the columns of `Moves`, in their order."""

NEAREST = 8
"""Candidates near a moment where time is lost among which one is chosen."""
LOCAL = 0.75
"""Share of changes that are made near a moment where time is lost; the others are made anywhere."""
ONE_SHARE = 0.5
"""Share of changes that change one candidate."""
ONE_OR_TWO_SHARE = 0.85
"""Share of changes that change one candidate or two together; the others change three."""
DEEPER = 0.3
"""How often another recipe is tried, where there are several."""
SHIFTED = 0.7
"""How often what is offloaded changes one thing about its trip; else it is kept, or moved in another way."""
MOVED_AGAIN = 0.5
"""How often what was moved is moved in another way, and not kept."""
RECOMPUTED = 0.5
"""How often what can be both recomputed and offloaded is recomputed."""
ANYWHERE = 0.3
"""How often a trip gets any slot that it may have; else one near its slot."""
FARTHER = 0.5
"""How often a near slot is yet one slot farther away."""
LATER = 0.5
"""How often a near slot is a later one, not an earlier one."""
HEAT = 0.006
"""How much worse than the plan before a plan may be at first, as a mean share of the time lost."""
PLAN_COST = 2.5
"""Microseconds on a common machine that trying a change takes at least."""
ABSENCE_COST = 0.012
"""Microseconds on a common machine that trying a change takes for each absence of the step."""
MOMENT_COST = 0.005
"""Microseconds on a common machine that trying a change takes for each moment that is simulated."""


class Choices(NamedTuple):
    """What may be done with candidates, as arrays.

    Attributes:
        absence, opens, closes, out, release: per candidate, as in `Candidates`.
        final: whether its absence is a final one: what leaves is not loaded, its ``LOAD`` stays on demand.
        can_recompute: whether it has a recipe.
        first_deeper: as in `Candidates`.
        possible: per tier of ``tiers`` and candidate, whether the tier may take it.
        in_seconds: per tier and candidate, time of its transfer back.
        tiers: places of the tiers in `Problem.routes`.
        slots: as in `Facts`.
    """

    absence: Ints
    opens: Ints
    closes: Ints
    out: Ints
    release: Ints
    final: Mask
    can_recompute: Mask
    first_deeper: Ints
    possible: Mask
    in_seconds: Floats
    tiers: Ints
    slots: Ints


def walk(
    scene: Scene,
    choices: Choices,
    start: Ints,
    limit_bytes: int,
    ceiling: Ints,
    work: float,
    enough_seconds: float,
    seed: int,
) -> tuple[Ints, float, float]:
    """Go from plan to plan, and remember the fastest.

    Args:
        scene, limit_bytes, ceiling: as in `run_course`.
        choices: what may be changed.
        start: the plan to start from, which must fit.
        work: about how long to go on, in microseconds of a common machine.
        enough_seconds: a plan that takes no longer is good enough.
        seed: seed of the random choices.

    Returns:
        The fastest plan, its seconds, and the microseconds spent.
    """
    dice = new_dice(seed)
    moments, absences = len(scene.plain), start.shape[1]
    plain_seconds = scene.clock[moments]
    now, best, trial = start.copy(), start.copy(), start.copy()
    seconds, lost_at, _, _ = _judge(scene, start, limit_bytes, ceiling, np.inf)
    best_seconds, spent = seconds, 0.0
    while spent < work and best_seconds > enough_seconds:
        copy_rows(now, trial)
        _change_some(choices, trial, lost_at, scene.clock, dice)
        heat = HEAT * (1.0 - spent / work) * (best_seconds - plain_seconds)
        longest = seconds - heat * np.log(1.0 - draw(dice))
        taken, losses, reached, fits = _judge(scene, trial, limit_bytes, ceiling, longest)
        spent += PLAN_COST + ABSENCE_COST * absences + MOMENT_COST * reached
        if not fits:
            continue
        seconds, lost_at = taken, losses
        copy_rows(trial, now)
        if seconds < best_seconds:
            best_seconds = seconds
            copy_rows(trial, best)
    return best, best_seconds, spent


def _judge(scene: Scene, plan: Ints, limit_bytes: int, ceiling: Ints, longest: float) -> tuple[float, Ints, int, bool]:
    """Seconds of a plan, moments where it loses time, moments simulated, and whether it is allowed."""
    actions = order_actions(scene, plan[TIER], plan[REPLAY], plan[OUT], plan[RELEASE], plan[LOAD])
    ran = run_course(scene, actions, plan[TIER], plan[REPLAY], limit_bytes, ceiling, longest)
    fits = ran.ending == DONE
    reached = len(ran.memory) if fits else ran.moment
    return ran.starts[-1], np.concatenate((ran.waited.moment, ran.replayed.moment)), reached, fits


def _change_some(choices: Choices, plan: Ints, lost_at: Ints, clock: Floats, dice: Ints) -> None:
    """Change one to three candidates."""
    count = len(choices.absence)
    near = np.empty(0, np.int64)
    if len(lost_at) and draw(dice) < LOCAL:
        near = _nearest(choices, plan, lost_at[draw_below(dice, len(lost_at))])
    drawn = draw(dice)
    for _ in range(1 if drawn < ONE_SHARE else 2 if drawn < ONE_OR_TWO_SHARE else 3):
        place = near[draw_below(dice, len(near))] if len(near) else draw_below(dice, count)
        number, deeper = choices.absence[place], choices.first_deeper[place + 1] - choices.first_deeper[place]
        if plan[TIER, number] >= 0 and draw(dice) < SHIFTED:
            _shift(choices, plan, place, dice)
        elif plan[REPLAY, number] >= 0 and deeper and draw(dice) < DEEPER:
            plan[REPLAY, number] = _any_recipe(choices, place, dice)
        else:
            kept = plan[TIER, number] < 0 and plan[REPLAY, number] < 0
            plan[TIER, number] = plan[REPLAY, number] = -1
            if kept or draw(dice) < MOVED_AGAIN:
                _move(choices, plan, place, clock, dice)


def _nearest(choices: Choices, plan: Ints, moment: int) -> Ints:
    """The candidates that have something to do nearest to a moment."""
    count = len(choices.absence)
    size = min(NEAREST, count)
    found, distance = np.empty(size, np.int64), np.full(size, 1 << 60)
    for place in range(count):
        number = choices.absence[place]
        far = min(abs(choices.closes[place] - moment), abs(choices.opens[place] - moment))
        if plan[TIER, number] >= 0:
            far = min(far, abs(plan[RELEASE, number] - moment), abs(plan[LOAD, number] - moment))
        if far >= distance[size - 1]:
            continue
        rank = size - 1
        while rank > 0 and distance[rank - 1] > far:
            found[rank], distance[rank] = found[rank - 1], distance[rank - 1]
            rank -= 1
        found[rank], distance[rank] = place, far
    return found


def _move(choices: Choices, plan: Ints, place: int, clock: Floats, dice: Ints) -> None:
    """Move what is kept, in any way there is."""
    number, row = choices.absence[place], _any_tier(choices, place, dice)
    if choices.can_recompute[place] and (row < 0 or draw(dice) < RECOMPUTED):
        deeper = choices.first_deeper[place + 1] - choices.first_deeper[place]
        plan[REPLAY, number] = _any_recipe(choices, place, dice) if deeper and draw(dice) < DEEPER else place
    elif row >= 0:
        release, closes = choices.release[place], choices.closes[place]
        plan[TIER, number] = choices.tiers[row]
        plan[OUT, number], plan[RELEASE, number] = choices.out[place], release
        in_time = count_to(clock, clock[closes] - choices.in_seconds[row, place]) - 1
        load = _slot(choices.slots, release + 1, closes, in_time, True, dice)
        plan[LOAD, number] = closes if choices.final[place] else load


def _any_recipe(choices: Choices, place: int, dice: Ints) -> int:
    """One of the recipes of a candidate."""
    first, last = choices.first_deeper[place], choices.first_deeper[place + 1]
    chosen = first - 1 + draw_below(dice, last - first + 1)
    return chosen if chosen >= first else place


def _any_tier(choices: Choices, place: int, dice: Ints) -> int:
    """A row of a tier that may take a candidate, or -1."""
    possible = choices.possible
    count = 0
    for row in range(len(possible)):
        count += possible[row, place]
    if not count:
        return -1
    left = draw_below(dice, count)
    row = 0
    while left or not possible[row, place]:
        left -= possible[row, place]
        row += 1
    return row


def _shift(choices: Choices, plan: Ints, place: int, dice: Ints) -> None:
    """Put one of the three ticks of a trip elsewhere, or the value in another tier."""
    number, slots = choices.absence[place], choices.slots
    out, release, load = plan[OUT, number], plan[RELEASE, number], plan[LOAD, number]
    kind = draw_below(dice, 4 if len(choices.tiers) > 1 else 3)
    if kind == 2 and choices.final[place]:
        kind = 1
    if kind == 0:
        plan[OUT, number] = _slot(slots, choices.out[place], release - 1, out, False, dice)
    elif kind == 1:
        plan[RELEASE, number] = _slot(slots, max(choices.release[place], out + 1), load - 1, release, False, dice)
    elif kind == 2:
        plan[LOAD, number] = _slot(slots, release + 1, choices.closes[place], load, True, dice)
    else:
        plan[TIER, number] = choices.tiers[_any_tier(choices, place, dice)]


def _slot(slots: Ints, low: int, high: int, now: int, on_demand: bool, dice: Ints) -> int:
    """A slot from ``low`` to ``high``, more often one near ``now``; ``now`` if there is none.

    ``on_demand`` means that ``high`` itself may be chosen though it is no slot.
    """
    first, last = count_below(slots, low), count_to(slots, high)
    count = last - first + (1 if on_demand else 0)
    if count <= 0:
        return now
    chosen = count_below(slots, now) - first
    if draw(dice) < ANYWHERE:
        chosen = draw_below(dice, count)
    else:
        way = 1
        while draw(dice) < FARTHER:
            way += 1
        chosen = min(max(min(max(chosen, 0), count - 1) + (way if draw(dice) < LATER else -way), 0), count - 1)
    return slots[first + chosen] if first + chosen < last else high
