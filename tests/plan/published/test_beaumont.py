"""Offloading on chains: bounds hold, heuristics are as near to the optimum as the paper's reconstruction, or nearer."""

from __future__ import annotations

import functools
import itertools
import math
import random

import numpy as np
import pytest

from ebbtide.plan.published.beaumont import Phase, fluid_set, idle_seconds, phases, timed
from ebbtide.plan.published.chain import Chain, Stage

FINE = 100_000
"""Slots so many that no two states are taken for one."""


def instance(seed: int, length: int = 8) -> tuple[Chain, tuple[Phase, Phase], int]:
    """A chain, its phases, and a memory of 50 to 80 % of what it needs without offloading."""
    dice = random.Random(seed)
    stages = []
    for _ in range(length):
        size, seconds = dice.randrange(1, 11), dice.randrange(1, 11)
        stages.append(Stage(seconds, 2 * seconds, size, size, dice.randrange(0, 3), dice.randrange(0, 3)))
    chain = Chain(tuple(stages), dice.randrange(1, 11))
    bandwidth = dice.uniform(0.5, 2.0)
    return chain, phases(chain, bandwidth, bandwidth), round(dice.uniform(0.5, 0.8) * chain.plain_bytes)


def lower_bound_seconds(both: tuple[Phase, Phase], memory_bytes: float) -> float:
    """Idle time that no set gets below, whole or in part, in whatever order; infinite if none fits.

    If items may go in part, the first ones, up to some volume, are the best. Stalls do not depend on the volume as long
    as it suffices, and what is left to copy at the end grows with it: the least volume that suffices for both phases is
    the best.
    """
    volume = 0.0
    for phase in both:
        held = np.cumsum(phase.item_bytes[:-1], dtype=np.float64)
        missing = held + np.array(phase.need_bytes) - memory_bytes
        if bool((missing > held - np.array(phase.item_bytes[:-1])).any()):
            return math.inf
        volume = max(volume, float(missing.max()))
    return math.fsum(_fractional_idle(phase, volume, memory_bytes) for phase in both)


def _fractional_idle(phase: Phase, volume: float, memory_bytes: float) -> float:
    """Idle time of a phase if the first ``volume`` bytes go out and are freed byte by byte."""
    sent = idle = held = 0.0
    for stage, seconds in enumerate(phase.seconds):
        held += phase.item_bytes[stage]
        wait = max(0.0, held + phase.need_bytes[stage] - memory_bytes - sent) / phase.bytes_per_second
        idle += wait
        there = held if phase.copies_what_is_read else held - phase.item_bytes[stage]
        sent = min(volume, there, sent + phase.bytes_per_second * (wait + seconds))
    return idle + (volume - sent) / phase.bytes_per_second


def greedy_set(both: tuple[Phase, Phase], memory_bytes: float) -> frozenset[int]:
    """The first items: as many as cost the least idle time, exactly evaluated. Time O(stages^2)."""
    prefixes = [frozenset(range(count)) for count in range(len(both[0].seconds) + 1)]
    return min(prefixes, key=lambda prefix: idle_seconds(both, prefix, memory_bytes))


def subsets(count: int) -> list[frozenset[int]]:
    return [frozenset(s) for size in range(count + 1) for s in itertools.combinations(range(count), size)]


@functools.cache
def sample() -> list[tuple[float, dict[str, float]]]:
    """Compute time and idle times of the feasible ones among 100 random instances."""
    found = []
    for seed in range(100):
        chain, both, memory = instance(seed)
        count = len(chain.stages)
        fluid = fluid_set(both, memory, FINE)
        exact = min(idle_seconds(both, chosen, memory) for chosen in subsets(count))
        if math.isfinite(exact):
            assert fluid is not None
            idle = {
                "bound": lower_bound_seconds(both, memory),
                "fluid": fluid[0],
                "exact": exact,
                "program": idle_seconds(both, fluid[1], memory),
                "greedy": idle_seconds(both, greedy_set(both, memory), memory),
                "everything": idle_seconds(both, frozenset(range(count)), memory),
            }
            found.append((chain.plain_seconds, idle))
    return found


def test_relaxations_bound_and_heuristics_do_not() -> None:
    assert len(sample()) > 30
    for _, idle in sample():
        assert idle["bound"] <= idle["fluid"] + 1e-9
        assert idle["fluid"] <= idle["exact"] + 1e-9
        assert idle["exact"] <= idle["greedy"] + 1e-9
        assert idle["exact"] <= idle["program"] + 1e-9
        assert idle["greedy"] <= idle["everything"] + 1e-9


def test_means_stand_as_they_should() -> None:
    """The published means are 2.36 % (optimum), 3.15 % (greedy), 2.62 % (program) and 21.1 % (everything).

    How those random chains were drawn is not told, so the figures themselves cannot be met. What can: both heuristics
    are as near to the optimum as they were there, by ratio, and offloading everything is far from it. On these chains
    it is 3.04 %, 3.16 %, 3.22 % and 16.3 %: greedy is a little nearer than the program, unlike there.
    """
    finite = [(seconds, idle) for seconds, idle in sample() if math.isfinite(idle["program"])]
    mean = {name: sum(idle[name] / seconds for seconds, idle in finite) / len(finite) for name in finite[0][1]}
    assert len(finite) > 0.8 * len(sample())
    assert mean["bound"] <= mean["fluid"] <= mean["exact"]
    assert mean["program"] <= 2.62 / 2.36 * mean["exact"]
    assert mean["greedy"] <= 3.15 / 2.36 * mean["exact"]
    assert mean["everything"] > 3 * mean["exact"]


def brute_force_fluid(both: tuple[Phase, Phase], memory: float, stage: int, state: tuple[float, float, float]) -> float:
    """The recurrence of the second relaxation, as it is written, by recursion."""
    forward, backward = both
    kept, out, back = state
    if stage == len(forward.seconds):
        return out / forward.bytes_per_second + back / backward.bytes_per_second
    item = forward.item_bytes[stage]
    if max(forward.need_bytes[stage], backward.need_bytes[stage]) > memory - kept - item:
        return math.inf
    short_out = max(0, forward.need_bytes[stage] - (memory - kept - out - item))
    short_in = max(0, backward.need_bytes[stage] - (memory - kept - back - item))
    crossed_out = forward.seconds[stage] * forward.bytes_per_second + short_out
    crossed_in = backward.seconds[stage] * backward.bytes_per_second + short_in
    keep = (kept + item, max(0, out - crossed_out), max(0, back - crossed_in))
    offload = (kept, max(0, out + item - crossed_out), max(0, back - crossed_in) + item)
    rest = min(brute_force_fluid(both, memory, stage + 1, state) for state in (keep, offload))
    return short_out / forward.bytes_per_second + short_in / backward.bytes_per_second + rest


@pytest.mark.parametrize("seed", range(20))
def test_program_finds_the_fluid_optimum(seed: int) -> None:
    _, both, memory = instance(seed, length=6)
    best = brute_force_fluid(both, memory, 0, (0, 0, 0))
    fine, coarse = fluid_set(both, memory, FINE), fluid_set(both, memory, 20)
    assert (math.inf if fine is None else fine[0]) == pytest.approx(best)
    assert (math.inf if coarse is None else coarse[0]) >= best - 1e-9


def three_partition(items: list[int], target: int) -> Phase:
    """The reduction from 3-Partition: no idle time exactly if the items, in this order, fill bins of ``target``."""
    bins = len(items) // 3
    seconds = [0.0] * len(items)
    needs = list(items)
    for k in range(1, bins + 1):
        seconds += [float(target), 0.0]
        needs += [(k - 1) * target, k * target]
    return Phase(tuple(seconds), (0, *items, *[0] * (2 * bins)), tuple(needs), 1.0)


def idle_before_drain(phase: Phase, offloaded: frozenset[int], memory: float) -> float:
    found = timed(phase, offloaded, memory)
    return found.idle_seconds - max(0.0, found.copies[-1][2] - sum(phase.seconds))


def test_hardness_gadget() -> None:
    triples = [6, 7, 7, 6, 6, 8, 9, 5, 6]
    everything = frozenset(range(1, 10))
    assert timed(three_partition(triples, 20), everything, sum(triples)).idle_seconds == 0
    shuffled = [6, 6, 7, 9, 8, 5, 7, 6, 6]
    assert idle_before_drain(three_partition(shuffled, 20), everything, sum(shuffled)) > 0


def test_copies_are_timed() -> None:
    """Two items of 4 go out at 1 byte a second; the third stage has to wait until the first is gone."""
    phase = Phase((2.0, 2.0, 2.0), (4, 4, 4, 0), (4, 4, 1), 1.0)
    found = timed(phase, frozenset({0, 1}), 12.0)
    assert found.copies == ((0, 0.0, 4.0), (1, 4.0, 8.0))
    # 4 + 4 + 4 + 1 are wanted at second 4, when the first copy is just done; the last one outlasts the phase by 2.
    assert found.idle_seconds == pytest.approx(2.0)
    assert timed(phase, frozenset(), 12.0).idle_seconds == math.inf


def test_each_phase_goes_by_its_own_link() -> None:
    """4 bytes, at 2 a second out and at half a byte a second back; memory suffices, so only the ends are waited for.

    Out: made after 1 s, copied from then to 3 s, and the forward phase ends at 2. Back, read backwards: after the two
    stages of 2 s, as the second one of these reads it, for 8 s.
    """
    both = phases(Chain((Stage(1.0, 2.0, 4, 4),) * 2, 1), 2.0, 0.5)
    assert [timed(phase, frozenset({1}), 100.0).copies for phase in both] == [((1, 1.0, 3.0),), ((1, 4.0, 12.0),)]
    assert idle_seconds(both, frozenset({1}), 100.0) == pytest.approx(1.0 + 8.0)
