"""Loops in place of NumPy's assignments to slices, for compiled functions.

numba checks the shapes of those, and takes seconds to compile what words the error, which the first plan waits for.
"""

from __future__ import annotations

from typing import Any


def add_between(levels: Any, first: int, stop: int, change: Any) -> None:
    """Add ``change`` to ``levels`` from ``first`` to before ``stop``."""
    for place in range(first, stop):
        levels[place] += change


def copy_rows(source: Any, target: Any) -> None:
    """Make ``target`` equal to ``source``; both have two dimensions."""
    for row in range(source.shape[0]):
        for place in range(source.shape[1]):
            target[row, place] = source[row, place]
