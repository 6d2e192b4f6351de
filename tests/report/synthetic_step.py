"""A made-up training step that looks like a convolutional network's, and a plan for it."""

from __future__ import annotations

import bisect
import dataclasses
from typing import NamedTuple

from ebbtide.decisions import Decision, Keep, Offload, Plan, Recompute
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import simulate
from ebbtide.step import Step
from tests.plan.random_steps import KIB, MIB, Tape


def machine() -> Machine:
    """A computer with a disk of 2.5 GB/s out and 1.6 GB/s in."""
    out = Link("memory", "disk", 2e-4, 2.5e9, 2.0e9, 0.05)
    back = Link("disk", "memory", 2e-4, 1.6e9, 1.2e9, 0.05)
    return Machine("a small machine", "memory", (Tier("memory", "device"), Tier("disk", "disk")), (out, back))


def network(layers: int = 32, name: str = "Net") -> Step:
    """A step of ``layers`` times convolution, batch norm, in-place ReLU, with a pooling after every fourth."""
    tape = Tape()
    weights = [tape.external(int(0.4 * MIB * (1 + layer // 6))) for layer in range(layers)]
    value = tape.external(3 * MIB)
    nodes: list[Node] = []
    for layer in range(layers):
        module = f"{name}.features.{layer}"
        size = int((14 + 5 * (layer % 3)) * MIB * 0.55 ** (layer // 4)) // 512 * 512
        cost = 1.5e-3 + 4e-3 * size / MIB / 10
        value = _layer(tape, nodes, value, weights[layer], size, cost, module)
        if layer % 4 == 3:
            sizes, seconds = [size // 4, size // 2], cost / 10
            kept, indices = tape.op(
                [value], sizes, seconds=seconds, name="aten.max_pool2d_with_indices.default", module=module
            )
            nodes.append(Node("max_pool2d_with_indices", [tape.pack(value), tape.pack(indices)], module, seconds))
            value = kept
    _backward(tape, value, nodes)
    step = tape.step()
    first = {absence.value: absence for absence in reversed(step.absences)}
    large = [first[value] for value in sorted(first) if step.values[value].size_bytes >= 32 * KIB]
    return dataclasses.replace(step, absences=tuple(large))


class Node(NamedTuple):
    """What autograd keeps of an op: its name, its saved tensors, its module, its duration."""

    name: str
    saved: list[int]
    module: str
    seconds: float


def _layer(tape: Tape, nodes: list[Node], value: int, weight: int, size: int, cost: float, module: str) -> int:
    """A convolution of ``size`` bytes, batch norm, ReLU; returns the result."""
    (conv,) = tape.op([value, weight], [size], seconds=cost, name="aten.convolution.default", module=f"{module}.conv")
    nodes.append(Node("convolution", [tape.pack(value), tape.pack(weight)], f"{module}.conv", cost))
    made = tape.op(
        [conv],
        [size, 256, 256],
        seconds=cost / 8,
        replay="batch_norm",
        name="aten.native_batch_norm.default",
        module=f"{module}.norm",
    )
    nodes.append(Node("native_batch_norm", [tape.pack(part) for part in (conv, *made[1:])], f"{module}.norm", cost / 8))
    (result,) = tape.op(
        [made[0]],
        [],
        writes=made[0],
        seconds=cost / 16,
        replay="in_place",
        name="aten.relu_.default",
        module=f"{module}.relu",
    )
    nodes.append(Node("threshold", [tape.pack(result)], f"{module}.relu", cost / 16))
    return result


def _backward(tape: Tape, value: int, nodes: list[Node]) -> None:
    tape.op([value], [4], seconds=1e-4, name="aten.mean.default")
    (gradient,) = tape.op([], [_size(tape, value)], seconds=1e-4, name="aten.div.default", phase="backward")
    for node in reversed(nodes):
        for number in node.saved:
            tape.unpack(number)
        inputs = [tape.saved[number][0] for number in node.saved]
        sizes = [_size(tape, number) for number in inputs[: 2 if node.name == "convolution" else 1]]
        name = f"aten.{node.name}_backward.default"
        gradient, *parts = tape.op(
            [gradient, *inputs], sizes, seconds=2 * node.seconds, name=name, phase="backward", module=node.module
        )
        for part in parts:
            tape.hold(part, 10**9)  # a weight's gradient outlives the step


def _size(tape: Tape, value: int) -> int:
    return tape.storages[tape.storage_of[value]].size_bytes


def plan_for(step: Step, on: Machine, limit_share: float = 0.4) -> Plan:
    """A plan that moves the big activations and computes every third convolution's result again."""
    ticks = [event.tick for event in step.events]
    moments = step.event_moments()
    decisions = tuple(_decision(step, index, ticks, moments) for index in range(len(step.absences)))
    plain = simulate(step, on, tuple(Keep() for _ in step.absences))
    planned = simulate(step, on, decisions)
    resting = step.resting_bytes
    return Plan(
        decisions=decisions,
        limit_bytes=max(planned.peak_bytes, resting + int(limit_share * (plain.peak_bytes - resting))),
        peak_bytes=planned.peak_bytes,
        seconds=planned.seconds,
        physical_peak_bytes=planned.physical_peak_bytes,
        plain_peak_bytes=plain.peak_bytes,
        plain_seconds=plain.seconds,
        resting_bytes=resting,
        bound_seconds=plain.seconds * 1.004,
        method="hand",
    )


def _decision(step: Step, index: int, ticks: list[int], moments: list[int]) -> Decision:
    absence = step.absences[index]
    value = step.values[absence.value]
    maker = step.ops[value.maker]
    if maker.name == "aten.convolution.default" and index % 3:
        return Recompute((value.maker,))
    if value.size_bytes < 2 * MIB:
        return Keep()
    first = ticks[bisect.bisect_left(moments, absence.opens)]
    release = ticks[min(bisect.bisect_left(moments, absence.opens) + 6, len(ticks) - 1)]
    closing = bisect.bisect_left(moments, absence.closes)
    load = ticks[max(closing - 4, 0)]
    return Offload("disk", first, release, load) if release < load else Keep()
