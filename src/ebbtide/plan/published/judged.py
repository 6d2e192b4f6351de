"""A policy's decisions, judged: the plan with what the simulator predicts of it, or why it cannot be used."""

from __future__ import annotations

import bisect
from collections.abc import Sequence

from ebbtide.decisions import Decision, Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan.problem import plain_peak_bytes
from ebbtide.plan.simulate import Outcome, simulate
from ebbtide.step import Step
from ebbtide.units import format_bytes


def judged(step: Step, machine: Machine, limit_bytes: int, decisions: Sequence[Decision], method: str) -> Plan:
    """``decisions`` as a plan of ``method``.

    Raises:
        BudgetError: if they hold more than ``limit_bytes`` at once; it names their peak and where it is.
        PlanError: if they do not fit the step or the machine.
    """
    outcome = simulate(step, machine, decisions)
    if outcome.peak_bytes > limit_bytes:
        raise _budget_error(step, outcome, limit_bytes, method)
    return Plan(
        decisions=tuple(decisions),
        limit_bytes=limit_bytes,
        peak_bytes=outcome.peak_bytes,
        seconds=outcome.seconds,
        physical_peak_bytes=outcome.physical_peak_bytes,
        plain_peak_bytes=plain_peak_bytes(step),
        plain_seconds=step.plain_seconds,
        resting_bytes=step.resting_bytes,
        method=method,
    )


def _budget_error(step: Step, outcome: Outcome, limit_bytes: int, method: str) -> BudgetError:
    tick = min(bisect.bisect_left(step.op_moments(), outcome.peak_moment), len(step.ops) - 1)
    op, module = (step.ops[tick].name, step.ops[tick].module) if step.ops else ("", "")
    place = f", at op {tick} {op}{f' of {module}' if module else ''}" if step.ops else ""
    reachable = outcome.peak_bytes
    message = (
        f"budget {format_bytes(limit_bytes)} cannot be met by {method}: the least peak it reaches is"
        f" {format_bytes(reachable)}{place}; ask for at least {reachable} bytes or plan with another method"
    )
    return BudgetError(
        message, limit_bytes=limit_bytes, reachable_bytes=reachable, tick=max(tick, 0), op=op, module=module
    )
