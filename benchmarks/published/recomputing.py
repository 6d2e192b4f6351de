"""SuperNeurons 2018 and POFO 2021: transfers and recomputation."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator

from benchmarks.networks import resnet, step_on
from benchmarks.published.alexnet import BATCH, alexnet, made_bytes
from benchmarks.published.record import Row, least_limit
from ebbtide.decisions import Plan, Recompute
from ebbtide.machine import Machine
from ebbtide.machines import load_machine
from ebbtide.observe.fake import observe_fake
from ebbtide.plan import NO_CAUTION, least_peak_bytes, plain_peak_bytes, solve
from ebbtide.plan.published.registry import POLICIES
from ebbtide.plan.published.superneurons import Offloading, Recomputation, superneurons
from ebbtide.step import Step

PAPER = "SuperNeurons 2018"
MEGABYTE = 2**20
"""The paper's MB: four tensors of conv1's shape are 886.23 of these."""
UNLIMITED = 1 << 60
THIRD_STAGES = (4, 12)
"""Blocks in the third stage of the two ResNets from whose peaks the deepest one is told."""
POFO_OVERHEAD = 0.2
POFO_NETWORKS = {"resnet101": "ResNet-101 b32", "vit": "ViT-B/16 b64", "gpt2": "GPT-2 small b8"}


def alexnet_rows(seconds: float) -> Iterator[Row]:
    """The steps down from 2189 MB to 886 MB, and how many layers are computed again."""
    machine = load_machine("k40c")
    assert machine.compute is not None
    cudnn, autograd = (alexnet(machine.compute, as_autograd=flag) for flag in (False, True))
    instance = f"AlexNet b{BATCH}, K40c"
    note = (
        "AlexNet written down from its layers, with the tensors that cuDNN's interface takes; times are a roofline's."
        " ebbtide: the least peak it reaches, whatever it costs."
    )
    ours = least_peak_bytes(cudnn, machine) - cudnn.resting_bytes

    def row(what: str, claim: float, published: float, ebbtide: float | None = None) -> Row:
        return Row(PAPER, instance, what, "bytes", claim * MEGABYTE, published, ebbtide, note=note)

    def peak(step: Step, offload: Offloading, recompute: Recomputation) -> int:
        plan = superneurons(step, machine, UNLIMITED, offload=offload, recompute=recompute)
        return plan.peak_bytes - step.resting_bytes

    yield row("one allocation per tensor", 2189.437, made_bytes(cudnn))
    yield row("liveness", 1489.355, plain_peak_bytes(cudnn) - cudnn.resting_bytes)
    yield row("with offloading", 1132.155, peak(cudnn, "checkpoints", "none"))
    yield row("with recomputation too", 886.385, peak(cudnn, "checkpoints", "cost"), ours)
    saves = "The same with what PyTorch saves, where relu needs its output alone."
    least = least_peak_bytes(autograd, machine) - autograd.resting_bytes
    reached = peak(autograd, "checkpoints", "cost")
    yield Row(PAPER, instance, "the same, PyTorch's saves", "bytes", 886.385 * MEGABYTE, reached, least, note=saves)
    plan = superneurons(autograd, machine, UNLIMITED, offload="checkpoints", recompute="cost")
    best = solve(autograd, machine, plan.peak_bytes, seconds=seconds, caution=NO_CAUTION)
    taken = (plan.seconds, best.seconds, best.bound_seconds)
    times = [None if value is None else value / plan.plain_seconds - 1 for value in taken]
    yield Row(PAPER, instance, "time at that memory", "share", None, times[0], times[1], times[2], saves)
    counts: dict[Recomputation, int] = {"speed": 14, "memory": 23, "cost": 17}
    for recompute, claim in counts.items():
        plan = superneurons(cudnn, machine, UNLIMITED, offload="checkpoints", recompute=recompute)
        yield Row(
            PAPER, instance, f"layers run again, {recompute}", "count", claim, _layers_again(plan), None, note=note
        )


def depth_rows(_seconds: float) -> Iterator[Row]:
    """The deepest ResNet on 12 GB at batch 16, and whether ResNet-2500 fits at batch 1."""
    machine = load_machine("k40c")
    capacity = machine.tier(machine.fast).capacity_bytes
    assert capacity is not None
    plain = deepest(plain_peak_bytes, machine, capacity)
    theirs = deepest(lambda step: _superneurons_peak(step, machine), machine, capacity)
    ours = deepest(lambda step: least_peak_bytes(step, machine), machine, capacity)
    instance = "ResNet b16, K40c"
    note = (
        "Peaks grow evenly with each block of the third stage: told from two depths. Parameters and gradients included,"
        " no momentum, no convolution workspaces. For TensorFlow's 592 layers stands plain PyTorch."
    )
    yield Row(PAPER, instance, "deepest without a plan", "layers", 592, plain, None, note=note)
    yield Row(PAPER, instance, "deepest", "layers", 1920, theirs, ours, note=note)
    yield Row(PAPER, instance, "against no plan", "factor", 3.2432, theirs / plain, ours / plain, note=note)
    peaks = [
        _told(measure, machine, 788, batch=1)
        for measure in (
            lambda step: _superneurons_peak(step, machine),
            lambda step: least_peak_bytes(step, machine),
        )
    ]
    yield Row(PAPER, "ResNet-2500 b1, K40c", "peak", "bytes", capacity, peaks[0], peaks[1], note=note)


def deepest(peak: Callable[[Step], int], machine: Machine, capacity_bytes: int) -> int:
    """Layers of the deepest ResNet whose peak is within a capacity: 3 (6 + 32 + n + 6) + 2 for the largest n."""
    start, slope = _line(peak, machine, batch=16)
    return 3 * (6 + 32 + int((capacity_bytes - start) / slope) + 6) + 2


def _told(peak: Callable[[Step], int], machine: Machine, third: int, *, batch: int) -> float:
    start, slope = _line(peak, machine, batch=batch)
    return start + slope * third


def _line(peak: Callable[[Step], int], machine: Machine, *, batch: int) -> tuple[float, float]:
    """Peak with no block in the third stage, and what each one adds."""
    low, high = THIRD_STAGES
    peaks = [peak(_resnet_step(third, batch, machine)) for third in THIRD_STAGES]
    slope = (peaks[1] - peaks[0]) / (high - low)
    return peaks[0] - slope * low, slope


@functools.cache
def _resnet_step(third: int, batch: int, machine: Machine) -> Step:
    return observe_fake(resnet(6, 32, third, 6, batch=batch), machine)


def _superneurons_peak(step: Step, machine: Machine) -> int:
    return superneurons(step, machine, UNLIMITED, offload="checkpoints", recompute="cost").peak_bytes


def _layers_again(plan: Plan) -> int:
    return sum(len(decision.ops) for decision in plan.decisions if isinstance(decision, Recompute))


def pofo_rows(seconds: float) -> Iterator[Row]:
    """Memory for activations down by 4 to 6 at less than 20 % more time."""
    machine = load_machine("v100-16gb-pcie")
    note = (
        "4 to 6 in the paper; its networks and batches are not known. Memory above rest; parameters and their gradients"
        " rest. Rotor: the same without offloading. Half of GPT-2's plain peak are scores of 50,257 tokens and their"
        " gradients, made by the loss at once: no schedule of stages can do without them."
    )
    for name, words in POFO_NETWORKS.items():
        step = step_on(name, machine)
        most = (1 + POFO_OVERHEAD) * step.plain_seconds
        pofo = least_limit(step, machine, POLICIES["pofo"], most)
        ours = least_limit(step, machine, functools.partial(solve, seconds=seconds / 4, caution=NO_CAUTION), most, pofo)
        least = {"pofo": pofo, "rotor": least_limit(step, machine, POLICIES["rotor"], most)}
        for policy, claim in (("pofo", 4.0), ("rotor", None)):
            quantity = f"{policy}: activations less by, within +20 %"
            yield Row(
                "POFO 2021",
                f"{words}, V100",
                quantity,
                "factor",
                claim,
                _factor(step, least[policy]),
                _factor(step, ours),
                note=note,
            )


def _factor(step: Step, limit_bytes: int) -> float:
    """Memory above rest without a plan over that with a limit."""
    rest = step.resting_bytes
    return (plain_peak_bytes(step) - rest) / (limit_bytes - rest)
