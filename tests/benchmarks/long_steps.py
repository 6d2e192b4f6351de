"""How long planning takes for long steps: ``python -m tests.benchmarks.long_steps [LAYERS...]``; 6 ops a layer."""

from __future__ import annotations

import statistics
import sys
import time

from ebbtide.plan import lower_bound, solve
from ebbtide.plan.follow import prepared
from ebbtide.plan.problem import Problem
from ebbtide.plan.simulate import moves_of
from tests.plan.limits import limit_at
from tests.plan.random_steps import disk_machine, network_step

TURNS = 20


def measure(layers: int) -> str:
    """One row: a network within 40 % of what it needs above rest, on a slow disk."""
    step, machine = network_step(layers, seconds=4e-3), disk_machine(5e8, 2.5e8, slowdown=0.05)
    limit_bytes = limit_at(step, 0.4)
    start = time.perf_counter()
    bound = lower_bound(step, machine, limit_bytes)
    bound_seconds = time.perf_counter() - start
    start = time.perf_counter()
    plan = solve(step, machine, limit_bytes)
    solve_seconds = time.perf_counter() - start
    problem = Problem.of(step, machine)
    moves = moves_of(problem, plan.decisions)
    start = time.perf_counter()
    follower, columns = prepared(problem, moves)
    prepare_seconds = time.perf_counter() - start
    taken = []
    for _ in range(TURNS):
        start = time.perf_counter()
        follower.follow(columns)
        taken.append(time.perf_counter() - start)
    return (
        f"{len(step.ops):8} ops {len(step.absences):6} absences: bound {bound.seconds / step.plain_seconds:.5f} in"
        f" {bound_seconds:.2f} s, plan {plan.seconds / step.plain_seconds:.5f} in {solve_seconds:.2f} s,"
        f" simulated in {statistics.median(taken) * 1e3:.3f} ms a plan, and {prepare_seconds * 1e3:.2f} ms once for all"
    )


if __name__ == "__main__":
    measure(20)
    for layers in [int(argument) for argument in sys.argv[1:]] or [250, 2500, 12500]:
        print(measure(layers), flush=True)
