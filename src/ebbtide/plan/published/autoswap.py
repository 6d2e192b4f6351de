"""AutoSwap: rank the absences that span the peak by a score, swap in that order until the peak fits.

Zhang, Yeung, Shu, He, Wang: Efficient Memory Management for GPU-based Deep Learning Systems. 2019, arXiv 1903.06631,
section V, and the swap pool in the history of Apache SINGA. Of that code three faults are not repeated: transfers count
once in the duration of absence, the weighted one is summed over the load, and each direction waits for its own copies.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

from ebbtide.arrays import Floats, Ints
from ebbtide.decisions import Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.plan.follow import Move
from ebbtide.plan.profile import Candidates
from ebbtide.plan.published.layers import spanning
from ebbtide.plan.published.switches import check_choice, check_count
from ebbtide.plan.published.transfers import Ground, Queues
from ebbtide.plan.published.weights import best_weights
from ebbtide.step import MOST_BYTES, Step

Score = Literal["doa", "aoa", "wdoa", "swdoa", "voting", "weighted"]
Mode = Literal["stick to limit", "zero overhead"]

SMALLEST_BYTES = 1 << 20
"""Smaller blocks are no candidates; section V and the public code."""
AIMS = 48
"""Limits that the search for zero overhead aims at, evenly spread below the plain peak."""


def autoswap(
    step: Step,
    machine: Machine,
    limit_bytes: int,
    *,
    score: Score = "swdoa",
    mode: Mode = "stick to limit",
    smallest_bytes: int = SMALLEST_BYTES,
    trials: int = 24,
    seed: int = 0,
) -> Plan:
    """AutoSwap's plan: only absences that span the peak of the plain step are swapped.

    Args:
        step, machine, limit_bytes: the problem.
        score: what the absences are ranked by, see `Scores`; ``voting`` adds up their ranks by the first three,
            ``weighted`` adds up all four with weights found by Bayesian optimisation of the plan's time.
        mode: ``stick to limit`` lets compute wait, and brings nothing back before the peak; ``zero overhead`` never
            waits, and swaps more instead of sooner. What would be late if it came back after the peak comes before it.
        smallest_bytes: smaller values stay.
        trials: weights that ``weighted`` tries.
        seed: seed of the weights tried.

    Raises:
        BudgetError: if these absences do not bring the step within ``limit_bytes``.
        PolicyError: if the machine has no slow tier, or a switch is none of the above.
    """
    check_choice("autoswap's score", score, Score)
    check_choice("autoswap's mode", mode, Mode)
    check_count("autoswap's trials", trials)
    swap = _Swap.of(step, machine, smallest_bytes)
    method = f"autoswap {score}"

    def plan(order: _Order) -> Plan:
        if mode == "zero overhead":
            return _without_overhead(swap, limit_bytes, order, method)
        return swap.ground.to_plan(limit_bytes, swap.stuck_to(limit_bytes, order), method)

    if score != "weighted":
        return plan(_order_of(score))
    failed: list[BudgetError] = []

    def seconds(weights: Floats) -> float:
        try:
            return plan(_weighted(weights)).seconds
        except BudgetError as error:
            failed.append(error)
            return float("inf")

    weights = best_weights(seconds, len(NAMES), trials=trials, seed=seed)
    if weights is None:
        raise min(failed, key=lambda error: error.reachable_bytes)
    return plan(_weighted(weights))


def least_zero_overhead_limit(
    step: Step, machine: Machine, *, score: Score = "swdoa", smallest_bytes: int = SMALLEST_BYTES
) -> int:
    """The least limit, in bytes, for which ``autoswap(..., mode="zero overhead")`` has a plan.

    Selections for ever lower limits are scheduled so that compute never waits; this is the lowest peak among them.
    For the score ``weighted`` all weights are equal.

    Raises:
        PolicyError: if the machine has no slow tier, or there is no such score.
    """
    check_choice("autoswap's score", score, Score)
    swap = _Swap.of(step, machine, smallest_bytes)
    order = _order_of(score)
    least = int(swap.ground.problem.plain.max(initial=0))
    for aim in swap.aims():
        try:
            swap.ground.to_plan(0, swap.free_of_stalls(aim, order), "autoswap")
        except BudgetError as error:
            least = min(least, error.reachable_bytes)
    return least


NAMES: tuple[Score, ...] = ("doa", "aoa", "wdoa", "swdoa")


class Scores:
    """The scores of candidates; higher ones are swapped first.

    Args:
        candidates: all candidates.
        places: those that are scored.
        clock: start of each moment, seconds.
    """

    def __init__(self, candidates: Candidates, places: Ints, clock: Floats) -> None:
        self.first, self.closes = candidates.release[places], candidates.closes[places]
        self.size_bytes = candidates.size_bytes[places]
        gap_seconds = clock[self.closes] - clock[candidates.opens[places]]
        self.transfer_seconds = candidates.out_seconds[places] + candidates.in_seconds[places]
        self.gap_seconds = gap_seconds

    def doa(self) -> Floats:
        """Duration of absence: seconds between two uses that no transfer of the value needs."""
        return np.asarray(self.gap_seconds - self.transfer_seconds)

    def aoa(self) -> Floats:
        """Area of absence: its duration times its bytes; divided by them if it is negative."""
        doa = self.doa()
        return np.where(doa >= 0, doa * self.size_bytes, doa / np.maximum(self.size_bytes, 1))

    def wdoa(self, load: Ints, limit_bytes: int) -> Floats:
        """Weighted duration of absence: the excess of the load over the limit, summed over its moments.

        A moment whose load is below the limit counts nothing. With the load as it is after each selection this is the
        submodular score, SWDOA.
        """
        limit_bytes = min(max(limit_bytes, -MOST_BYTES), MOST_BYTES)  # no load is more, and no number of 64 bits
        excess = np.concatenate(([0.0], np.cumsum(np.maximum(load - limit_bytes, 0), dtype=np.float64)))
        return np.asarray(excess[self.closes] - excess[self.first + 1])


_Order = Callable[[Floats], Floats]
"""Makes one number of each candidate's scores, given as rows in the order of `NAMES`."""


@dataclasses.dataclass(frozen=True, slots=True)
class _Swap:
    """What AutoSwap knows of a step: the peak, the absences that span it, their scores."""

    ground: Ground
    peak: int
    places: Ints
    scores: Scores

    @classmethod
    def of(cls, step: Step, machine: Machine, smallest_bytes: int) -> _Swap:
        ground = Ground.of(step, machine, "autoswap")
        plain, candidates = ground.problem.plain, ground.candidates
        peak = int(np.argmax(plain)) if plain.size else 0
        places = [place for place in spanning(candidates, peak) if candidates.closes[place] > peak]
        places = [place for place in places if candidates.size_bytes[place] >= smallest_bytes]
        column = np.array(places, dtype=np.int64)
        return cls(ground, peak, column, Scores(candidates, column, ground.problem.clock))

    def selected(self, limit_bytes: int, order: _Order) -> list[int]:
        """Candidates in order of score until the load fits, were each away throughout its absence."""
        load = self.ground.problem.plain.copy()
        fixed = (self.scores.doa(), self.scores.aoa(), self.scores.wdoa(load, limit_bytes))
        left = np.ones(len(self.places), dtype=np.bool_)
        found: list[int] = []
        while left.any() and int(load.max(initial=0)) > limit_bytes:
            swdoa = self.scores.wdoa(load, limit_bytes)
            number = int(np.argmax(np.where(left, order(np.stack((*fixed, swdoa))), -np.inf)))
            left[number] = False
            found.append(int(self.places[number]))
            load[self.scores.first[number] + 1 : self.scores.closes[number]] -= self.scores.size_bytes[number]
        return found

    def stuck_to(self, limit_bytes: int, order: _Order) -> dict[int, Move]:
        """Moves that keep to the limit, if the selection can; compute may wait."""
        return self._queues(limit_bytes, self.peak).moves(self.selected(limit_bytes, order))

    def free_of_stalls(self, aim_bytes: int, order: _Order) -> dict[int, Move]:
        """Moves of the selection for ``aim_bytes`` that compute never waits for, whatever the peak."""
        return self._queues(None, None).moves(self.selected(aim_bytes, order))

    def aims(self) -> list[int]:
        """Limits to aim at, descending, from the plain peak to what would be left if all candidates were away."""
        highest = int(self.ground.problem.plain.max(initial=0))
        return [int(aim) for aim in np.linspace(highest, highest - int(self.scores.size_bytes.sum()), AIMS)]

    def _queues(self, limit_bytes: int | None, peak: int | None) -> Queues:
        problem, end = self.ground.problem, self.ground.candidates.closes
        return Queues(self.ground, problem.plain, end, problem.clock, limit_bytes, peak)


def _without_overhead(swap: _Swap, limit_bytes: int, order: _Order, method: str) -> Plan:
    """The plan that swaps least of those that compute never waits for.

    Raises:
        BudgetError: if all of them hold more than ``limit_bytes``; it names the least peak among them.
    """
    failed: list[BudgetError] = []
    for aim in swap.aims():
        try:
            return swap.ground.to_plan(limit_bytes, swap.free_of_stalls(aim, order), f"{method}, zero overhead")
        except BudgetError as error:
            failed.append(error)
    raise min(failed, key=lambda error: error.reachable_bytes)


def _order_of(score: Score) -> _Order:
    if score == "voting":
        return lambda rows: -sum((_ranks(row) for row in rows[:3]), np.zeros(rows.shape[1]))
    if score == "weighted":
        return _weighted(np.full(len(NAMES), 1 / len(NAMES)))
    return _weighted(np.eye(len(NAMES))[NAMES.index(score)])


def _ranks(score: Floats) -> Floats:
    """Place of each candidate in descending order of score; equal scores share one."""
    return np.searchsorted(np.sort(-score), -score).astype(np.float64)


def _weighted(weights: Floats) -> _Order:
    """The weighted sum of the four scores, each brought to the range from 0 to 1."""

    def order(rows: Floats) -> Floats:
        lowest = rows.min(axis=1, keepdims=True)
        spread = np.ptp(rows, axis=1, keepdims=True)
        return np.asarray(weights @ ((rows - lowest) / np.where(spread > 0, spread, 1.0)))

    return order
