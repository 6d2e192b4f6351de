"""How near `solve` comes to the best of all plans: ``python -m tests.benchmarks.optimum [CASES [SECONDS]]``.

``CASES`` steps of three to five absences, each kept, recomputed, or offloaded with any three ticks, and as many of
eight to fourteen absences that are kept or recomputed.
"""

from __future__ import annotations

import statistics
import sys
from collections.abc import Callable

from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan import solve
from ebbtide.plan.caution import NO_CAUTION
from ebbtide.step import Step
from tests.plan.exhaustive import best_plans, small_case, wide_case

EQUAL = 1e-9


def measure(make: Callable[[int], tuple[Step, Machine]], cases: int, seconds: float) -> str:
    """One line over the least, a middle and a wide limit of each case."""
    excess, gaps, refused = [], [], 0
    for seed in range(cases):
        step, machine = make(seed)
        best = best_plans(step, machine)
        for limit_bytes, optimum in sorted({*best[:1], *best[len(best) // 2 :][:1], *best[-2:-1]}):
            try:
                plan = solve(step, machine, limit_bytes, seconds=seconds, caution=NO_CAUTION)
            except BudgetError:
                refused += 1
                continue
            excess.append(plan.seconds / optimum - 1)
            gaps.append(optimum / (plan.bound_seconds or optimum) - 1)
    equal = sum(found <= EQUAL for found in excess) / max(1, len(excess) + refused)
    return (
        f"{len(excess) + refused} limits: equal in {equal:.1%}, mean excess {statistics.fmean(excess):.4%}, largest"
        f" {max(excess):.2%}, refused {refused}; optimum over bound: mean {statistics.fmean(gaps):.2%}, least"
        f" {min(gaps):.1e}"
    )


if __name__ == "__main__":
    cases = int(sys.argv[1]) if len(sys.argv) > 1 else 300
    for name, make in (("offloaded or recomputed", small_case), ("recomputed", wide_case)):
        print(f"{name}: {measure(make, cases, float(sys.argv[2]) if len(sys.argv) > 2 else 0.3)}", flush=True)
