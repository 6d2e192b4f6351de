"""A binary heap in an array, for compiled functions that take what is least, again and again.

numba takes seconds to compile NumPy's sorts, and what stops early need not sort the rest.
"""

from __future__ import annotations

from typing import Any


def make_heap(heap: Any, size: int, keys: Any) -> None:
    """Bring the first ``size`` numbers of ``heap`` into an order in which the first has the least of ``keys``.

    Of equal keys, that of the smaller number is the lesser one.
    """
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, size, at, keys)


def take_least(heap: Any, size: int, keys: Any) -> Any:
    """The first number of a heap of ``size``, of which one less is left."""
    least = heap[0]
    heap[0] = heap[size - 1]
    _sink(heap, size - 1, 0, keys)
    return least


def _sink(heap: Any, size: int, at: int, keys: Any) -> None:
    number = heap[at]
    while 2 * at + 1 < size:
        below = 2 * at + 1
        if below + 1 < size and _is_less(heap[below + 1], heap[below], keys):
            below += 1
        if not _is_less(heap[below], number, keys):
            break
        heap[at] = heap[below]
        at = below
    heap[at] = number


def _is_less(one: int, other: int, keys: Any) -> Any:
    return keys[one] < keys[other] or (keys[one] == keys[other] and one < other)
