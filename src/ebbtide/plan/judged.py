"""Decisions, judged: the plan with what the simulator predicts of it, or why it cannot be used."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from ebbtide.decisions import Decision, Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan.finals import ADVICE
from ebbtide.plan.follow import Course, follow
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import SMALLEST_BYTES
from ebbtide.plan.simulate import moves_of
from ebbtide.step import Step
from ebbtide.units import format_bytes

Planner = Callable[[Step, Machine, int], Plan]
"""A step, a machine and a limit in bytes to a plan; raises `BudgetError`, or `PolicyError` where it does not suit."""

WORTH_SHARE = 0.05
"""Share of what a step holds above rest from which on it is worth a word that nothing asks for it."""


def to_plan(
    problem: Problem,
    limit_bytes: int,
    decisions: Sequence[Decision],
    method: str,
    *,
    is_policy: bool = True,
    bound_seconds: float | None = None,
) -> Plan:
    """``decisions`` as a plan.

    Args:
        problem: the step and the machine.
        limit_bytes: the budget.
        decisions: one for each absence.
        method: what made them.
        is_policy: whether another method may do better with less.
        bound_seconds: a time that no plan can beat, if it is known.

    Raises:
        BudgetError: if they hold more than ``limit_bytes`` at once; it names their peak and where it is.
        PlanError: if they do not fit the step or the machine.
    """
    course, rest = follow(problem, moves_of(problem, decisions)), problem.resting_bytes
    peak_bytes = int(course.memory.max(initial=rest))
    if peak_bytes > limit_bytes:
        raise budget_error(problem, course, limit_bytes, method if is_policy else "")
    return Plan(
        decisions=tuple(decisions),
        limit_bytes=limit_bytes,
        peak_bytes=peak_bytes,
        seconds=course.seconds,
        physical_peak_bytes=int(course.physical.max(initial=rest)),
        plain_peak_bytes=int(problem.plain.max(initial=rest)),
        plain_seconds=problem.step.plain_seconds,
        resting_bytes=rest,
        bound_seconds=bound_seconds,
        method=method,
    )


def budget_error(problem: Problem, least: Course, limit_bytes: int, policy: str = "") -> BudgetError:
    """The error that no plan, or none of ``policy``, stays within ``limit_bytes``; it says where ``least``, the course
    with the lowest peak, holds most."""
    step = problem.step
    moment = int(np.argmax(least.memory)) if least.memory.size else 0
    reachable = int(least.memory.max(initial=problem.resting_bytes))
    tick = min(int(np.searchsorted(problem.facts.op_moments, moment)), len(step.ops) - 1)
    op, module = (step.ops[tick].name, step.ops[tick].module) if step.ops else ("", "")
    place = f", at op {tick} {op}{f' of {module}' if module else ''}" if step.ops else ", before any op"
    message = (
        f"budget {format_bytes(limit_bytes)} cannot be met{f' by {policy}' if policy else ''}: the least"
        f" {'peak it reaches' if policy else 'reachable peak'} is {format_bytes(reachable)}{place}; ask for at least"
        f" {reachable} bytes{' or plan with another method' if policy else ''}"
    )
    if step.saved and not step.has_backward_pass:
        message += ". The step has no backward pass: call backward() within it, or all that it saves has to stay"
    elif step.has_backward_pass and not step.saved:
        message += (
            ". The step has a backward pass, and autograd saved nothing for it within the step that could leave: run"
            " the forward pass within it, too"
        )
    idle_bytes = 0 if problem.routes else int(problem.spans.size_bytes[problem.spans.final].sum())
    if idle_bytes > WORTH_SHARE * (reachable - problem.resting_bytes):
        message += f". Graphs hold {format_bytes(idle_bytes)} that no backward pass asks for any more: {ADVICE}"
    absent = (problem.spans.opens <= moment) & (moment < problem.spans.closes)
    small_bytes = int(problem.spans.size_bytes[absent & (problem.spans.size_bytes < SMALLEST_BYTES)].sum())
    if small_bytes > WORTH_SHARE * (reachable - problem.resting_bytes):
        message += (
            f". Tensors below {format_bytes(SMALLEST_BYTES)} stay, and are {format_bytes(small_bytes)} there: for long"
            " loops over small states, see ebbtide.scan"
        )
    return BudgetError(
        message, limit_bytes=limit_bytes, reachable_bytes=reachable, tick=max(tick, 0), op=op, module=module
    )
