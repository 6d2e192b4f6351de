"""What every recipe of a value has to run again, whichever recipe a plan chooses."""

from __future__ import annotations

import bisect
import math
from collections.abc import Set

from ebbtide.plan.problem import Facts
from ebbtide.plan.replay import is_leaf, is_replayable, operands

FARTHEST = 64
"""Ops looked at for one value. Beyond them ops are taken to cost nothing and to be replayable, which only lowers the
bound; a step in which nothing can be read again would otherwise take quadratic time."""


def recompute_seconds(facts: Facts, banned: Set[int]) -> list[float]:
    """For each absence the least time in which its value can be computed again; infinite if it cannot.

    A recipe ends with the value's maker (see `check_recipe`). What an op of it reads, the recipe makes itself unless
    it may be a leaf when it runs; it runs at an event that closes an absence, not before its own opens. So an operand
    that can be no leaf then adds its maker, and so on: those ops are part of every recipe. Each recomputed absence
    runs its own recipe, in `follow` as in the runtime: what two recipes have in common is run twice and counts twice.

    Args:
        facts: the indexed step.
        banned: absences whose values no recipe may make.
    """
    step = facts.step
    never = {step.absences[number].value for number in banned}
    needs = sorted({absence.closes for absence in step.absences})
    earliest = [needs[bisect.bisect_left(needs, absence.opens)] for absence in step.absences]
    known: dict[tuple[int, int], float] = {}
    found = []
    for absence, moment in zip(step.absences, earliest, strict=True):
        key = (absence.value, moment)
        if key not in known:
            known[key] = _seconds(facts, absence.value, moment, never)
        found.append(known[key])
    return found


def _seconds(facts: Facts, target: int, moment: int, never: Set[int]) -> float:
    values = facts.step.values
    if values[target].storage in facts.external:
        return math.inf
    ticks: set[int] = set()
    seen, wanted = {target}, [target]
    while wanted and len(ticks) < FARTHEST:
        number = wanted.pop()
        readable = moment < min(facts.superseded[number], facts.dies[number])
        if number != target and readable and is_leaf(facts, number, target):
            continue
        maker = values[number].maker
        if maker < 0 or number in never or not is_replayable(facts.step.ops[maker]):
            return math.inf
        ticks.add(maker)
        fresh = [operand for operand in operands(facts.step.ops[maker]) if operand not in seen]
        seen.update(fresh)
        wanted.extend(fresh)
    return math.fsum(facts.step.ops[tick].duration_seconds for tick in ticks)
