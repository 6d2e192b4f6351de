"""The dynamic program of Rotor, on arrays alone so that it runs as machine code.

NOTE [The recurrence]
``C(m, s, t)`` is the least time to go forward and backward through stages ``s..t`` with ``m`` bytes, the input of ``s``
not counted; ``x`` are outputs, ``xb`` what is saved, ``f`` and ``b`` overheads; the gradient of ``a_{t+1}`` is held
throughout, as the paper has it:

    C(m, s, s) = uF_s + uB_s       if m >= max(x_{s+1} + xb_{s+1} + f_s, x_s + x_{s+1} + xb_{s+1} + b_s)
    mmin(s, t) = x_{t+1} + max(x_{s+1} + f_s, max over s < j < t of x_j + x_{j+1} + f_j)
    C(m, s, t) = min of              none if m < mmin(s, t)
        F_all:  C(m, s, s) + C(m - xb_{s+1}, s+1, t)
        F_ck:   min over s < j <= t of uF_s + .. + uF_{j-1} + C(m - x_j, j, t) + C(m, s, j-1)

Bytes that stay whatever is decided (`Stage.fixed_bytes`; none in the paper) are not counted in ``m`` either, for all of
``s..t``; those of ``j..t`` are free again when ``C(., s, j-1)`` begins, and count as room there.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from ebbtide.arrays import Floats, Ints

ALL = -1
"""As a choice: keep all that the first stage saves. Else the choice is the next stage whose input is stored."""


def best_of_parts(
    slots: int, x: Ints, xb: Ints, f: Ints, b: Ints, fixed: Ints, forward: Floats, own: Floats
) -> tuple[Floats, npt.NDArray[np.int16]]:
    """``C`` of NOTE [The recurrence] and the choices that attain it. Time O(stages^3 slots).

    Args:
        slots: most memory, in slots.
        x: per stage the slots of its input, and one entry more: 0, as the loss makes nothing.
        xb, f, b, fixed: per stage the slots that it saves, its overheads, and what stays in any case.
        forward, own: per stage the seconds of its forward op, and of its forward and backward op.

    Returns:
        Seconds by first stage, last stage and slots, infinite if impossible, and by the same indices `ALL` or a stage.
    """
    count = len(own)
    seconds = np.full((count, count, slots + 1), np.inf)
    choice = np.full((count, count, slots + 1), ALL, dtype=np.int16)
    # From how many slots on a part is possible, and from how many on it is fastest to keep all of it.
    least, enough = np.full((count, count), slots + 1), np.full((count, count), slots + 1)
    before = np.concatenate((np.zeros(1), np.cumsum(forward)))
    fixed_before = np.concatenate((np.zeros(1, dtype=np.int64), np.cumsum(fixed)))
    for s in range(count):
        needed = max(x[s + 1] + xb[s] + f[s], x[s] + x[s + 1] + xb[s] + b[s])
        seconds[s, s, needed:] = own[s]
        least[s, s] = enough[s, s] = needed
    for length in range(1, count):
        for s in range(count - length):
            t = s + length
            sweep = x[s + 1] + f[s]
            for j in range(s + 1, t):
                sweep = max(sweep, x[j] + x[j + 1] + f[j])
            best, chosen = seconds[s, t], choice[s, t]
            freed = fixed_before[t + 1] - fixed_before[s + 1]
            everything = max(x[t + 1] + sweep, enough[s, s] - freed, xb[s] + enough[s + 1, t])
            enough[s, t] = end = min(everything, slots + 1)
            best[end:] = own[s] + seconds[s + 1, t, end - xb[s] : slots + 1 - xb[s]]
            for j in range(s, t + 1):
                # All is kept where j is s. Two parts either way: C(m, s, s) or C(m, s, j-1), and what comes after.
                after = max(j, s + 1)
                taken, swept = (xb[s], 0.0) if j == s else (x[j], before[j] - before[s])
                left, right = seconds[s, after - 1], seconds[after, t]
                freed = fixed_before[t + 1] - fixed_before[after]
                first = max(x[t + 1] + sweep, least[s, after - 1] - freed, taken + least[after, t])
                if first < end:
                    least[s, t] = min(least[s, t], first)
                    left = with_more(left, freed) if freed else left
                    option = ALL if j == s else j
                    right = right[first - taken : end - taken]
                    take_faster(best[first:end], chosen[first:end], left[first:end], right, swept, option)
            least[s, t] = min(least[s, t], end)
    return seconds, choice


def take_faster(
    best: Floats, chosen: npt.NDArray[np.int16], left: Floats, right: Floats, swept: float, option: int
) -> None:
    """Choose ``option`` wherever both of its parts and the sweep before them take less than ``best``."""
    for m in range(len(best)):  # without a branch, so that several are compared at once
        found = left[m] + right[m] + swept
        is_faster = found < best[m]
        best[m] = found if is_faster else best[m]
        chosen[m] = option if is_faster else chosen[m]


def with_more(seconds: Floats, slots: int) -> Floats:
    """``seconds`` by memory as they are with so many ``slots`` more, those of most memory beyond that."""
    slots = min(slots, len(seconds))
    moved = np.full(len(seconds), seconds[-1])
    moved[: len(seconds) - slots] = seconds[slots:]
    return moved
