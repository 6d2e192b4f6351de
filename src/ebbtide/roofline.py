"""How long ops take on a machine that is only described: a roofline with a fitted share for each class of ops. No torch.

An op takes a fixed launch time, and the longer of two: its arithmetic at the device's peak rate, its bytes at the
memory's bandwidth (Williams, Waterman and Patterson 2009, "Roofline"). Real kernels reach a share of that, which
depends mostly on their class, so a machine has one share for each class; `fit_efficiencies` finds them from a step
that was timed.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Literal

from ebbtide.errors import RecordError
from ebbtide.machine import Compute
from ebbtide.step import Step

Kind = Literal[
    "none",
    "matmul",
    "convolution",
    "convolution_backward",
    "attention",
    "recurrent",
    "normalization",
    "reduction",
    "pooling",
    "index",
    "random",
    "transcendental",
    "elementwise",
    "copy",
]
"""Class of an op. Ops of one class have kernels of about the same quality; ``none`` does no work: views, empty memory."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one op does, wherever it runs.

    Attributes:
        kind: its class.
        flops: floating-point operations of its matrix products; 0 for all other ops.
        moved_bytes: bytes read and written, each input and output once.
        dtype: type in which it multiplies, a key of `Compute.peak_flops_per_second`.
    """

    kind: Kind
    flops: int
    moved_bytes: int
    dtype: str


def ideal_seconds(work: Work, compute: Compute) -> float:
    """The roofline's time of an op, at peak rate and bandwidth, launch time excluded."""
    peaks = dict(compute.peak_flops_per_second)
    peak = peaks.get(work.dtype, peaks["float32"])
    return max(work.flops / peak, work.moved_bytes / compute.memory_bytes_per_second)


def op_seconds(work: Work, compute: Compute) -> float:
    """Time of an op on a device: its launch, and the roofline's time at the share that its class reaches."""
    if work.kind == "none":
        return 0.0
    share = dict(compute.efficiencies).get(work.kind, 1.0)
    return compute.launch_seconds + ideal_seconds(work, compute) / share


def with_durations(step: Step, works: Sequence[Work], compute: Compute) -> Step:
    """``step`` with the durations that its ops would have on a device.

    Raises:
        RecordError: if ``works`` are not those of the ops of ``step``.
    """
    _check_pairs(step, works)
    pairs = zip(step.ops, works, strict=True)
    ops = tuple(dataclasses.replace(op, duration_seconds=op_seconds(work, compute)) for op, work in pairs)
    return dataclasses.replace(step, ops=ops, device=compute.kernels)


def fit_efficiencies(step: Step, works: Sequence[Work], compute: Compute) -> Compute:
    """``compute`` with the shares that the ops of a timed step reached, class by class.

    A class's share is its roofline's time over its measured time without launches, both summed over the step: with
    it the class as a whole takes as long as measured. A class that the step lacks keeps the share it had.

    Args:
        step: a step whose durations were measured on the device.
        works: what its ops do.
        compute: peaks and launch time of the device.

    Raises:
        RecordError: if ``works`` are not those of the ops of ``step``.
    """
    _check_pairs(step, works)
    ideal: dict[str, list[float]] = {}
    measured: dict[str, list[float]] = {}
    for op, work in zip(step.ops, works, strict=True):
        if work.kind != "none":
            ideal.setdefault(work.kind, []).append(ideal_seconds(work, compute))
            measured.setdefault(work.kind, []).append(op.duration_seconds - compute.launch_seconds)
    shares = dict(compute.efficiencies)
    for kind, seconds in ideal.items():
        best, taken = math.fsum(seconds), math.fsum(measured[kind])
        # A class of launches alone says nothing of the kernels.
        if best > 0 and taken > 0:
            shares[kind] = best / taken
    return dataclasses.replace(compute, efficiencies=tuple(sorted(shares.items())))


def _check_pairs(step: Step, works: Sequence[Work]) -> None:
    if len(works) != len(step.ops):
        raise RecordError(f"the step has {len(step.ops)} ops, but the work of {len(works)} is given: of another step")
