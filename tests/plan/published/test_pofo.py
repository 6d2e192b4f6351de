"""POFO is Rotor without a link, the offloading program where nothing may be recomputed, and optimal in between."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random

import numpy as np
import pytest

from ebbtide.plan.published.beaumont import fluid_set, phases
from ebbtide.plan.published.chain import Chain
from ebbtide.plan.published.pofo import Links, pofo_plan
from ebbtide.plan.published.rotor import Table, rounded_up, table
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
    solved: Table, links: Links, memory: float, i: int, state: tuple[float, float, float], whole: bool
) -> float:
    """The recurrence as it is published, by recursion; stages from 0. The loss holds its own gradient. What stays is
    part of what `F_all` keeps, and is kept by a sweep."""
    chain, (kept, out, back) = solved.chain, state
    x, stages = chain.boundary_bytes, chain.stages
    out_rate, in_rate = links.out_bytes_per_second, links.in_bytes_per_second
    saved = [stage.saved_bytes + stage.fixed_bytes for stage in stages]
    item = saved[i - 1] if whole else x[i]
    room = memory - kept - item
    if i == len(stages):
        return out / out_rate + back / in_rate if room >= x[i] else math.inf
    stage, transitions = stages[i], []
    need_out = saved[i] + stage.forward_overhead_bytes
    need_in = saved[i] + x[i + 1] + x[i] + stage.backward_overhead_bytes
    if max(need_out, need_in) <= room:
        short_out, short_in = max(0, need_out - (room - out)), max(0, need_in - (room - back))
        seconds = stage.forward_seconds + stage.backward_seconds + short_out / out_rate + short_in / in_rate
        crossed = (stage.forward_seconds * out_rate + short_out, stage.backward_seconds * in_rate + short_in)
        transitions.append((seconds, crossed, i + 1, True, 0))
    for j in range(i, len(stages)):
        stays = list(itertools.accumulate(stages[k].fixed_bytes for k in range(i, j + 1)))
        held = [
            x[k + 1] + stages[k].forward_overhead_bytes + (x[k] if k > i else 0) + stays[k - i] for k in range(i, j + 1)
        ]
        again = float(solved.part_seconds(i, j, np.array(room - stays[-1])))
        if max(held) > room or math.isinf(again):
            continue
        before = [0, *itertools.accumulate(stages[k].forward_seconds for k in range(i, j + 1))]
        short = max(0, max(h - out_rate * b for h, b in zip(held, before, strict=False)) - (room - out))
        arriving = back / in_rate
        backward = (max(again, arriving) + again + arriving) / 2
        crossed = (out_rate * before[-1] + short, in_rate * backward)
        transitions.append((before[-1] + short / out_rate + backward, crossed, j + 1, False, stays[-1]))
    best = math.inf
    for seconds, (crossed_out, crossed_in), following, kept_all, stay in transitions:
        keep = (kept + item + stay, max(0, out - crossed_out), max(0, back - crossed_in))
        offload = (kept + stay, max(0, out + item - crossed_out), max(0, back - crossed_in) + item)
        for after in (keep, offload):
            best = min(best, seconds + brute_force(solved, links, memory, following, after, kept_all))
    return best


@pytest.mark.parametrize("seed", range(5))
def test_program_is_optimal(seed: int) -> None:
    chain = random_chain(seed, 4, overheads=True)
    solved = table(chain, chain.plain_bytes, chain.plain_bytes)
    for memory in memories(chain):
        for beta in (0.3, 1.5):
            best = brute_force(solved, Links(beta, beta), memory, 0, (0, 0, 0), False)
            assert optimum(solved, beta, memory) == pytest.approx(min(best, alone(solved, memory)))
            assert optimum(solved, beta, memory, 20) >= best - 1e-9


def alone(solved: Table, memory: float) -> float:
    plan = solved.plan(memory)
    return math.inf if plan is None else plan.seconds


def with_bytes_that_stay(chain: Chain, seed: int) -> Chain:
    """The same, but that most stages save some bytes that cannot be computed again."""
    dice = random.Random(seed)
    stages = tuple(dataclasses.replace(stage, fixed_bytes=dice.randrange(4)) for stage in chain.stages)
    return Chain(stages, chain.input_bytes)


@pytest.mark.parametrize("stays", [False, True], ids=["all", "not all"])
@pytest.mark.parametrize("seed", range(3))
def test_program_is_optimal_with_links_of_two_speeds(seed: int, stays: bool) -> None:
    """``not all``: not all that a stage saves can be computed again."""
    chain = random_chain(seed, 4, overheads=True)
    chain = with_bytes_that_stay(chain, seed) if stays else chain
    solved = table(chain, chain.plain_bytes, chain.plain_bytes)
    for memory, links in itertools.product(memories(chain), (Links(0.3, 1.5), Links(1.5, 0.3))):
        best = brute_force(solved, links, memory, 0, (0, 0, 0), False)
        plan = pofo_plan(solved, links, memory, FINE)
        found = math.inf if plan is None else plan.seconds
        assert found == pytest.approx(min(best, alone(solved, memory)))


@pytest.mark.parametrize("rate", [0.0, 0.02])
@pytest.mark.parametrize("seed", range(3))
def test_few_slots_are_no_worse_than_no_link(seed: int, rate: float) -> None:
    """Of states that share a slot only the cheapest stays, and Rotor's own schedule may go by another one."""
    chain = random_chain(seed, 24)
    solved = table(chain, rounded_up(chain))
    for share in range(15, 100, 4):
        memory = chain.plain_bytes * share / 100
        least, plan = alone(solved, memory), pofo_plan(solved, Links(rate, rate), memory)
        assert plan is not None or math.isinf(least)
        assert plan is None or plan.seconds <= least + 1e-9
