"""A schedule for a chain as decisions about the absences of the step that the chain was cut from.

NOTE [What a chain schedule becomes]
1. A step decides once about each absence, and what is recomputed is so when autograd asks for it. This is enough for
   every persistent schedule, nested ones included: after the first forward each stage's input is stored once (`fates`),
   so one recipe tells how. ``F_ck p, F_empty .. k-1`` is a recipe of the input of stage ``k`` from that of stage ``p``;
   ``F_all k`` is one recipe for each value that ``k`` saves, from its input and from each other. What a recipe reads is
   brought back before it and stays: inner checkpoints come back in the order of the schedule, never earlier.
2. What differs: an op with several saved results is replayed for each of them; small values, values that no recipe can
   make and values that the user holds stay; backward ops of neighbouring stages may mix. So memory and time of a plan
   are those of the simulator, and the chain's own prediction is not taken for them.
3. Recipes may wait for each other only so deeply (`DEEPEST_NESTING`). Where that is passed, every stage's input is
   computed from the nearest one that is there since the forward pass: more time, no more memory. So is, from its
   stage's input, each value of a stage that would wait for too many others of it.
4. Overheads of a chain are upper estimates, so a schedule for a chain memory of ``M`` may hold less or, by point 2,
   more than ``M``. Policies therefore look for the largest chain memory whose schedule holds no more than the limit.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Sequence

import numpy as np

from ebbtide.decisions import Decision, Plan
from ebbtide.machine import Link, Machine
from ebbtide.plan.course import DEEPEST_NESTING
from ebbtide.plan.judged import to_plan
from ebbtide.plan.needs import KEEP, OFFLOAD, RECOMPUTE, Modes
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import Candidates, needs_of, profile
from ebbtide.plan.published.chain import Action, ChainPlan, Fate, fates, store_all
from ebbtide.plan.published.cut import Cut
from ebbtide.plan.published.remembered import remembered
from ebbtide.plan.replay import operands
from ebbtide.plan.search import Search
from ebbtide.plan.select import Room
from ebbtide.plan.simulate import decisions_of
from ebbtide.step import Step

AIMS = 10
"""Chain memories that are tried, each halving what is left between one that fits and one that does not."""


@dataclasses.dataclass(frozen=True, slots=True)
class Mapped:
    """A chain schedule on its step.

    Attributes:
        problem: the step and the machine.
        candidates: the step's absences that are decided about, with recipes.
        modes: what happens to each candidate.
        recipes: per absence its recipe, if any.
        peak_bytes: the least that these modes can hold at most, if transfers are waited for.
        nested: whether its recipes wait for each other too deeply to be run.
    """

    problem: Problem
    candidates: Candidates
    modes: Modes
    recipes: list[tuple[int, ...] | None]
    peak_bytes: int
    nested: bool

    def plan(self, limit_bytes: int, method: str) -> Plan:
        """The plan of ``method`` that does this. Raises `BudgetError` if it cannot stay within ``limit_bytes``."""
        search = _search(self.problem, self.candidates, max(limit_bytes, self.peak_bytes))
        found = search.offer(self.modes, search.selector.profile(self.modes))
        assert found is not None, "modes can be scheduled within their own least peak"
        decisions: list[Decision] = decisions_of(self.problem, search.follower.listed(found.moves), self.recipes)
        return to_plan(self.problem, limit_bytes, decisions, method)


def slow_links(machine: Machine) -> tuple[Link, Link] | None:
    """The links out to and in from the slow tier with the fastest return; None if the machine has none."""
    tiers = machine.slow_tiers()
    if not tiers:
        return None
    return machine.link(machine.fast, tiers[0].name), machine.link(tiers[0].name, machine.fast)


def mapped(cut: Cut, plan: ChainPlan) -> Mapped:
    """The chain schedule ``plan`` on the step of ``cut``: NOTE [What a chain schedule becomes]."""
    return mapped_all(cut, plan.actions, [plan.offloaded])[0]


def mapped_all(cut: Cut, actions: Sequence[Action], sets: Iterable[frozenset[int]]) -> list[Mapped]:
    """The schedule of ``actions`` with each of these ``sets`` of items offloaded, as `mapped` has it."""
    ends, choices = fates(actions), []
    recipes = _recipes(cut, ends)
    for offloaded in sets:
        offloads = _offloads(cut, ends, offloaded)
        found = _with(cut, recipes, offloads)
        choices.append(_with(cut, _flat_recipes(cut, ends), offloads) if found.nested else found)
    return choices


def fastest(choices: Sequence[Mapped], limit_bytes: int) -> Mapped | None:
    """The fastest of ``choices``, all of one step with the same recipes, of those that stay within ``limit_bytes``."""
    fitting = [choice for choice in choices if choice.peak_bytes <= limit_bytes]
    if not fitting:
        return None
    search = _search(fitting[0].problem, fitting[0].candidates, limit_bytes)
    seconds = []
    for choice in fitting:
        assert choice.recipes == fitting[0].recipes, "one search is of one set of candidates"
        found = search.offer(choice.modes, search.selector.profile(choice.modes))
        seconds.append(math.inf if found is None else found.course.seconds)
    return fitting[seconds.index(min(seconds))]


def fitted(
    cut: Cut, limit_bytes: int, highest_bytes: int, schedule: Callable[[int], ChainPlan | None], method: str
) -> Plan:
    """The plan that `best_mapped` finds. Raises `BudgetError` if it does not stay within ``limit_bytes``."""
    return best_mapped(cut, limit_bytes, highest_bytes, schedule).plan(limit_bytes, method)


def best_mapped(cut: Cut, limit_bytes: int, highest_bytes: int, schedule: Callable[[int], ChainPlan | None]) -> Mapped:
    """The schedule of the largest chain memory, of those tried, that stays within ``limit_bytes`` on the step, or that
    of the least peak if none does.

    Args:
        cut: the step as a chain.
        limit_bytes: the budget.
        highest_bytes: chain memory that suffices for everything.
        schedule: the schedule for a chain memory, or None if there is none.
    """
    everything = mapped(cut, store_all(cut.chain))
    if everything.peak_bytes <= limit_bytes:
        return everything
    best, least = None, everything
    low, high, aim = 0, highest_bytes, highest_bytes
    for _ in range(AIMS):
        plan = schedule(aim)
        found = None if plan is None else mapped(cut, plan)
        if found is not None and found.peak_bytes < least.peak_bytes:
            least = found
        if found is not None and found.peak_bytes <= limit_bytes:
            best = found
        if found is None or found is best:
            low = aim
        else:
            high = aim
        if low >= high:
            break
        aim = (low + high) // 2
    return least if best is None else best


def _recipes(cut: Cut, ends: Sequence[Fate]) -> dict[int, tuple[int, ...] | None]:
    """Per absence that is recomputed its recipe."""
    recipes: dict[int, tuple[int, ...] | None] = {}
    for stage, fate in zip(range(len(cut.first_ticks)), ends, strict=False):
        if fate.remade:
            recipes |= {number: cut.remake(number, stage) for number in cut.remakeable[stage]}
        if fate.origin is not None:
            make = cut.remake if fate.origin.through else cut.sweep
            recipes |= {number: make(number, fate.origin.stage) for number in cut.outputs[stage - 1]}
    return recipes


def _flat_recipes(cut: Cut, ends: Sequence[Fate]) -> dict[int, tuple[int, ...] | None]:
    """Recipes like those of `_recipes`, but with every input computed from one that is there since the forward pass."""
    recipes: dict[int, tuple[int, ...] | None] = {}
    roots: list[int] = []
    for stage, fate in zip(range(len(cut.first_ticks)), ends, strict=False):
        roots.append(stage if fate.origin is None else roots[fate.origin.stage])
        if fate.remade:
            recipes |= _shallow_recipes(cut, stage)
        if fate.origin is not None:
            recipes |= {number: cut.sweep(number, roots[stage]) for number in cut.outputs[stage - 1]}
    return recipes


def _shallow_recipes(cut: Cut, stage: int) -> dict[int, tuple[int, ...] | None]:
    """Recipes of what ``stage`` saves; they wait for each other, and for its input, at most `DEEPEST_NESTING` deep."""
    step = cut.problem.step
    recipes: dict[int, tuple[int, ...] | None] = {}
    depths: dict[int, int] = {}
    for number in sorted(cut.remakeable[stage], key=lambda number: step.values[step.absences[number].value].maker):
        recipe = cut.remake(number, stage)
        read = {value for tick in recipe or () for value in operands(step.ops[tick])}
        depth = 1 + max((depths.get(value, 1) for value in read), default=1)  # 1: the stage's input
        if depth >= DEEPEST_NESTING:
            recipe, depth = cut.sweep(number, stage), 2
        recipes[number], depths[step.absences[number].value] = recipe, depth
    return recipes


def _offloads(cut: Cut, ends: Sequence[Fate], offloaded: frozenset[int]) -> set[int]:
    """Absences that are offloaded."""
    numbers: set[int] = set()
    for stage in offloaded:
        numbers.update(cut.outputs[stage - 1])
        if not ends[stage - 1].remade:
            numbers.update(cut.remakeable[stage - 1])
            numbers.update(cut.fixed[stage - 1])
    return numbers


def _with(cut: Cut, recipes: dict[int, tuple[int, ...] | None], offloads: set[int]) -> Mapped:
    problem = cut.problem
    columns = [recipes.get(number) for number in range(len(problem.step.absences))]
    tier = next(iter(problem.routes), None)
    candidates = (
        Candidates.of(problem, tier, columns) if recipes else _candidates_that_move(problem.step, problem.machine, tier)
    )
    numbers: list[int] = candidates.absence.tolist()
    modes = np.full(len(numbers), KEEP, dtype=np.int8)
    for place, number in enumerate(numbers):
        if columns[number] is not None:
            modes[place] = RECOMPUTE
        elif number in offloads and candidates.can_offload[place]:
            modes[place] = OFFLOAD
    found = profile(needs_of(problem, candidates), modes)
    peak_bytes = int(found.level.max(initial=problem.resting_bytes))
    return Mapped(problem, candidates, modes, columns, peak_bytes, found.nested)


@remembered
def _candidates_that_move(step: Step, machine: Machine, tier: str | None) -> Candidates:
    """The candidates of a plan that computes nothing again."""
    return Candidates.of(Problem.of(step, machine), tier, [None] * len(step.absences))


def _search(problem: Problem, candidates: Candidates, limit_bytes: int) -> Search:
    return Search(problem, candidates, list(problem.routes)[:1], Room.of(problem, limit_bytes))
