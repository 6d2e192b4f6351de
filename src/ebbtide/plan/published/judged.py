"""A policy's decisions, judged: the plan with what the simulator predicts of it, or why it cannot be used."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

import numpy as np

from ebbtide.decisions import Decision, Plan
from ebbtide.errors import BudgetError
from ebbtide.plan.follow import follow
from ebbtide.plan.problem import Problem
from ebbtide.plan.simulate import moves_of
from ebbtide.step import Step
from ebbtide.units import format_bytes


def judged(problem: Problem, limit_bytes: int, decisions: Sequence[Decision], method: str) -> Plan:
    """``decisions`` as a plan of ``method``.

    Raises:
        BudgetError: if they hold more than ``limit_bytes`` at once; it names their peak and where it is.
        PlanError: if they do not fit the step or the machine.
    """
    course, rest = follow(problem, moves_of(problem, decisions)), problem.resting_bytes
    peak_bytes = int(course.memory.max(initial=rest))
    if peak_bytes > limit_bytes:
        moment = int(np.argmax(course.memory)) if course.memory.size else 0
        raise _budget_error(problem.step, peak_bytes, moment, limit_bytes, method)
    return Plan(
        decisions=tuple(decisions),
        limit_bytes=limit_bytes,
        peak_bytes=peak_bytes,
        seconds=course.seconds,
        physical_peak_bytes=int(course.physical.max(initial=rest)),
        plain_peak_bytes=int(problem.plain.max(initial=rest)),
        plain_seconds=problem.step.plain_seconds,
        resting_bytes=rest,
        method=method,
    )


def _budget_error(step: Step, reachable: int, moment: int, limit_bytes: int, method: str) -> BudgetError:
    tick = min(bisect.bisect_left(step.op_moments(), moment), len(step.ops) - 1)
    op, module = (step.ops[tick].name, step.ops[tick].module) if step.ops else ("", "")
    place = f", at op {tick} {op}{f' of {module}' if module else ''}" if step.ops else ""
    message = (
        f"budget {format_bytes(limit_bytes)} cannot be met by {method}: the least peak it reaches is"
        f" {format_bytes(reachable)}{place}; ask for at least {reachable} bytes or plan with another method"
    )
    return BudgetError(
        message, limit_bytes=limit_bytes, reachable_bytes=reachable, tick=max(tick, 0), op=op, module=module
    )
