"""Loops in place of NumPy's assignments to slices and searches, for compiled functions.

numba checks the shapes of the former, and takes seconds to compile what words the error, or what the latter might be
given, which the first plan waits for.
"""

from __future__ import annotations

from ebbtide.arrays import Floats, Ints


def add_between(levels: Ints, first: int, stop: int, change: int) -> None:
    """Add ``change`` to ``levels`` from ``first`` to before ``stop``."""
    for place in range(first, stop):
        levels[place] += change


def copy_rows(source: Ints, target: Ints) -> None:
    """Make ``target`` equal to ``source``; both have two dimensions."""
    for row in range(source.shape[0]):
        for place in range(source.shape[1]):
            target[row, place] = source[row, place]


def count_below(ascending: Ints | Floats, limit: float) -> int:
    """How many of the numbers are below ``limit``."""
    first, last = 0, len(ascending)
    while first < last:
        middle = (first + last) // 2
        if ascending[middle] < limit:
            first = middle + 1
        else:
            last = middle
    return first


def count_to(ascending: Ints | Floats, limit: float) -> int:
    """How many of the numbers are ``limit`` or below."""
    first, last = 0, len(ascending)
    while first < last:
        middle = (first + last) // 2
        if ascending[middle] <= limit:
            first = middle + 1
        else:
            last = middle
    return first
