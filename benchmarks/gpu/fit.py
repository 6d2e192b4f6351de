"""How well a roofline predicts a GPU: fits its shares on steps that were observed on an H200, and predicts them.

    python -m benchmarks.gpu.fit

The steps are those of `benchmarks.gpu` (``benchmarks/results/*-h200-step-*.json.gz``). The same models run on fake
tensors; what their ops do, and the shares that fit, say how long each takes. The errors that count are those on the
model that was not fitted.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from pathlib import Path

import torch

from benchmarks.gpu.workloads import make_workload
from benchmarks.roofline import op_error
from ebbtide.machine import Compute
from ebbtide.machines import load_machine
from ebbtide.observe.fake import record_fake
from ebbtide.roofline import fit_efficiencies, with_durations
from ebbtide.step import Step
from ebbtide.timed_steps import Timed, matched

RESULTS = Path(__file__).parents[1] / "results"
STEPS = {name: RESULTS / f"2026-11-26-h200-step-{name}.json.gz" for name in ("resnet152", "gpt2-xl")}


def main() -> None:
    """Print the shares fitted on each model and on both, and the errors that they leave."""
    machine = load_machine("h200")
    assert machine.compute is not None
    compute = assumed(machine.compute)
    matched = {name: matched_step(Step.load(path), name) for name, path in STEPS.items()}
    _report("assumed", compute, matched)
    _report("as shipped", machine.compute, matched)
    for name, (step, works) in matched.items():
        _report(f"fitted on {name}", fit_efficiencies(step, works, compute), matched)
    steps = [step for step, _ in matched.values()]
    both = dataclasses.replace(steps[0], ops=tuple(op for step in steps for op in step.ops))
    all_works = [work for _, works in matched.values() for work in works]
    _report("fitted on both", fit_efficiencies(both, all_works, compute), matched)


def assumed(compute: Compute) -> Compute:
    """``compute`` with shares that nobody has fitted. A fit leaves those of classes that its model has no ops of: with
    the shipped ones, the other model's would be among them."""
    other = load_machine("h100").compute
    assert other is not None
    return dataclasses.replace(compute, efficiencies=other.efficiencies)


def _report(title: str, compute: Compute, matched: dict[str, Timed]) -> None:
    print(f"{title}: " + ", ".join(f"{kind} {share:.2f}" for kind, share in compute.efficiencies))
    for name, (step, works) in matched.items():
        predicted = with_durations(step, works, compute)
        real, told = (math.fsum(op.duration_seconds for op in each.ops) for each in (step, predicted))
        print(f"    {name}: {told / real - 1:+.1%} in all, ops off by {op_error(step, predicted):.0%}")


def matched_step(real: Step, name: str) -> Timed:
    """The ops of ``real`` that the fake step has, too, and what they do."""

    def build() -> Callable[[], object]:
        workload = make_workload(name, torch.device("cpu"), small=False, batch_scale=1.0)
        batch = workload.batch(0)
        return lambda: workload.step(batch)

    return matched(real, *record_fake(build, kernels="cuda"))


if __name__ == "__main__":
    main()
