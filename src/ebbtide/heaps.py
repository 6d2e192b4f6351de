"""A binary heap in an array, for compiled functions that take what is least, again and again.

numba takes seconds to compile NumPy's sorts, and what stops early need not sort the rest.
"""

from __future__ import annotations

from ebbtide.arrays import Floats, Ints


def make_heap(heap: Ints, size: int, keys: Ints | Floats) -> None:
    """Bring the first ``size`` numbers of ``heap`` into an order in which the first has the least of ``keys``.

    Ties go to the smaller number.
    """
    for at in range(size // 2 - 1, -1, -1):
        _sink(heap, size, at, keys)


def take_least(heap: Ints, size: int, keys: Ints | Floats) -> int:
    """The first number of a heap of ``size``, of which one less is left."""
    least: int = heap[0]
    heap[0] = heap[size - 1]
    _sink(heap, size - 1, 0, keys)
    return least


def _sink(heap: Ints, size: int, at: int, keys: Ints | Floats) -> None:
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


def _is_less(one: int, other: int, keys: Ints | Floats) -> bool:
    less: bool = keys[one] < keys[other] or (keys[one] == keys[other] and one < other)
    return less
