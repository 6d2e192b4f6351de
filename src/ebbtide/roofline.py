"""How long ops take on a machine that is only described: a roofline, with a share of it for each class. No torch.

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
from ebbtide.step import MOST_SECONDS, Step

OpClass = Literal[
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
"""Class of an op: those of one class have kernels of about the same quality. ``none`` does no work."""


@dataclasses.dataclass(frozen=True, slots=True)
class Work:
    """What one op does, wherever it runs.

    Attributes:
        kind: its class.
        flops: floating-point operations of its matrix products; 0 for all other ops.
        moved_bytes: bytes read and written, each input and output once.
        dtype: type in which it multiplies, a key of `Compute.peak_flops_per_second`.
    """

    kind: OpClass
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
        RecordError: if ``works`` are not those of the ops of ``step``, or an op would take for ever.
    """
    _check_pairs(step, works)
    durations = [op_seconds(work, compute) for work in works]
    for op, seconds in zip(step.ops, durations, strict=True):
        if not seconds < MOST_SECONDS:
            raise RecordError(
                f"{op.name} would take {seconds:.3g} seconds on that machine: are the rates and efficiencies of its"
                " compute right? They are flops and bytes a second, and shares of them"
            )
    pairs = zip(step.ops, durations, strict=True)
    ops = tuple(dataclasses.replace(op, duration_seconds=seconds) for op, seconds in pairs)
    return dataclasses.replace(step, ops=ops, device=compute.kernels)


def fit_efficiencies(step: Step, works: Sequence[Work], compute: Compute) -> Compute:
    """``compute`` with the shares that the ops of a timed step reached, class by class.

    A class's share is its roofline's time over its measured time without launches, both summed over the ops whose
    roofline is longer than a launch: with it those ops together take as long as measured. Shorter ops say little of
    their kernels, and a class that has no others keeps the share it had.

    Args:
        step: a step whose durations were measured on the device.
        works: what its ops do.
        compute: peaks and launch time of the device.

    Raises:
        RecordError: if ``works`` are not those of the ops of ``step``.
    """
    _check_pairs(step, works)
    ideal: dict[str, list[float]] = {}
    taken: dict[str, list[float]] = {}
    for op, work in zip(step.ops, works, strict=True):
        seconds = ideal_seconds(work, compute)
        if work.kind != "none" and seconds > compute.launch_seconds:
            ideal.setdefault(work.kind, []).append(seconds)
            taken.setdefault(work.kind, []).append(op.duration_seconds - compute.launch_seconds)
    sums = {kind: (math.fsum(ideal[kind]), math.fsum(taken[kind])) for kind in ideal}
    fitted = {kind: best / real for kind, (best, real) in sums.items() if real > 0}
    shares = {**dict(compute.efficiencies), **fitted}
    return dataclasses.replace(compute, efficiencies=tuple(sorted(shares.items())))


def _check_pairs(step: Step, works: Sequence[Work]) -> None:
    if len(works) != len(step.ops):
        raise RecordError(f"the step has {len(step.ops)} ops, but the work of {len(works)} is given: of another step")
