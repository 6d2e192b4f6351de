"""A made-up training step that looks like a convolutional network's, and a plan for it."""

from __future__ import annotations

import bisect
import dataclasses

from ebbtide.decisions import Decision, Keep, Offload, Plan, Recompute
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import simulate
from ebbtide.step import EXTERNAL, Absence, Event, Op, Phase, Replay, Saved, Step, Value

MIB = 2**20


def machine() -> Machine:
    """A computer with a disk of 2.5 GB/s out and 1.6 GB/s in."""
    out = Link("memory", "disk", 2e-4, 2.5e9, 2.0e9, 0.05)
    back = Link("disk", "memory", 2e-4, 1.6e9, 1.2e9, 0.05)
    return Machine("a small machine", "memory", (Tier("memory", "device"), Tier("disk", "disk")), (out, back))


class _Writer:
    """Writes ops, values and events in program order; lifetimes are filled in at the end."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.events: list[Event] = []
        self.values: list[Value] = []
        self.saved: list[Saved] = []
        self.storages = 0
        self.last: dict[int, int] = {}
        self.last_forward: dict[int, int] = {}
        self.phase: Phase = "forward"

    def value(self, size_bytes: int, maker: int = EXTERNAL, storage: int | None = None) -> int:
        if storage is None:
            storage, self.storages = self.storages, self.storages + 1
        self.values.append(Value(size_bytes, storage, maker, (), 0))
        return len(self.values) - 1

    def touch(self, number: int) -> None:
        storage = self.values[number].storage
        self.last[storage] = len(self.ops) + len(self.events)
        if self.phase == "forward":
            self.last_forward[storage] = self.last[storage]

    def op(
        self, name: str, inputs: list[int], sizes: list[int], seconds: float, module: str, replay: Replay = "pure"
    ) -> list[int]:
        for number in inputs:
            self.touch(number)
            value = self.values[number]
            self.values[number] = dataclasses.replace(value, uses=(*value.uses, len(self.ops)))
        outputs = [self.value(size, len(self.ops)) for size in sizes]
        for number in outputs:
            self.touch(number)
        made = (tuple(inputs), tuple(outputs), (), seconds, 0, replay, self.phase, module)
        self.ops.append(Op(f"aten.{name}.default", *made))
        return outputs

    def in_place(self, name: str, number: int, seconds: float, module: str) -> int:
        self.touch(number)
        old = self.values[number]
        new = self.value(old.size_bytes, len(self.ops), old.storage)
        mutated = ((number, new),)
        made = ((number,), (new,), mutated, seconds, 0, "in_place", self.phase, module)
        self.ops.append(Op(f"aten.{name}.default", *made))  # type: ignore[arg-type]
        return new

    def pack(self, number: int) -> int:
        self.touch(number)
        self.events.append(Event("pack", len(self.ops), len(self.saved)))
        self.saved.append(Saved(number, "float32", (self.values[number].size_bytes // 4,), (1,), 0, ()))
        return len(self.saved) - 1

    def unpack(self, number: int) -> int:
        saved = self.saved[number]
        self.touch(saved.value)
        moment = len(self.ops) + len(self.events)
        self.saved[number] = dataclasses.replace(saved, unpacked=(*saved.unpacked, moment))
        self.events.append(Event("unpack", len(self.ops), number))
        return saved.value

    def step(self) -> Step:
        moments = len(self.ops) + len(self.events)
        values = tuple(
            dataclasses.replace(v, dies=moments if v.maker == EXTERNAL else self.last[v.storage] + 1)
            for v in self.values
        )
        absences = []
        for number in sorted({saved.value for saved in self.saved}):
            if values[number].maker != EXTERNAL and values[number].size_bytes >= 32 * 1024:
                closes = min(s.unpacked[0] for s in self.saved if s.value == number)
                opens = self.last_forward[values[number].storage] + 1
                absences.append(Absence(number, opens, closes))
        return Step(tuple(self.ops), values, tuple(self.saved), tuple(self.events), tuple(absences))


def network(layers: int = 32, name: str = "Net") -> Step:
    """A step of ``layers`` times convolution, batch norm, in-place ReLU, with a pooling after every fourth."""
    writer = _Writer()
    weights = [writer.value(int(0.4 * MIB * (1 + layer // 6))) for layer in range(layers)]
    value = writer.value(3 * MIB)
    tape: list[tuple[str, list[int], str, float]] = []
    for layer in range(layers):
        module = f"{name}.features.{layer}"
        size = int((14 + 5 * (layer % 3)) * MIB * 0.55 ** (layer // 4)) // 512 * 512
        cost = 1.5e-3 + 4e-3 * size / MIB / 10
        conv_input = value
        (conv,) = writer.op("convolution", [conv_input, weights[layer]], [size], cost, f"{module}.conv")
        tape.append(("convolution", [writer.pack(conv_input), writer.pack(weights[layer])], f"{module}.conv", cost))
        made = writer.op("native_batch_norm", [conv], [size, 256, 256], cost / 8, f"{module}.norm", "batch_norm")
        tape.append(("native_batch_norm", [writer.pack(n) for n in (conv, *made[1:])], f"{module}.norm", cost / 8))
        value = writer.in_place("relu_", made[0], cost / 16, f"{module}.relu")
        tape.append(("threshold", [writer.pack(value)], f"{module}.relu", cost / 16))
        if layer % 4 == 3:
            kept, indices = writer.op("max_pool2d_with_indices", [value], [size // 4, size // 2], cost / 10, module)
            tape.append(("max_pool2d_with_indices", [writer.pack(value), writer.pack(indices)], module, cost / 10))
            value = kept
    _backward(writer, value, tape)
    return writer.step()


def _backward(writer: _Writer, value: int, tape: list[tuple[str, list[int], str, float]]) -> None:
    (loss,) = writer.op("mean", [value], [4], 1e-4, "")
    del loss
    writer.phase = "backward"
    (grad,) = writer.op("div", [], [writer.values[value].size_bytes], 1e-4, "")
    for name, numbers, module, cost in reversed(tape):
        inputs = [writer.unpack(number) for number in numbers]
        target = writer.values[inputs[0]].size_bytes
        extra = [writer.values[inputs[1]].size_bytes] if name == "convolution" else []
        made = writer.op(f"{name}_backward", [grad, *inputs], [target, *extra], 2 * cost, module)
        grad = made[0]
        for part in made[1:]:
            writer.touch(part)
            # A weight's gradient outlives the step.
            writer.last[writer.values[part].storage] = 10**9
    moments = len(writer.ops) + len(writer.events)
    writer.last = {storage: min(last, moments - 1) for storage, last in writer.last.items()}


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
