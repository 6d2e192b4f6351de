"""How fast a link is: which single transfers are timed, and what is fitted to their times."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Mapping

LATENCY_BYTES = 4096
"""Bytes of the transfers that tell the latency: a whole block of any disk, as fewer would not go there. See NOTE
[Direct I/O without copies]."""
SIZES_BYTES = tuple(mib << 20 for mib in (1, 4, 16, 64))
"""Bytes of the transfers that tell the bandwidth."""
REPEATS = 5
"""How many transfers of each of `SIZES_BYTES` are timed."""


def rates(small: Iterable[float], by_size: Mapping[int, Iterable[float]]) -> tuple[float, float]:
    """The latency of a link in seconds, and its bandwidth in bytes per second, one transfer at a time.

    Args:
        small: the seconds of each transfer of `LATENCY_BYTES`; their median is the latency.
        by_size: by size in bytes, the seconds of each larger transfer; the bandwidth is the `slope` of their medians.
    """
    latency_seconds = statistics.median(small)
    medians = {size_bytes: statistics.median(seconds) for size_bytes, seconds in by_size.items()}
    return latency_seconds, slope(medians, latency_seconds)


def slope(seconds: Mapping[int, float], latency_seconds: float) -> float:
    """Bytes per second: least squares of relative errors of ``latency + bytes / bandwidth``.

    Args:
        seconds: by size in bytes, what a transfer takes.
        latency_seconds: what a transfer of next to nothing takes.
    """
    weighted = [(size / taken, 1 - latency_seconds / taken) for size, taken in seconds.items()]
    above = sum(share * rest for share, rest in weighted)
    square = sum(share * share for share, _ in weighted)
    # Where even large transfers take no longer than the smallest, their plain rate is all that is known.
    return square / above if above > 0 else max(size / taken for size, taken in seconds.items())
