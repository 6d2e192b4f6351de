"""What every recipe of a value has to run again, whichever recipe a plan chooses."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence, Set
from types import MappingProxyType

import numpy as np

from ebbtide.plan.problem import Facts
from ebbtide.plan.replay import is_leaf, is_replayable, operands

FARTHEST = 64
"""Ops looked at for one value. Beyond them ops are taken to cost nothing and to be replayable, which only lowers the
bound; a step in which nothing can be read again would otherwise take quadratic time."""
MOST_EXACT = 600
"""Absences at most for which it is looked up what their recipes may read; with more, it is all that is older."""

Gone = Mapping[int, tuple[int, int]]
"""By absence: the event at which its value has to be released at the latest, and the first at which it may be back."""


@dataclasses.dataclass(frozen=True, slots=True)
class Again:
    """What every recipe of a value takes at least.

    Attributes:
        seconds: its time; infinite if there is no recipe.
        reads: the values that it reads unless it makes them itself, in addition to what that time is for.
    """

    seconds: float
    reads: tuple[int, ...] = ()


def computed_again(
    facts: Facts, banned: Set[int], gone: Gone = MappingProxyType({}), *, more_seconds: float
) -> list[Again]:
    """For each absence what it takes at least to compute its value again.

    A recipe ends with the value's maker (see `check_recipe`). What an op of it reads, the recipe makes itself unless
    it may be a leaf when it runs (see `recompute_moments`). So an operand that can be no leaf then adds its maker, and
    so on: those ops are part of every recipe. Each recomputed absence runs its own recipe, in `follow` as in the
    runtime: what two recipes have in common is run twice and counts twice. Values that have to be away for as long as
    the recipe may run can be no leaves of it.

    Args:
        facts: the indexed step.
        banned: absences whose values no recipe may make.
        gone: values that have to be away for some time.
        more_seconds: what each op costs besides its time.
    """
    step = facts.step
    away: dict[int, list[tuple[int, int]]] = {}
    for number, span in gone.items():
        away.setdefault(step.absences[number].value, []).append(span)
    never = step.values_of(banned)
    known: dict[tuple[int, int, int], Again] = {}
    found = []
    for absence, moment in zip(step.absences, recompute_moments(facts, gone), strict=True):
        key = (absence.value, moment, absence.closes)
        if key not in known:
            known[key] = _again(facts, *key, never, away, more_seconds)
        found.append(known[key])
    return found


def recompute_moments(facts: Facts, gone: Gone) -> list[int]:
    """For each absence the first event at which its value can be computed again.

    That is where its absence closes, or before, where another one does whose recipe may read it: see `_sources`.
    """
    step = facts.step
    order = sorted(range(len(step.absences)), key=lambda number: step.absences[number].closes)
    closes = np.array([step.absences[number].closes for number in order], dtype=np.int64)
    values = [step.absences[number].value for number in order]
    makers = [step.values[value].maker for value in values]
    readers = np.array([maker if maker >= 0 and is_replayable(facts, maker) else -1 for maker in makers], np.int64)
    sources = _sources(facts, values) if len(order) <= MOST_EXACT else []
    found = []
    for number, absence in enumerate(step.absences):
        begin = max(absence.opens, gone[number][1]) if number in gone else absence.opens
        first, last = np.searchsorted(closes, (begin, absence.closes))
        reads = readers[first:last] > step.values[absence.value].maker
        if sources:
            known = (sources[place] for place in range(first, last))
            reads &= np.array([some is None or absence.value in some for some in known], dtype=np.bool_)
        found.append(int(closes[first + np.argmax(reads)]) if reads.any() else absence.closes)
    return found


def _sources(facts: Facts, targets: Sequence[int]) -> list[set[int] | None]:
    """For each target what a recipe of it may read, or a recipe of one of these, and so on; None if it is too much.

    An op is part of a recipe only if all that it reads can be had: saved by somebody, or made again by such ops.
    """
    step, made = facts.step, [False] * len(facts.step.values)
    for tick, op in enumerate(step.ops):
        if is_replayable(facts, tick):
            read = (v for v in operands(op) if step.values[v].storage not in facts.external and v not in facts.held)
            again = all(made[value] for value in read)
            for value in op.outputs:
                made[value] = again
    found: list[set[int] | None] = []
    for target in targets:
        known, wanted = set[int](), [target]
        while wanted and len(known) < FARTHEST:
            value = wanted.pop()
            if made[value]:
                fresh = [operand for operand in operands(step.ops[step.values[value].maker]) if operand not in known]
                known.update(fresh)
                wanted.extend(fresh)
        found.append(None if wanted else known)
    return found


def _again(
    facts: Facts,
    target: int,
    moment: int,
    last: int,
    never: Set[int],
    away: Mapping[int, list[tuple[int, int]]],
    more_seconds: float,
) -> Again:
    """What every recipe of ``target`` takes at least, run between the events ``moment`` and ``last``."""
    values = facts.step.values
    if values[target].storage in facts.external:
        return Again(math.inf)
    ticks, leaves = set[int](), set[int]()
    seen, wanted = {target}, [target]
    while wanted and len(ticks) < FARTHEST:
        number = wanted.pop()
        readable = moment < min(facts.superseded[number], facts.dies[number]) and not any(
            released < moment and last < back for released, back in away.get(number, ())
        )
        if number != target and readable and is_leaf(facts, number, target):
            leaves.add(number)
            continue
        maker = values[number].maker
        if maker < 0 or number in never or not is_replayable(facts, maker):
            return Again(math.inf)
        ticks.add(maker)
        fresh = [operand for operand in operands(facts.step.ops[maker]) if operand not in seen]
        seen.update(fresh)
        wanted.extend(fresh)
    reads = sorted(leaf for leaf in leaves if values[leaf].maker not in ticks)
    seconds = math.fsum(facts.step.ops[tick].duration_seconds + more_seconds for tick in ticks)
    return Again(seconds, tuple(reads))


class Returns:
    """How soon a value that has to be absent can be back, if it is computed again: what its recipe reads comes first.

    A recipe reads values that are there, or brings them back, or makes them again itself. Just before an event at which
    its target may first be back, other values have to be absent, too. So before it runs one of them has to be loaded,
    after that event, or a longer recipe has to run. Both are done one after the other, as `follow` does them.

    Args:
        facts: the indexed step.
        banned: absences whose values no recipe may make.
        gone: values that have to be away for some time.
        load_seconds: by absence the least time of a load; infinite if it cannot be loaded.
    """

    def __init__(self, facts: Facts, banned: Set[int], gone: Gone, load_seconds: Mapping[int, float]) -> None:
        self.facts, self.gone, self.load_seconds = facts, gone, load_seconds
        self.never = facts.step.values_of(banned)
        self.absences: dict[int, list[int]] = {}
        for number in gone:
            self.absences.setdefault(facts.step.absences[number].value, []).append(number)

    def seconds(self, number: int, moment: int, kept: Set[int]) -> tuple[float, set[int]]:
        """The least time from the event at which absence ``number`` may be back until it is, if it is recomputed.

        Args:
            number: the absence, one of those that have to be away.
            moment: the event from which on its value can be computed again.
            kept: absences that are not loaded before.

        Returns:
            The time, infinite if it cannot be recomputed, and the absences whose loads were thought of.
        """
        facts, target = self.facts, self.facts.step.absences[number].value
        values, start, last = facts.step.values, self.gone[number][1], facts.step.absences[number].closes
        known: dict[int, float] = {}
        loaded: set[int] = set()

        def made(value: int) -> float:
            maker = values[value].maker
            if maker < 0 or value in self.never or not is_replayable(facts, maker):
                return math.inf
            before = max((there(operand) for operand in operands(facts.step.ops[maker])), default=0.0)
            return before + facts.step.ops[maker].duration_seconds

        def there(value: int) -> float:
            if values[value].storage in facts.external or len(known) >= FARTHEST:
                return 0.0
            if value not in known:
                known[value] = math.inf
                best = math.inf
                if moment < min(facts.superseded[value], facts.dies[value]) and is_leaf(facts, value, target):
                    away = [n for n in self.absences.get(value, ()) if self.gone[n][0] < start <= self.gone[n][1]]
                    if not away:
                        known[value] = 0.0
                        return 0.0
                    back = [n for n in away if self.gone[n][1] <= last]
                    loaded.update(back)
                    best = min((self.load_seconds[n] for n in back if n not in kept), default=math.inf)
                known[value] = min(best, made(value))
            return known[value]

        return made(target), loaded
