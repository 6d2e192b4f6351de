"""Bayesian optimisation of weights that sum to one: a Gaussian process over what was tried, expected improvement."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

from ebbtide.arrays import Floats

POOL = 256
"""Weights drawn by chance among which the next trial is chosen."""
LENGTH = 0.3
"""Distance, in weights, over which two costs are alike."""
NOISE = 1e-6


def best_weights(cost: Callable[[Floats], float], count: int, *, trials: int, seed: int) -> Floats | None:
    """The cheapest of ``trials`` weight vectors, or None if all cost infinity. The same arguments give the same.

    The first trials are each weight alone and all alike; what costs infinity counts as twice the dearest.
    """
    random = np.random.default_rng(seed)
    pool = np.concatenate((np.eye(count), np.full((1, count), 1 / count), random.dirichlet(np.ones(count), POOL)))
    tried: list[int] = []
    costs: list[float] = []
    while len(tried) < min(trials, len(pool)):
        number = len(tried) if len(tried) <= count else _most_promising(pool, tried, costs)
        tried.append(number)
        costs.append(cost(pool[number]))
    best = int(np.argmin(costs)) if costs else 0
    return pool[tried[best]] if costs and math.isfinite(costs[best]) else None


def _most_promising(pool: Floats, tried: list[int], costs: list[float]) -> int:
    """The untried vector with the largest expected improvement over the cheapest one tried."""
    finite = [cost for cost in costs if math.isfinite(cost)]
    values = np.array([cost if math.isfinite(cost) else 2 * max(finite, default=1.0) for cost in costs])
    spread = float(values.std()) or 1.0
    values = (values - values.mean()) / spread
    known = _alike(pool[tried], pool[tried]) + NOISE * np.eye(len(tried))
    towards = _alike(pool, pool[tried])
    solved = np.linalg.solve(known, np.column_stack((values, towards.T)))
    mean = towards @ solved[:, 0]
    deviation = np.sqrt(np.maximum(1.0 - np.einsum("ij,ji->i", towards, solved[:, 1:]), 1e-12))
    gain = (values.min() - mean) / deviation
    density = np.exp(-0.5 * gain**2) / math.sqrt(2 * math.pi)
    below = np.array([0.5 * math.erfc(-value / math.sqrt(2)) for value in gain.tolist()])
    improvement = deviation * (gain * below + density)
    improvement[tried] = -np.inf
    return int(np.argmax(improvement))


def _alike(left: Floats, right: Floats) -> Floats:
    distance = ((left[:, None, :] - right[None, :, :]) ** 2).sum(axis=2)
    return np.asarray(np.exp(-0.5 * distance / LENGTH**2))
