"""The closed forms of Revolve (Griewank and Walther 2000, ACM TOMS 26:19-45).

``n`` is a number of steps; ``slots`` is how many states can be held, the chain's first one included, the working state
not.
"""

from __future__ import annotations

import functools
import math

import numpy as np
import numpy.typing as npt


def reach(slots: int, repetitions: int) -> int:
    """The longest chain that can be reversed if no step is run forward more than ``repetitions`` times."""
    return math.comb(slots + repetitions, slots) if repetitions >= 0 else 0


@functools.lru_cache(maxsize=1 << 16)
def repetition_number(n: int, slots: int) -> int:
    """The smallest ``r`` with ``reach(slots, r) >= n``: how often the most repeated step is run. Time O(log r)."""
    if n <= 1:
        return 0
    if slots == 1:
        return n - 1
    high = 1
    while reach(slots, high) < n:
        high *= 2
    low = high // 2
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if reach(slots, middle) >= n else (middle, high)
    return high


def forward_steps(n: int, slots: int) -> int:
    """Fewest forward steps besides those that the reverse steps do themselves: ``r n - C(slots + r, slots + 1)``."""
    r = repetition_number(n, slots)
    return r * n - math.comb(slots + r, slots + 1)


def forward_steps_table(length: int, slots: int) -> npt.NDArray[np.float64]:
    """`forward_steps` of chains of ``0..length`` steps, with 0 for the empty chain. Time O(length)."""
    increments = np.zeros(length + 1)
    done, r = 1, 1
    while done < length:
        end = min(reach(slots, r), length)
        increments[done + 1 : end + 1] = r
        done, r = end, r + 1
    return np.cumsum(increments)


def split(n: int, slots: int) -> int:
    """How far to advance a chain of ``n >= 2`` steps, whose first state is stored, before the next store: optimal.

    Of all optimal distances the largest: it keeps the right part, which stores again, shortest.
    """
    if slots == 1:
        return n - 1
    r = repetition_number(n, slots)
    return min(reach(slots, r - 1), n - reach(slots - 1, r - 1))
