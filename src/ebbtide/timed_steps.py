"""How fast ops run on this machine, fitted on steps that are timed on it: what `ebbtide.roofline` wants to know.

With it a machine at hand is one that fake steps can be planned for: of models that it was never tried with, too.
"""

from __future__ import annotations

import dataclasses
import difflib
import statistics
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch

from ebbtide.errors import EbbtideError
from ebbtide.machine import Compute, Machine
from ebbtide.named_steps import observe_named, record_named_fake
from ebbtide.roofline import Work, fit_efficiencies, with_durations
from ebbtide.run import allocator
from ebbtide.run.available import capacity_bytes
from ebbtide.step import Step

Progress = Callable[[float, str], None]
"""Called with the fraction that is done, 0 to 1, and what is being measured."""

REPEATS = 5
"""Times that a step is observed, and a large op is run at least; the least durations count."""
LARGE_OP_SECONDS = 0.5
"""Seconds for which a large op is run at least."""
SIDE = 1024
"""Rows and columns of the matrices whose product shows the peak rate."""
COPIED_BYTES = 256 << 20
"""Bytes of the copy that shows the memory's bandwidth: more than any cache holds."""
TYPES = ("float32", "float64", "bfloat16", "float16")
"""Types whose peak rate is measured, if a step multiplies in them; that of the first one always is."""
ATTENTION = "aten._scaled_dot_product_"
"""Ops that are one kernel or another by the device and by what runs on it."""


class Timed(NamedTuple):
    """Ops of a step that was timed, and what each of them does."""

    step: Step
    works: tuple[Work, ...]


class Fitted(NamedTuple):
    """How fast this machine computes, and by name of each step that was timed: its seconds, and those told by that."""

    compute: Compute
    seconds: dict[str, tuple[float, float]]


def fit_here(names: Sequence[str], progress: Progress) -> Fitted:
    """How fast the processor computes, by the steps of these ``names`` (see `ebbtide.named_steps.runner`).

    Each is run `REPEATS` times, and once on fake tensors. Peak rates are those of a large matrix product in each type
    that the steps multiply in, the bandwidth that of a large copy; the launch time is the median of the ops that do no
    work. Shares are those of `ebbtide.roofline.fit_efficiencies` over all steps.

    Raises:
        EbbtideError: if a step cannot be run, also not on fake tensors, did not run on the processor, or has no op.
    """
    parts = 3 * len(names)
    timed: list[Timed] = []
    seen: list[Compute] = []
    for number, name in enumerate(names):
        progress(3 * number / parts, f"timing {name}")
        real = observe_named(name, None, REPEATS)
        if real.device != "cpu":
            raise EbbtideError(
                f"{name} ran on {real.device}, and only the processor can be fitted: for a GPU, copy the nearest of the"
                " machines that ebbtide comes with, and change it"
            )
        progress((3 * number + 1) / parts, f"counting {name}'s work")
        timed.append(matched(real, *record_named_fake(name)))
        progress((3 * number + 2) / parts, "peak rates")
        seen.append(peaks(*timed[-1]))
    works = tuple(work for each in timed for work in each.works)
    every = dataclasses.replace(timed[0].step, ops=tuple(op for each in timed for op in each.step.ops))
    compute = fit_efficiencies(every, works, quickest(seen))
    told = [with_durations(each.step, each.works, compute).plain_seconds for each in timed]
    seconds = zip((each.step.plain_seconds for each in timed), told, strict=True)
    progress(1.0, "done")
    return Fitted(compute, dict(zip(names, seconds, strict=True)))


def with_compute(machine: Machine, compute: Compute) -> Machine:
    """``machine``, which is this one, with how fast it computes and how much memory it has."""
    tiers = (
        dataclasses.replace(tier, capacity_bytes=capacity_bytes()) if tier.name == machine.fast else tier
        for tier in machine.tiers
    )
    return dataclasses.replace(machine, tiers=tuple(tiers), compute=compute)


def matched(real: Step, fake: Step, works: Sequence[Work]) -> Timed:
    """The ops of ``real`` that ``fake`` has, too, in order, and their ``works``."""
    these, those = ([_kernel(op.name) for op in step.ops] for step in (real, fake))
    blocks = difflib.SequenceMatcher(None, these, those, autojunk=False).get_matching_blocks()
    pairs = [(block.a + place, block.b + place) for block in blocks for place in range(block.size)]
    ops = tuple(real.ops[one] for one, _ in pairs)
    return Timed(dataclasses.replace(real, ops=ops), tuple(works[other] for _, other in pairs))


def _kernel(op: str) -> str:
    backward = "_backward" if "_backward" in op else ""
    return ATTENTION + backward if op.startswith(ATTENTION) else op


def peaks(step: Step, works: Sequence[Work]) -> Compute:
    """This machine's peak rates in the types of ``works``, its bandwidth, and the launch time in ``step``."""
    idle = [op.duration_seconds for op, work in zip(step.ops, works, strict=True) if work.kind == "none"]
    launch = statistics.median(idle) if idle else min((op.duration_seconds for op in step.ops), default=0.0)
    wanted = {TYPES[0]} | {work.dtype for work in works if work.flops}
    rates = {name: _rate(getattr(torch, name)) for name in TYPES if name in wanted}
    source, target = (torch.ones(COPIED_BYTES, dtype=torch.uint8) for _ in range(2))  # zeros may be one page, for all
    bandwidth = 2 * COPIED_BYTES / least_seconds(lambda: target.copy_(source))
    return Compute("cpu", tuple(rates.items()), bandwidth, launch)


def quickest(seen: Sequence[Compute]) -> Compute:
    """The best that was seen of each peak: whatever else the machine did has made the others lower."""
    rates: dict[str, float] = {}
    for each in seen:
        for name, rate in each.peak_flops_per_second:
            rates[name] = max(rate, rates.get(name, 0.0))
    return Compute(
        seen[0].kernels,
        tuple(rates.items()),
        max(each.memory_bytes_per_second for each in seen),
        min(each.launch_seconds for each in seen),
    )


def _rate(dtype: torch.dtype) -> float:
    """Floating-point operations a second of a large matrix product."""
    left, right = (torch.full((SIDE, SIDE), 0.5, dtype=dtype) for _ in range(2))
    return 2 * SIDE**3 / least_seconds(lambda: torch.mm(left, right))


def least_seconds(run: Callable[[], object]) -> float:
    """The shortest of at least `REPEATS` runs, page faults left out as far as planned steps have none."""
    seconds: list[float] = []
    with allocator.tuned():
        end = time.perf_counter() + LARGE_OP_SECONDS
        while len(seconds) < REPEATS or time.perf_counter() < end:
            started = time.perf_counter()
            run()
            seconds.append(time.perf_counter() - started)
    return min(seconds)
