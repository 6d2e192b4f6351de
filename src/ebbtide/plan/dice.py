"""Random numbers in compiled functions: a generator of their own.

numba has one generator for all compiled code of a thread, the user's included, which must not be seeded by a plan. This
one is that of Park and Miller (Random number generators: good ones are hard to find, CACM 31 (10), 1988), with the
multiplier that they took to in 1993. Its period of 2^31 - 2 is a thousand times what the longest searches draw.
"""

from __future__ import annotations

from typing import Any

import numpy as np

MULTIPLIER, MODULUS = 48271, 2**31 - 1
WARM_UP = 3
"""Numbers left out at first: those of small seeds are small."""


def new_dice(seed: int) -> Any:
    """The state of a generator, an array of one number; ``seed`` is 0 or more."""
    dice = np.empty(1, np.int64)
    dice[0] = 1 + seed % (MODULUS - 1)
    for _ in range(WARM_UP):
        draw(dice)
    return dice


def draw(dice: Any) -> float:
    """A number from 0 to below 1."""
    dice[0] = dice[0] * MULTIPLIER % MODULUS
    return (dice[0] - 1) / (MODULUS - 1)  # type: ignore[no-any-return]


def draw_below(dice: Any, count: int) -> int:
    """A whole number from 0 to below ``count``, which is small against 2^31."""
    dice[0] = dice[0] * MULTIPLIER % MODULUS
    return dice[0] % count  # type: ignore[no-any-return]
