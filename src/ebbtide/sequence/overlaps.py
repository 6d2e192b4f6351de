"""Arrays of one state that share memory: a field and its interior, or one array twice.

NOTE [Shared memory]
An operator that alters such a state in place alters several of its arrays at once, so copies of the state must share
memory in the same way. The largest of the arrays is copied; in the copy's memory the others lie as they did in the
first one's. That takes an array without gaps, whose copy has every byte where it was.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

Array = npt.NDArray[Any]

OVERLAP_WORK = 10_000
"""The ``max_work`` of `numpy.shares_memory`: where it takes more, arrays with common bounds count as overlapping."""


def are_apart(arrays: Sequence[Array]) -> bool:
    """Whether no two of ``arrays`` can share memory, as a glance tells: by bounds, or each has an owner of its own."""
    if len(arrays) == 2:  # quicker
        return not np.may_share_memory(arrays[0], arrays[1])
    owners = {
        id(owner)
        for array in arrays
        if type(owner := array if array.base is None else array.base) is np.ndarray and owner.flags.owndata
    }
    return len(owners) == len(arrays)


def may_share(ones: Sequence[Array], others: Sequence[Array]) -> bool:
    """Whether one of ``ones`` and one of ``others`` have common bounds."""
    if are_apart([*ones, *others]):
        return False
    spans = [
        (*_bounds(array), side) for side, arrays in enumerate((ones, others)) for array in arrays if array.nbytes > 0
    ]
    stops = [0, 0]
    for start, stop, side in sorted(spans):
        if start < stops[1 - side]:
            return True
        stops[side] = max(stops[side], stop)
    return False


def hosts(arrays: Sequence[Array]) -> list[int | None]:
    """For each array the number of the one in whose memory it lies, of those that overlap the largest; None: its own.

    What overlaps its host may lie beyond it, too, which `place_within` tells.
    """
    found: list[int | None] = [None] * len(arrays)
    alone: list[int] = []
    for number in sorted(range(len(arrays)), key=lambda index: -arrays[index].nbytes):
        found[number] = next((host for host in alone if _overlap(arrays[number], arrays[host])), None)
        if found[number] is None:
            alone.append(number)
    return found


def _overlap(one: Array, other: Array) -> bool:
    if not np.may_share_memory(one, other):  # by bounds
        return False
    try:
        return np.shares_memory(one, other, max_work=OVERLAP_WORK)  # type: ignore[arg-type]
    except np.exceptions.TooHardError:
        return True


def are_same(one: Array, other: Array) -> bool:
    """Whether both are one array, be it by two names."""
    return _looks(one) == _looks(other)


def _looks(array: Array) -> tuple[object, ...]:
    return _bounds(array), array.shape, array.strides, array.dtype


def place_within(array: Array, host: Array) -> tuple[int, ...] | None:
    """Offset and strides of ``array`` in the memory of ``host``, in bytes; None if it is not, or that has gaps."""
    start, stop = _bounds(host)
    low, high = _bounds(array)
    if stop - start != host.nbytes or min(host.strides, default=0) < 0 or low < start or high > stop:
        return None
    return (_pointer(array) - start, *array.strides)


def _pointer(array: Array) -> int:
    pointer: int = array.__array_interface__["data"][0]
    return pointer


def _bounds(array: Array) -> tuple[int, int]:
    """Address of an array's first byte, and of the first one after its last."""
    spans = [(length - 1) * stride for length, stride in zip(array.shape, array.strides, strict=True)]
    first = _pointer(array) + sum(span for span in spans if span < 0)
    return first, first + sum(map(abs, spans)) + array.itemsize
