"""Loops that compiled functions have in place of NumPy's sorts, searches and random numbers give what these do."""

from __future__ import annotations

import contextlib
from typing import Any

import numba
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebbtide.compiled import compiled
from ebbtide.errors import BudgetError
from ebbtide.heaps import make_heap, take_least
from ebbtide.plan import solve
from ebbtide.plan.dice import draw, draw_below, new_dice
from ebbtide.plan.problem import Problem
from ebbtide.plan.spans import count_below, count_to
from tests.plan.random_steps import disk_machine, random_step

NUMBERS = some.lists(some.integers(-9, 9), max_size=30)


@pytest.mark.parametrize("dtype", [np.int64, np.float64])
@given(numbers=NUMBERS, limit=some.integers(-10, 10))
def test_counting(dtype: type, numbers: list[int], limit: int) -> None:
    ascending: np.ndarray[Any, Any] = np.array(sorted(numbers), dtype=dtype)
    assert compiled(count_below)(ascending, limit) == sum(number < limit for number in numbers)
    assert compiled(count_to)(ascending, limit) == sum(number <= limit for number in numbers)


@given(numbers=NUMBERS)
def test_a_heap_gives_the_least_first_and_of_equals_the_first(numbers: list[int]) -> None:
    keys, heap = np.array(numbers, dtype=np.int64), np.arange(len(numbers))
    compiled(make_heap)(heap, len(numbers), keys)
    taken = [int(compiled(take_least)(heap, left, keys)) for left in range(len(numbers), 0, -1)]
    assert taken == np.argsort(keys, kind="stable").tolist()


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31, 2**32 - 1])
def test_random_numbers(seed: int) -> None:
    dice, expected = compiled(new_dice)(seed), np.random.RandomState(seed)
    for count in (1, 2, 3, 7, 64, 65, 1000, 2**20 + 1, 2**32):
        drawn = [compiled(draw_below)(dice, count) for _ in range(100)]
        assert drawn == [expected.randint(count) for _ in range(100)]
        assert [compiled(draw)(dice) for _ in range(100)] == expected.random_sample(100).tolist()


def _seed(seed: int) -> None:
    np.random.seed(seed)


def _draw() -> float:
    return np.random.normal()


@pytest.mark.parametrize("share", [0.0, 0.6])
def test_plans_leave_the_random_numbers_of_other_compiled_code_alone(share: float) -> None:
    step, machine = random_step(13, length=30), disk_machine()
    problem = Problem.of(step, machine)
    limit = problem.resting_bytes + int(share * (int(problem.plain.max()) - problem.resting_bytes))
    seed: Any = numba.njit(_seed)
    draw_one: Any = numba.njit(_draw)
    seed(3)
    expected = [draw_one() for _ in range(5)]
    seed(3)
    assert draw_one() == expected[0]
    with contextlib.nullcontext() if share else pytest.raises(BudgetError):
        assert solve(step, machine, limit, seconds=0.1).peak_bytes <= limit
    assert [draw_one() for _ in range(4)] == expected[1:]
