"""On small steps `solve` finds the best of all plans; ``tests.benchmarks.optimum`` tries many more of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from ebbtide.machine import Machine
from ebbtide.plan import NO_CAUTION, solve
from ebbtide.step import Step
from tests.plan.exhaustive import best_plans, small_case, wide_case


@pytest.mark.parametrize(("make", "cases"), [(small_case, 8), (wide_case, 4)], ids=["offloaded", "recomputed"])
def test_finds_the_best_of_all_plans(make: Callable[[int], tuple[Step, Machine]], cases: int) -> None:
    excess = []
    for seed in range(cases):
        step, machine = make(seed)
        best = best_plans(step, machine)
        for limit_bytes, seconds in (best[:1] + best[len(best) // 2 : -1])[:2]:
            plan = solve(step, machine, limit_bytes, seconds=0.05, caution=NO_CAUTION)
            assert plan.bound_seconds is not None
            assert plan.bound_seconds <= min(seconds, plan.seconds)
            excess.append(plan.seconds / seconds - 1)
    assert max(excess) < 0.02
    assert sum(found < 1e-9 for found in excess) >= 0.9 * len(excess)
