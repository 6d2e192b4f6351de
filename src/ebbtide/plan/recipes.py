"""How each absent value could be computed again: the fewest ops back to values that are there."""

from __future__ import annotations

from collections.abc import Callable, Set

from ebbtide.errors import PlanError
from ebbtide.plan.problem import Facts
from ebbtide.plan.replay import check_recipe, is_leaf, is_replayable, operands
from ebbtide.step import Absence, Step

LONGEST_RECIPE = 12
"""Ops in a recipe at most. A longer one costs about as much as the part of the step it repeats."""


def find_recipes(step: Step, banned: Set[int] = frozenset()) -> list[tuple[int, ...] | None]:
    """For each absence the ticks of the ops that make its value again, in order, or None if that cannot be done.

    A recipe goes back from the value's maker to values that are there when the absence closes: external ones and ones
    saved earlier, neither written since. It is the cheapest one there is: reading such a value costs no op.

    Args:
        step: the observed step.
        banned: absences whose values no recipe may make, neither as its result nor on the way.
    """
    facts = Facts.of(step)
    never = {step.absences[number].value for number in banned}
    return [
        recipe_of(facts, absence, never) if first else None
        for absence, first in zip(step.absences, asked_first(step), strict=True)
    ]


def asked_first(step: Step) -> list[bool]:
    """For each absence whether autograd asks for its value for the first time where it closes.

    Only then can the value be recomputed: recomputed values are dropped when they are saved.
    """
    first: dict[int, int] = {}
    for saved in step.saved:
        for moment in saved.unpacked:
            first[saved.value] = min(moment, first.get(saved.value, moment))
    return [first.get(absence.value) == absence.closes for absence in step.absences]


def recipe_of(
    facts: Facts,
    absence: Absence,
    banned: Set[int] = frozenset(),
    *,
    leaves: Callable[[int], bool] | None = None,
    first_tick: int = 0,
    longest: int = LONGEST_RECIPE,
) -> tuple[int, ...] | None:
    """The fewest ops that make the value of ``absence`` again, or None if that cannot be done.

    Args:
        facts: the step.
        absence: the gap at whose end the value is wanted.
        banned: values that no op of the recipe may make.
        leaves: whether it may read a value without making it, external ones apart; None if it may read all.
        first_tick: no op before this one is replayed.
        longest: most ops.
    """
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
        allowed = leaves is None or leaves(number) or value.storage in facts.external
        if number != target and unchanged and allowed and is_leaf(facts, number, target):
            continue
        if value.maker < first_tick or number in banned or not is_replayable(step.ops[value.maker]):
            return None
        ticks.add(value.maker)
        if len(ticks) > longest:
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
