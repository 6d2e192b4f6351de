"""From a policy's decisions to a plan: the simulator's word on them."""

from __future__ import annotations

from collections.abc import Sequence

from ebbtide.decisions import Decision, Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan.problem import Facts, plain_peak_bytes
from ebbtide.plan.simulate import simulate
from ebbtide.step import Step
from ebbtide.units import format_bytes


def judged(step: Step, machine: Machine, limit_bytes: int, decisions: Sequence[Decision], method: str) -> Plan:
    """``decisions`` as a plan of ``method``, with what the simulator predicts.

    Raises:
        BudgetError: if they hold more than ``limit_bytes`` at once.
        PlanError: if they do not fit the step or the machine.
    """
    outcome = simulate(step, machine, decisions)
    if outcome.peak_bytes > limit_bytes:
        ticks = Facts.of(step).op_moments
        tick = next((tick for tick, moment in enumerate(ticks) if moment >= outcome.peak_moment), len(ticks) - 1)
        op = step.ops[tick]
        place = f" of {op.module}" if op.module else ""
        raise BudgetError(
            f"{method} cannot meet the budget {format_bytes(limit_bytes)}: the least peak it reaches is"
            f" {format_bytes(outcome.peak_bytes)}, at op {tick} {op.name}{place}; ask for at least"
            f" {outcome.peak_bytes} bytes or take another policy",
            limit_bytes=limit_bytes,
            reachable_bytes=outcome.peak_bytes,
            tick=tick,
            op=op.name,
            module=op.module,
        )
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
