"""Hascoet 2019, AutoSwap 2019 and Beaumont 2020: transfers alone."""

from __future__ import annotations

import dataclasses
import functools
import statistics
from collections.abc import Iterable, Iterator

from benchmarks.networks import images, step_on
from benchmarks.published.record import Row, least_limit
from ebbtide.demo.models import VGG19, ResNet
from ebbtide.errors import BudgetError
from ebbtide.machine import Link, Machine
from ebbtide.machines import load_machine
from ebbtide.observe.fake import observe_fake
from ebbtide.plan import NO_CAUTION, plain_peak_bytes, solve
from ebbtide.plan.published.autoswap import NAMES, least_zero_overhead_limit
from ebbtide.plan.published.hascoet import hascoet
from ebbtide.plan.published.registry import POLICIES
from ebbtide.step import Step

NO_OVERHEAD = 1e-3
"""What counts as no overhead of a plan of ours: its search ends a little above the bound."""
BANDWIDTHS = (8e9, 12e9, 16e9, 25e9, 50e9)
"""Of Beaumont's comparison, bytes per second each way."""
SHARES = (0.8, 0.6, 0.4, 0.2)
"""Of the way from the least peak that offloading reaches to the plain one."""


def hascoet_rows(seconds: float) -> Iterator[Row]:
    """VGG-19 on a Titan X: -35 % memory at +21 % time."""
    machine = load_machine("titan-x-maxwell")
    step = step_on("vgg19", machine)
    note = (
        "The paper's batch size is not known; here 64. Memory includes parameters and their gradients. ebbtide plans"
        " for the policy's peak, or for its time."
    )
    for layers in ("conv", "all"):
        plan = POLICIES[f"hascoet-{layers}"](step, machine, plain_peak_bytes(step))
        ours = solve(step, machine, plan.peak_bytes, seconds=seconds, caution=NO_CAUTION)
        instance = f"VGG-19 b64, Titan X, {layers} inputs"
        saved = [peak / plan.plain_peak_bytes - 1 for peak in (plan.peak_bytes, ours.peak_bytes)]
        yield Row("Hascoet 2019", instance, "memory", "share", -0.35, saved[0], saved[1], note=note)
        times = [_over(step, taken) for taken in (plan.seconds, ours.seconds, ours.bound_seconds)]
        yield Row("Hascoet 2019", instance, "time at that memory", "share", 0.21, times[0], times[1], times[2], note)
        if layers == "conv":
            yield from _tricks(step, machine, instance)
            planner = functools.partial(solve, seconds=seconds / 4, caution=NO_CAUTION)
            least = least_limit(step, machine, planner, plan.seconds, plan.peak_bytes)
            reached = least / plan.plain_peak_bytes - 1
            yield Row("Hascoet 2019", instance, "memory at that time", "share", -0.35, saved[0], reached, note=note)


def _tricks(step: Step, machine: Machine, instance: str) -> Iterator[Row]:
    """What each of the paper's tricks is worth: the policy without it."""
    note = (
        "The paper measures what each trick is worth; its figures are not public. Without the copy stream none is left."
    )
    for trick in ("prefetch", "helper_thread", "copy_stream"):
        seconds = hascoet(step, machine, plain_peak_bytes(step), layers="conv", **{trick: False}).seconds
        what = f"time without {trick.replace('_', ' ')}"
        yield Row("Hascoet 2019", instance, what, "share", None, _over(step, seconds), None, note=note)


def autoswap_rows(seconds: float) -> Iterator[Row]:
    """The most memory that swapping saves at no cost of time: up to 34.2 %."""
    machine = with_links(load_machine("titan-x-maxwell"), (47.2e-6, 1 / 0.0756e-9), (9.7e-6, 1 / 0.0823e-9))
    steps = {
        "VGG-19 b100, 32x32": observe_fake(images(lambda: VGG19(10), batch=100, side=32), machine),
        "ResNet-50 b100, 32x32": observe_fake(images(lambda: ResNet(10), batch=100, side=32), machine),
        "VGG-19 b64, 224x224": step_on("vgg19", machine),
        "ResNet-50 b64, 224x224": step_on("resnet50", machine),
    }
    note = (
        "The GPU and the networks of the 34.2 % are not known: the authors' link model, a Titan X, their CIFAR-10 batch"
        f" and ImageNet sizes. The best of four scores. Ours: below {NO_OVERHEAD:.1%} overhead. Of the whole peak."
    )
    for name, step in steps.items():
        plain = plain_peak_bytes(step)
        swapped = min(least_zero_overhead_limit(step, machine, score=score) for score in NAMES)
        most = (1 + NO_OVERHEAD) * step.plain_seconds
        ours = least_limit(
            step, machine, functools.partial(solve, seconds=seconds / 4, caution=NO_CAUTION), most, swapped
        )
        saved = [limit / plain - 1 for limit in (swapped, ours)]
        yield Row("AutoSwap 2019", name, "memory at no overhead", "share", -0.342, saved[0], saved[1], note=note)


def beaumont_rows(seconds: float) -> Iterator[Row]:
    """Greedy and dynamic program against vDNN and AutoSwap, over budgets and bandwidths."""
    names = ("beaumont-greedy", "beaumont-dp", "vdnn-all", "vdnn-conv", "autoswap-swdoa", "offload-all")
    note = (
        "No number is public, only that its heuristics do much better than earlier ones. ebbtide also computes again."
        " Budgets that a policy does not meet count for neither."
    )
    for bandwidth in BANDWIDTHS:
        machine = with_links(load_machine("v100-16gb-pcie"), (1e-5, bandwidth), (1e-5, bandwidth))
        step = step_on("resnet50", machine)
        limits = _budgets(step, machine)
        ours = {limit: solve(step, machine, limit, seconds=seconds, caution=NO_CAUTION) for limit in limits}
        for name in names:
            met: dict[int, float] = {}
            for limit in limits:
                try:
                    met[limit] = POLICIES[name](step, machine, limit).seconds
                except BudgetError:
                    continue
            fair = [ours[limit] for limit in met]
            yield Row(
                "Beaumont 2020",
                f"ResNet-50 b64, V100, {bandwidth / 1e9:.0f} GB/s",
                f"{name}: mean time over {len(met)} of {len(limits)} budgets",
                "share",
                None,
                _mean_over(step, met.values()),
                _mean_over(step, [plan.seconds for plan in fair]),
                _mean_over(step, [plan.bound_seconds for plan in fair]),
                note,
            )


def with_links(machine: Machine, out: tuple[float, float], back: tuple[float, float]) -> Machine:
    """``machine`` with another host link: per direction latency in seconds and bytes per second, duplex too."""
    host = machine.slow_tiers()[0].name
    links = (
        Link(machine.fast, host, out[0], out[1], out[1]),
        Link(host, machine.fast, back[0], back[1], back[1]),
    )
    return dataclasses.replace(machine, links=links)


def _budgets(step: Step, machine: Machine) -> list[int]:
    """Limits between the least peak of offloading everything and the plain peak."""
    plain, least = plain_peak_bytes(step), step.resting_bytes
    try:
        POLICIES["offload-all"](step, machine, least)
    except BudgetError as error:
        least = error.reachable_bytes
    return [least + int(share * (plain - least)) for share in SHARES]


def _over(step: Step, seconds: float | None) -> float | None:
    return None if seconds is None else seconds / step.plain_seconds - 1


def _mean_over(step: Step, seconds: Iterable[float | None]) -> float | None:
    known = [second for second in seconds if second is not None]
    return _over(step, statistics.fmean(known)) if known else None
