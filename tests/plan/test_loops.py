"""Loops that compiled functions have in place of NumPy's sorts and searches give what these do."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as some

from ebbtide.compiled import compiled
from ebbtide.heaps import make_heap, take_least
from ebbtide.plan.spans import count_below, count_to

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
