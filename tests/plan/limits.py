"""Budgets that tests plan for."""

from __future__ import annotations

from ebbtide.decisions import Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan import plain_peak_bytes, solve
from ebbtide.plan.caution import Caution
from ebbtide.step import Step


def limit_at(step: Step, fraction: float) -> int:
    """Rest and ``fraction`` of what the plain step needs above it."""
    return step.resting_bytes + int(fraction * (plain_peak_bytes(step) - step.resting_bytes))


def solve_or_least(step: Step, machine: Machine, limit_bytes: int, caution: Caution | None = None) -> Plan:
    """A plan for the limit, or for the least one if that is above it."""
    try:
        return solve(step, machine, limit_bytes, seconds=0.02, caution=caution)
    except BudgetError as error:
        least = error.reachable_bytes
    assert least > limit_bytes
    return solve(step, machine, least, seconds=0.02, caution=caution)
