"""What is fitted to measured times."""

from __future__ import annotations

from collections.abc import Mapping


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
