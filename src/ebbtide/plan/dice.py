"""Random numbers in compiled functions: a generator of their own, with the numbers that NumPy's old one gives.

numba has one generator for all compiled code of a thread, the user's included, which must not be seeded by a plan. This
is the same one, the Mersenne Twister (Matsumoto, Nishimura, ACM TOMACS 8 (1), 1998), with a state that is handed on.
"""

from __future__ import annotations

import numpy as np

from ebbtide.arrays import Ints

LENGTH, SHIFT = 624, 397
_WORD, _HIGHEST, _LOWER, _TWIST = 0xFFFFFFFF, 0x80000000, 0x7FFFFFFF, 0x9908B0DF


def new_dice(seed: int) -> Ints:
    """The state of a generator: 624 words of 32 bits, and which of them is the next; ``seed`` is 0 or more."""
    dice = np.empty(LENGTH + 1, np.int64)
    word = seed & _WORD
    for place in range(LENGTH):
        dice[place] = word
        word = (1812433253 * (word ^ (word >> 30)) + place + 1) & _WORD
    dice[LENGTH] = 0
    return dice


def draw(dice: Ints) -> float:
    """A number from 0 to below 1, of 53 random bits."""
    high = _draw_word(dice) >> 5
    low = _draw_word(dice) >> 6
    drawn: float = (high * 2.0**26 + low) / 2.0**53
    return drawn


def draw_below(dice: Ints, count: int) -> int:
    """A whole number from 0 to below ``count``, which is 1 to 2^32."""
    mask = 0
    while mask < count - 1:
        mask = 2 * mask + 1
    drawn = count
    while drawn >= count:
        drawn = _draw_word(dice) & mask if mask else 0
    return drawn


def _draw_word(dice: Ints) -> int:
    """The next 32 random bits; the word that they come from makes room for the one of the next round."""
    place = dice[LENGTH]
    following = place + 1 if place + 1 < LENGTH else 0
    mixed = (dice[place] & _HIGHEST) | (dice[following] & _LOWER)
    word: int = dice[(place + SHIFT) % LENGTH] ^ (mixed >> 1) ^ (_TWIST if mixed & 1 else 0)
    dice[place], dice[LENGTH] = word, following
    word ^= word >> 11
    word ^= (word << 7) & 0x9D2C5680
    word ^= (word << 15) & 0xEFC60000
    return word ^ (word >> 18)
