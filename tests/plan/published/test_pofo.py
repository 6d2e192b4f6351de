"""POFO is Rotor without a link, the offloading program where nothing may be recomputed, and optimal in between."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest

from ebbtide.plan.published.beaumont import fluid_set, phases
from ebbtide.plan.published.chain import Chain
from ebbtide.plan.published.pofo import Links, pofo_plan
from ebbtide.plan.published.rotor import Table, table
from tests.plan.published.chain_steps import random_chain

FINE = 100_000


def optimum(solved: Table, bandwidth: float, memory: float, slots: int = FINE) -> float:
    plan = pofo_plan(solved, Links(bandwidth, bandwidth), memory, slots)
    return math.inf if plan is None else plan.seconds


def memories(chain: Chain) -> list[int]:
    return [chain.plain_bytes * share // 10 for share in (4, 5, 6, 7, 8, 10)]


@pytest.mark.parametrize("seed", range(6))
def test_no_link_is_rotor(seed: int) -> None:
    chain = random_chain(seed, 8)
    solved = table(chain, chain.plain_bytes, chain.plain_bytes)
    for memory in memories(chain):
        alone = solved.plan(memory)
        assert optimum(solved, 0.0, memory) == pytest.approx(math.inf if alone is None else alone.seconds)


@pytest.mark.parametrize("seed", range(6))
def test_never_worse_than_either_alone(seed: int) -> None:
    chain = random_chain(seed, 8)
    solved = table(chain, chain.plain_bytes, chain.plain_bytes)
    for memory in memories(chain):
        alone = solved.plan(memory)
        fluid = fluid_set(phases(chain, 0.7, 0.7), memory, FINE)
        best = min(
            math.inf if alone is None else alone.seconds,
            math.inf if fluid is None else chain.plain_seconds + fluid[0],
        )
        assert optimum(solved, 0.7, memory) <= best + 1e-9


def brute_force(
    solved: Table, beta: float, memory: float, i: int, state: tuple[float, float, float], whole: bool
) -> float:
    """The recurrence as it is published, by recursion; stages from 0. The loss holds its own gradient."""
    chain, (kept, out, back) = solved.chain, state
    x, stages = chain.boundary_bytes, chain.stages
    item = stages[i - 1].saved_bytes if whole else x[i]
    room = memory - kept - item
    if i == len(stages):
        return (out + back) / beta if room >= x[i] else math.inf
    best = math.inf
    transitions = []
    stage = stages[i]
    need_out = stage.saved_bytes + stage.forward_overhead_bytes
    need_in = stage.saved_bytes + x[i + 1] + x[i] + stage.backward_overhead_bytes
    if max(need_out, need_in) <= room:
        short_out, short_in = max(0, need_out - (room - out)), max(0, need_in - (room - back))
        seconds = stage.forward_seconds + stage.backward_seconds + (short_out + short_in) / beta
        crossed = (stage.forward_seconds * beta + short_out, stage.backward_seconds * beta + short_in)
        transitions.append((seconds, crossed, i + 1, True))
    for j in range(i, len(stages)):
        held = [x[k + 1] + stages[k].forward_overhead_bytes + (x[k] if k > i else 0) for k in range(i, j + 1)]
        again = float(solved.part_seconds(i, j, np.array(room)))
        if max(held) > room or math.isinf(again):
            continue
        before = [0, *itertools.accumulate(stages[k].forward_seconds for k in range(i, j + 1))]
        short = max(0, max(h - beta * b for h, b in zip(held, before, strict=False)) - (room - out))
        backward = (max(again, back / beta) + again + back / beta) / 2
        crossed = (beta * before[-1] + short, beta * backward)
        transitions.append((before[-1] + short / beta + backward, crossed, j + 1, False))
    for seconds, (crossed_out, crossed_in), following, kept_all in transitions:
        keep = (kept + item, max(0, out - crossed_out), max(0, back - crossed_in))
        offload = (kept, max(0, out + item - crossed_out), max(0, back - crossed_in) + item)
        for after in (keep, offload):
            best = min(best, seconds + brute_force(solved, beta, memory, following, after, kept_all))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_program_is_optimal(seed: int) -> None:
    chain = random_chain(seed, 4, overheads=True)
    solved = table(chain, chain.plain_bytes, chain.plain_bytes)
    for memory in memories(chain):
        for beta in (0.3, 1.5):
            best = brute_force(solved, beta, memory, 0, (0, 0, 0), False)
            assert optimum(solved, beta, memory) == pytest.approx(min(best, alone(solved, memory)))
            assert optimum(solved, beta, memory, 20) >= best - 1e-9


def alone(solved: Table, memory: float) -> float:
    plan = solved.plan(memory)
    return math.inf if plan is None else plan.seconds
