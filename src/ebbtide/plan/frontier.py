"""What memory costs in time, over all budgets of a step: the solver's plans, the bound, and published policies."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping

from ebbtide.arguments import as_whole, check_instance
from ebbtide.decisions import Plan
from ebbtide.errors import ArgumentError, BudgetError, PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.caution import NO_CAUTION
from ebbtide.plan.judged import Planner
from ebbtide.plan.problem import plain_peak_bytes
from ebbtide.plan.solve import solve
from ebbtide.step import Step
from ebbtide.step_checks import check_trains


@dataclasses.dataclass(frozen=True, slots=True)
class Point:
    """What a step takes within a budget.

    Attributes:
        limit_bytes: the budget.
        peak_bytes: most bytes that the plan holds; the budget itself for the bound.
        seconds: duration of the step.
    """

    limit_bytes: int
    peak_bytes: int
    seconds: float


@dataclasses.dataclass(frozen=True, slots=True)
class Curve:
    """A planner, or the bound, over budgets.

    Attributes:
        name: of the planner.
        points: by rising budget; budgets that it does not meet have none.
        refused: why it has no point at all, in one sentence, or an empty string.
    """

    name: str
    points: tuple[Point, ...]
    refused: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Frontier:
    """Time against memory of one step on one machine.

    Attributes:
        machine: its name.
        resting_bytes: bytes that the step touches but did not make.
        least_peak_bytes: least peak that the solver reaches; the first budget.
        plain_peak_bytes: peak without a plan; the last budget.
        plain_seconds: duration without a plan.
        solver: the solver's plans.
        bound: times that no plan can beat.
        policies: published policies.
    """

    machine: str
    resting_bytes: int
    least_peak_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    solver: Curve
    bound: Curve
    policies: tuple[Curve, ...] = ()

    def overhead(self, seconds: float) -> float:
        """``seconds`` beyond the plain step's, as a share of those."""
        return seconds / self.plain_seconds - 1


def frontier(
    step: Step,
    machine: Machine,
    *,
    points: int = 12,
    policies: Mapping[str, Planner] | None = None,
    seconds: float = 1.0,
    progress: Callable[[float, str], None] | None = None,
) -> Frontier:
    """Plan ``step`` for budgets from the least reachable peak to the plain one.

    All plans are made without caution, which neither the bound nor the policies know of: those of `solve` for the same
    budgets leave time free around transfers unless told otherwise, and take somewhat longer.

    A plan for less memory is one for more, too: the solver's curve never rises with memory. A policy is also asked for
    the least peak that it says it reaches, so that its curve begins there.

    Args:
        step, machine: the problem.
        points: budgets, evenly spread, both ends included.
        policies: by name, as in `ebbtide.plan.published.registry.POLICIES`.
        seconds: about how long the solver may search for each budget.
        progress: told the share that is done, 0 to 1, and what is being planned.

    Raises:
        RecordError: as `check_trains`, or if the step or the machine describes something impossible.
        ArgumentError: if ``points`` is not a whole number of at least two, ``policies`` is not a mapping, or
            ``seconds`` is negative or not finite; it is a `ValueError`.
    """
    points = as_whole("points", points)
    if points < 2:
        raise ArgumentError(f"a frontier has two points at least, not {points}")
    check_instance("policies", policies or {}, Mapping)
    check_trains(step)
    chosen = dict(policies or {})
    total, done = 1 + points * (1 + len(chosen)), 0

    def begin(what: str) -> None:
        nonlocal done
        if progress is not None:
            progress(done / total, what)
        done += 1

    begin("least peak")
    least, plain = least_peak_bytes(step, machine), plain_peak_bytes(step)
    limits = sorted({least + (plain - least) * point // (points - 1) for point in range(points)})
    plans = []
    for limit in limits:
        begin("solver")
        plans.append(solve(step, machine, limit, seconds=seconds, caution=NO_CAUTION))
    curves = [
        _policy_curve(name, policy, step, machine, limits, functools.partial(begin, name))
        for name, policy in chosen.items()
    ]
    return Frontier(
        machine=machine.name,
        resting_bytes=step.resting_bytes,
        least_peak_bytes=least,
        plain_peak_bytes=plain,
        plain_seconds=step.plain_seconds,
        solver=Curve("solver", tuple(_falling(plans))),
        bound=Curve("bound", tuple(_bounds(plans))),
        policies=tuple(curves),
    )


def least_peak_bytes(step: Step, machine: Machine) -> int:
    """The least peak, in bytes, that a plan found for ``step`` on ``machine`` has; `solve` can plan for it.

    Args:
        step: the observed step.
        machine: all its slow tiers are used, if it has any.

    Raises:
        ArgumentError: if ``step`` or ``machine`` is of another type; it is a `ValueError`.
        RecordError: if the step or the machine describes something impossible.
    """
    try:
        solve(step, machine, -1, seconds=0.0)
    except BudgetError as error:
        return error.reachable_bytes
    raise AssertionError("nothing fits into less than no memory")


def _policy_curve(
    name: str, policy: Planner, step: Step, machine: Machine, limits: list[int], begin: Callable[[], None]
) -> Curve:
    """A policy at each limit, and at the least peak that it names if that is between two of them."""
    found: list[Point] = []
    least: BudgetError | None = None
    for limit in limits:
        begin()
        try:
            plan = policy(step, machine, limit)
        except PolicyError as error:
            return Curve(name, (), str(error))
        except BudgetError as error:
            if least is None or error.reachable_bytes <= least.reachable_bytes:
                least = error
            continue
        if not found and least is not None and least.reachable_bytes < limit:
            with contextlib.suppress(BudgetError):
                found.append(_point(policy(step, machine, least.reachable_bytes)))
        found.append(_point(plan))
    return Curve(name, tuple(found), "" if found or least is None else str(least))


def _point(plan: Plan) -> Point:
    return Point(plan.limit_bytes, plan.peak_bytes, plan.seconds)


def _falling(plans: list[Plan]) -> Iterator[Point]:
    """The fastest plan so far at each budget."""
    best: Plan | None = None
    for plan in plans:
        if best is None or plan.seconds <= best.seconds:
            best = plan
        yield Point(plan.limit_bytes, best.peak_bytes, best.seconds)


def _bounds(plans: list[Plan]) -> Iterator[Point]:
    for plan in plans:
        if plan.bound_seconds is not None and math.isfinite(plan.bound_seconds):
            yield Point(plan.limit_bytes, plan.limit_bytes, plan.bound_seconds)
