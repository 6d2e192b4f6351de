"""Small changes bring the peak of some modes down to the least there is, and never up."""

from __future__ import annotations

import itertools
import math

import numpy as np

from ebbtide.compiled import compiled
from ebbtide.plan.lower_peak import lower
from ebbtide.plan.needs import Modes, Needs
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import needs_of, profile
from tests.plan.random_steps import disk_machine, random_step
from tests.plan.test_profile import random_modes, ways, with_deeper

WORK, MOST = 20_000.0, 1000


def peak_of(needs: Needs, modes: Modes) -> float:
    """Bytes; infinite where recipes wait for each other too deeply."""
    found = profile(needs, modes)
    return math.inf if found.nested else float(found.level.max())


def test_the_least_peak_is_found_and_none_is_raised() -> None:
    tried, least_found = 0, 0
    for seed in range(120):
        problem = Problem.of(random_step(seed, length=5 + seed % 8), disk_machine())
        candidates = with_deeper(problem.step, problem)
        allowed = ways(candidates)
        if not candidates.absence.size or math.prod(map(len, allowed)) > MOST:
            continue
        needs = needs_of(problem, candidates)
        start = np.array(random_modes(candidates, seed), dtype=np.int8)
        deepest = np.where(candidates.can_recompute, candidates.deepest(), 0)
        lowered = compiled(lower)(needs, candidates.can_offload, deepest, start, WORK, seed)
        assert all(mode in possible for mode, possible in zip(lowered.tolist(), allowed, strict=True))
        assert peak_of(needs, lowered) <= peak_of(needs, start)
        every = (np.array(modes, dtype=np.int8) for modes in itertools.product(*allowed))
        least_found += peak_of(needs, lowered) == min(peak_of(needs, modes) for modes in every)
        tried += 1
    assert tried >= 40
    assert least_found >= 0.95 * tried, f"{least_found} of {tried}"


def test_modes_stay_where_there_is_nothing_to_change() -> None:
    problem = Problem.of(random_step(3), disk_machine())
    candidates = with_deeper(problem.step, problem)
    nothing, start = np.zeros(len(candidates.absence), dtype=np.int8), np.zeros(len(candidates.absence), dtype=np.int8)
    cannot = np.zeros(len(candidates.absence), dtype=np.bool_)
    lowered = compiled(lower)(needs_of(problem, candidates), cannot, nothing, start, WORK, 0)
    assert (lowered == start).all()
