"""A time that no plan can beat: the linear relaxation of what a plan may do (see NOTE [Relaxation] in `bound_program`).

It follows design.md, section 4. Its fractional ancestor for offloading alone is in Beaumont, Eyraud-Dubois, Shilova,
"Optimal GPU-CPU Offloading Strategies for Deep Neural Network Training", Euro-Par 2020.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Set

import numpy as np

from ebbtide.arguments import as_duration, as_whole
from ebbtide.arrays import Floats, Ints
from ebbtide.machine import Machine
from ebbtide.plan.bound_program import Formulation, formulate
from ebbtide.plan.linear import solve_program, solve_whole
from ebbtide.plan.problem import Problem
from ebbtide.step import Step

MOST_GROUPS = 500
"""Groups of blocks at most; see NOTE [Groups of blocks] in `bound_program`. Twice as many took three times as long for
1,500 ops and changed the bound by less than 1e-6 on networks, and on ResNet-50 (480 blocks) none are merged."""
MOST_PROGRAM_SECONDS = 60.0
"""Seconds that solving the linear program may take; if they are not enough, the bound is weaker, but still a bound."""
ROUNDING = 1e-9
"""Share taken off for rounding in sums of floating-point numbers, here and in the simulator."""
TOLERANCE = 1e-5
"""Share of its delay taken off what branch and bound proves, for HiGHS's tolerances."""


@dataclasses.dataclass(frozen=True, slots=True)
class Bound:
    """A time that no plan can beat, and what the program that proves it says besides.

    Attributes:
        seconds: no plan within the limit takes less; infinite if there is no such plan.
        prices: array ``(moments,)``, seconds per byte: by how much the bound would fall if the limit rose in a moment.
        offloaded, recomputed: arrays ``(absences,)``, from 0 to 1: the share of each that the program's best solution
            offloads and computes again.
        rows, columns: size of the linear program, 0 if none was needed.
        merged: whether moments were merged to keep it small.
    """

    seconds: float
    prices: Floats
    offloaded: Floats
    recomputed: Floats
    rows: int = 0
    columns: int = 0
    merged: bool = False

    @classmethod
    def plain(cls, problem: Problem) -> Bound:
        """The bound that needs no program: no plan takes less than the step does without one."""
        nothing = np.zeros(len(problem.step.absences))
        seconds = min(problem.step.plain_seconds, float(problem.clock[-1]))
        return cls(seconds, np.zeros(problem.step.moments), nothing, nothing)


def lower_bound(
    step: Step,
    machine: Machine,
    limit_bytes: int,
    *,
    banned: Set[int] = frozenset(),
    most_groups: int = MOST_GROUPS,
) -> Bound:
    """A time that no plan for ``step`` on ``machine`` within ``limit_bytes`` can beat.

    Args:
        step: the observed step.
        machine: all its slow tiers may be used, whatever their capacity.
        limit_bytes: the budget: most bytes held at once, resting bytes included.
        banned: numbers of absences whose values no recipe may make.
        most_groups: groups of moments to tell apart at most, 1 or more; fewer are quicker and give a weaker bound.

    Returns:
        The bound in seconds, infinite if no plan stays within the limit, and what the linear program says besides.

    Raises:
        ArgumentError: if ``limit_bytes`` is not a whole number, or ``step`` or ``machine`` is of another type; it is a
            `ValueError`.
        RecordError: if the step or the machine describes something impossible.
    """
    limit_bytes = as_whole("limit_bytes", limit_bytes)
    return bound_of(Problem.of(step, machine), limit_bytes, banned=banned, most_groups=most_groups)


def bound_of(
    problem: Problem, limit_bytes: int | Ints, *, banned: Set[int] = frozenset(), most_groups: int = MOST_GROUPS
) -> Bound:
    """`lower_bound` of a step and a machine that are indexed already; the limit may differ from moment to moment."""
    return _prove(problem, limit_bytes, banned, most_groups)[0]


def _prove(
    problem: Problem, limit_bytes: int | Ints, banned: Set[int], most_groups: int
) -> tuple[Bound, Formulation | None]:
    """The bound, and the program that proves it, if it took one."""
    plain, moments = Bound.plain(problem), problem.step.moments
    if problem.resting_bytes <= np.min(limit_bytes) and bool((problem.plain <= limit_bytes).all()):
        return plain, None
    if not moments or not problem.step.absences:
        return dataclasses.replace(plain, seconds=math.inf), None
    formulation = formulate(problem, limit_bytes, banned, most_groups)
    program = formulation.program
    rows, columns = len(program.row_lower), len(program.cost)
    solution = solve_program(program, MOST_PROGRAM_SECONDS)
    prices = np.zeros(moments)
    np.add.at(
        prices,
        formulation.memory_moments,
        np.maximum(0.0, solution.multipliers[formulation.memory_rows])
        * formulation.unit_seconds
        / formulation.unit_bytes,
    )
    delay = solution.value * formulation.unit_seconds
    seconds = max(plain.seconds, (plain.seconds + delay) * (1 - ROUNDING))
    offloaded, recomputed = plain.offloaded.copy(), plain.recomputed.copy()
    for shares, pairs in ((offloaded, formulation.trips), (recomputed, formulation.replays)):
        np.add.at(shares, pairs[:, 0], solution.columns[pairs[:, 1]])
    return Bound(seconds, prices, offloaded, recomputed, rows, columns, formulation.merged), formulation


def whole_bound(
    step: Step, machine: Machine, limit_bytes: int, seconds: float, *, banned: Set[int] = frozenset()
) -> float:
    """`lower_bound`, raised by branch and bound: each value is computed again whole or not at all, as in every plan.

    In the linear program it may be so in part. This takes ten times as long and more: it is there to tell how much of
    the distance between a plan and its bound is the bound's. (Trips whole, too, raised it by 0.1 % at most.)

    Args:
        step, machine, limit_bytes, banned: as in `lower_bound`.
        seconds: about how long branch and bound may take; the less, the weaker the bound.

    Returns:
        The bound, in seconds; infinite if there is no plan.

    Raises:
        ArgumentError: if ``seconds`` is negative or not finite, ``limit_bytes`` is not a whole number, or ``step`` or
            ``machine`` is of another type; it is a `ValueError`.
        RecordError: if the step or the machine describes something impossible.
    """
    limit_bytes, most_seconds = as_whole("limit_bytes", limit_bytes), as_duration("seconds", seconds)
    problem = Problem.of(step, machine)
    linear, formulation = _prove(problem, limit_bytes, banned, MOST_GROUPS)
    if formulation is None or linear.seconds == math.inf or not len(formulation.replays):
        return linear.seconds
    value = solve_whole(formulation.program, formulation.replays[:, 1], most_seconds)
    delay = value * (1 - TOLERANCE) * formulation.unit_seconds
    return max(linear.seconds, (step.plain_seconds + delay) * (1 - ROUNDING))
