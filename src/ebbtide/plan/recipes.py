"""How each absent value could be computed again: the fewest ops back to values that are there."""

from __future__ import annotations

from collections.abc import Callable, Set

from ebbtide.errors import PlanError
from ebbtide.plan.problem import Facts
from ebbtide.plan.replay import check_recipe, is_leaf, operands
from ebbtide.step import Absence, Step

LONGEST_RECIPE = 12
"""Ops in a recipe at most. A longer one costs about as much as the part of the step it repeats."""
LONGEST_DEEPER = 64
"""Ops in a deeper recipe at most."""
NEAREST = 4
"""A deeper recipe that goes back more often than this is returned only if it reads at most one value, external ones
apart."""


def find_recipes(step: Step, banned: Set[int] = frozenset()) -> list[tuple[int, ...] | None]:
    """For each absence the ticks of the ops that make its value again, in order; None if that cannot be done, or if
    nothing asks for it.

    A recipe goes back from the value's maker to values that are there when the absence closes: external ones and ones
    saved earlier, neither written since. It is the cheapest one there is: reading such a value costs no op.

    Args:
        step: the observed step. It is not checked: one made by hand should have passed `check_step`.
        banned: numbers of absences whose values no recipe may make, neither as its result nor on the way.

    Returns:
        One entry for each of `Step.absences`, in their order; a recipe is what `Recompute.ops` may be.
    """
    facts = Facts.of(step)
    never = step.values_of(banned)
    return [None if step.is_final(absence) else recipe_of(facts, absence, never) for absence in step.absences]


def deeper_recipes(
    facts: Facts, absence: Absence, shortest: tuple[int, ...], banned: Set[int] = frozenset()
) -> list[tuple[int, ...]]:
    """Longer recipes of the value of ``absence`` than its ``shortest``, each of which reads further back.

    Where little memory is left, what a recipe reads has to be brought back for it, and then stays. A deeper recipe
    makes it again instead, and drops it at once. Each of these makes again what the one before read and was made last.
    Of those that go back more than `NEAREST` times, only the ones that read a single value, or none, are returned.

    Args:
        facts: the step.
        absence: the gap at whose end the value is wanted.
        shortest: from `find_recipes`.
        banned: values that no op of a recipe may make.
    """
    values, external = facts.step.values, facts.external
    found: list[tuple[int, ...]] = []
    ticks, settled, times = set(shortest), set[int](), 0
    while True:
        made = {value for tick in ticks for value in facts.step.ops[tick].outputs}
        read = {value for tick in ticks for value in operands(facts.step.ops[tick])} - made
        inner = {value for value in read if values[value].storage not in external}
        if times and (times <= NEAREST or len(inner) <= 1) and _is_recipe(facts, absence, ticks):
            found.append(tuple(sorted(ticks)))
        while inner := inner - settled:
            last = max(inner, key=lambda value: (values[value].maker, value))
            settled.add(last)
            more = _makers(facts, absence, last, made, banned)
            if more is not None:
                break
        if not inner or more is None or len(ticks | more) > LONGEST_DEEPER:
            return found
        ticks |= more
        times += 1


def recipe_of(
    facts: Facts,
    absence: Absence,
    banned: Set[int],
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
    if facts.step.values[absence.value].storage in facts.external:
        return None
    ticks = _makers(facts, absence, absence.value, set(), banned, leaves, first_tick, longest)
    return None if ticks is None or not _is_recipe(facts, absence, ticks) else tuple(sorted(ticks))


def _makers(
    facts: Facts,
    absence: Absence,
    made: int,
    known: Set[int],
    banned: Set[int],
    leaves: Callable[[int], bool] | None = None,
    first_tick: int = 0,
    longest: int = LONGEST_DEEPER,
) -> set[int] | None:
    """The ops that make the value ``made`` in a recipe of ``absence`` that makes those of ``known`` anyway."""
    step, moment = facts.step, absence.closes
    ticks: set[int] = set()
    seen, wanted = {made, *known}, [made]
    while wanted:
        number = wanted.pop()
        value = step.values[number]
        unchanged = moment < min(facts.superseded[number], facts.dies[number])
        allowed = leaves is None or leaves(number) or value.storage in facts.external
        if number != made and unchanged and allowed and is_leaf(facts, number, absence.value):
            continue
        if value.maker < first_tick or number in banned or facts.replayable_from[value.maker] > moment:
            return None
        ticks.add(value.maker)
        if len(ticks) > longest:
            return None
        fresh = [operand for operand in operands(step.ops[value.maker]) if operand not in seen]
        seen.update(fresh)
        wanted.extend(fresh)
    return ticks


def _is_recipe(facts: Facts, absence: Absence, ticks: set[int]) -> bool:
    """Whether these ops make the value of ``absence`` where it closes."""
    try:
        replay = check_recipe(facts, absence.value, tuple(sorted(ticks)))
    except PlanError:
        # The value is a by-product that its maker's replay does not give, such as a running statistic.
        return False
    return absence.closes < replay.valid_until
