"""How well fitted rooflines predict: times one model on this machine, fits, predicts other models, and times those too.

    python -m benchmarks.roofline --fit gpt2 --predict vit resnet50 vgg19

Peak rate and bandwidth are those of a large matrix product and a large copy, the launch time that of the ops of the
fitted model that do no work. Errors are of the predicted against the measured step time, and of the ops one by one:
the sum of all their absolute errors against the sum of their times.
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
from collections.abc import Callable

import torch

from ebbtide.demo.workloads import WORKLOADS, make_workload
from ebbtide.machine import Compute
from ebbtide.observe.fake import record_fake
from ebbtide.roofline import Work, fit_efficiencies, with_durations
from ebbtide.run import allocator
from ebbtide.run.kinds import Kind
from ebbtide.run.observing import observe_step
from ebbtide.step import Step

_SIDE = 2048
_COPIED_ELEMENTS = 2**26
_REPEATS = 5


def main() -> None:
    """Print one line for each model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fit", default="gpt2", choices=list(WORKLOADS))
    parser.add_argument("--predict", nargs="+", default=["vit", "resnet50"], choices=list(WORKLOADS))
    arguments = parser.parse_args()
    allocator.set_tuned()  # page faults are no kernel's time
    step, works = timed_step(arguments.fit), works_of(arguments.fit)
    compute = fit_efficiencies(step, works, peaks(step, works))
    print("peaks:", ", ".join(f"{dtype} {rate:.3g} FLOP/s" for dtype, rate in compute.peak_flops_per_second), end="; ")
    print(f"{compute.memory_bytes_per_second:.3g} B/s; {compute.launch_seconds * 1e6:.0f} us a launch")
    print("shares:", ", ".join(f"{kind} {share:.2f}" for kind, share in compute.efficiencies))
    for name in (arguments.fit, *arguments.predict):
        measured = step if name == arguments.fit else timed_step(name)
        predicted = with_durations(measured, works_of(name), compute)
        error = predicted.plain_seconds / measured.plain_seconds - 1
        times = f"measured {measured.plain_seconds:.3f} s, predicted {predicted.plain_seconds:.3f} s ({error:+.1%})"
        print(f"{name}: {times}, ops off by {op_error(measured, predicted):.0%}")


def timed_step(name: str) -> Step:
    """The step of a demo model, each op's duration the least of several runs."""
    workload = make_workload(name)
    batch = workload.batch(0)
    kind: Kind | None = None
    for _ in range(_REPEATS):
        workload.model.zero_grad()
        step = observe_step(lambda: workload.step(batch))
        if kind is None:
            kind = Kind(step)
        kind.observed_again(step)
    assert kind is not None
    return kind.step


def works_of(name: str) -> tuple[Work, ...]:
    """What the ops of a demo model's step do."""

    def build() -> Callable[[], object]:
        workload = make_workload(name)
        batch = workload.batch(0)

        def run() -> None:
            workload.model.zero_grad()
            workload.step(batch)

        return run

    return record_fake(build)[1]


def peaks(step: Step, works: tuple[Work, ...]) -> Compute:
    """This machine's peaks, and the launch time in ``step``."""
    left, right = torch.randn(_SIDE, _SIDE), torch.randn(_SIDE, _SIDE)
    source, target = torch.randn(_COPIED_ELEMENTS), torch.empty(_COPIED_ELEMENTS)
    flops = 2 * _SIDE**3 / least_seconds(lambda: torch.mm(left, right))
    bandwidth = 2 * source.nbytes / least_seconds(lambda: target.copy_(source))
    idle = [op.duration_seconds for op, work in zip(step.ops, works, strict=True) if work.kind == "none"]
    return Compute("cpu", (("float32", flops),), bandwidth, statistics.median(idle))


def least_seconds(run: Callable[[], object]) -> float:
    """The shortest of a few runs."""
    seconds = []
    for _ in range(_REPEATS):
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return min(seconds)


def op_error(measured: Step, predicted: Step) -> float:
    """Sum of the ops' absolute errors over the sum of their measured times."""
    pairs = zip(measured.ops, predicted.ops, strict=True)
    return math.fsum(abs(a.duration_seconds - b.duration_seconds) for a, b in pairs) / measured.plain_seconds


if __name__ == "__main__":
    main()
