"""Small changes to modes that bring the peak down, one after the other: the inner loop of `floor`."""

from __future__ import annotations

import numpy as np

from ebbtide.arrays import Ints, Mask
from ebbtide.plan.dice import draw, draw_below, new_dice
from ebbtide.plan.needs import KEEP, OFFLOAD, RECOMPUTE, Modes, Needs, bring_back

TRY_COST = 1.5
"""Microseconds on a common machine that trying a change takes at least."""
CANDIDATE_COST = 0.02
"""Microseconds on a common machine that trying a change takes for each candidate."""
MOMENT_COST = 0.008
"""Microseconds on a common machine that trying a change takes for each moment of the step."""
ONE_SHARE = 0.5
"""Share of changes that change one candidate; the others change two."""
NEAR_SHARE = 0.8
"""How often the candidate that is changed is one that could be absent at the worst moment; else it is any. With those
alone, one in six small cases ended above the least peak."""


def lower(needs: Needs, can_offload: Mask, deepest: Modes, start: Modes, work: float, seed: int) -> Modes:
    """Change one or two candidates, as a rule of those that could be absent at the worst moment, and keep what does not
    raise the peak.

    Args:
        needs: as in `bring_back`.
        can_offload: per candidate, whether it may be offloaded.
        deepest: per candidate the highest mode it may have, or 0 if it must not be computed again.
        start: modes to start from.
        work: about how long to go on, in microseconds of a common machine.
        seed: seed of the random choices.

    Returns:
        Modes of the least peak found.
    """
    dice = new_dice(seed)
    modes, trial = start.copy(), start.copy()
    level = bring_back(needs, modes).level
    high, near = level.max(), np.empty(len(modes), np.int64)
    cost = TRY_COST + CANDIDATE_COST * len(modes) + MOMENT_COST * len(level)
    for _ in range(int(work / cost)):
        moment, count = np.argmax(level), 0
        for place in range(len(modes)):
            trial[place] = modes[place]
            if needs.opens[place] <= moment <= needs.closes[place]:
                near[count] = place
                count += 1
        if not count:
            break
        for _ in range(1 if draw(dice) < ONE_SHARE else 2):
            place = near[draw_below(dice, count)] if draw(dice) < NEAR_SHARE else draw_below(dice, len(modes))
            trial[place] = _any_mode(can_offload[place], deepest[place], dice)
        tried = bring_back(needs, trial)
        if not tried.nested and tried.level.max() <= high:
            level, high = tried.level, tried.level.max()
            modes, trial = trial, modes
    return modes


def _any_mode(can_offload: bool, deepest: int, dice: Ints) -> int:
    """One of the modes that a candidate may have."""
    recipes = deepest - RECOMPUTE + 1 if deepest else 0
    chosen: int = draw_below(dice, 1 + (1 if can_offload else 0) + recipes)
    if chosen < recipes:
        return RECOMPUTE + chosen
    return OFFLOAD if chosen > recipes else KEEP
