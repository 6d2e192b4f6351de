"""How each absent value could be computed again: the fewest ops back to values that are there."""

from __future__ import annotations

from collections.abc import Set

from ebbtide.errors import PlanError
from ebbtide.plan.problem import Facts
from ebbtide.plan.replay import check_recipe, is_leaf, is_replayable, operands
from ebbtide.step import Absence, Step

LONGEST_RECIPE = 12
"""Ops in a recipe at most. A longer one costs about as much as the part of the step it repeats."""


def find_recipes(step: Step, banned: Set[int] = frozenset()) -> list[tuple[int, ...] | None]:
    """For each absence the ticks of the ops that make its value again, in order, or None if that cannot be done.

    A recipe goes back from the value's maker to values that are there when the absence closes: external ones and ones
    saved earlier, neither written since. It is the cheapest one there is: reading such a value costs no op. A value
    that autograd asked for before the absence opened has none: recomputed values are dropped when they are saved.

    Args:
        step: the observed step.
        banned: absences whose values no recipe may make, neither as its result nor on the way.
    """
    facts = Facts.of(step)
    never = {step.absences[number].value for number in banned}
    first_asked: dict[int, int] = {}
    for saved in step.saved:
        for moment in saved.unpacked:
            first_asked[saved.value] = min(moment, first_asked.get(saved.value, moment))
    return [
        _recipe(facts, absence, never) if first_asked.get(absence.value) == absence.closes else None
        for absence in step.absences
    ]


def _recipe(facts: Facts, absence: Absence, banned: Set[int]) -> tuple[int, ...] | None:
    step, target, moment = facts.step, absence.value, absence.closes
    if step.values[target].storage in facts.external:
        return None
    ticks: set[int] = set()
    seen = {target}
    wanted = [target]
    while wanted:
        number = wanted.pop()
        value = step.values[number]
        unchanged = moment < min(facts.superseded[number], facts.dies[number])
        if number != target and unchanged and is_leaf(facts, number, target):
            continue
        if value.maker < 0 or number in banned or not is_replayable(step.ops[value.maker]):
            return None
        ticks.add(value.maker)
        if len(ticks) > LONGEST_RECIPE:
            return None
        fresh = [operand for operand in operands(step.ops[value.maker]) if operand not in seen]
        seen.update(fresh)
        wanted.extend(fresh)
    recipe = tuple(sorted(ticks))
    try:
        replay = check_recipe(facts, target, recipe)
    except PlanError:
        # The target is a by-product that its maker's replay does not give, such as a running statistic.
        return None
    return recipe if moment < replay.valid_until else None
