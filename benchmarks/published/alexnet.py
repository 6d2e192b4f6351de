"""AlexNet as SuperNeurons counts it: 23 layers, one op each, with the bytes of its tensors and nothing else.

PyTorch has no single op for local response normalisation, whose backward pass sets the paper's peak. So this step is
written down layer by layer instead of being observed.
"""

from __future__ import annotations

from typing import NamedTuple

from ebbtide.machine import Compute
from ebbtide.roofline import OpClass, Work, op_seconds
from ebbtide.step import EXTERNAL, Absence, Event, Op, Phase, Replay, Saved, Step, Value

BATCH = 200
FLOAT_BYTES = 4
INPUT_ELEMENTS = 3 * 227 * 227


class Layer(NamedTuple):
    """A layer: its op, elements of its output per image, and multiplications for each of them."""

    op: str
    elements: int
    fan_in: int = 0


LAYERS = (
    Layer("convolution", 96 * 55 * 55, 3 * 11 * 11),
    Layer("relu", 96 * 55 * 55),
    Layer("lrn", 96 * 55 * 55),
    Layer("max_pool2d", 96 * 27 * 27),
    Layer("convolution", 256 * 27 * 27, 96 * 5 * 5),
    Layer("relu", 256 * 27 * 27),
    Layer("lrn", 256 * 27 * 27),
    Layer("max_pool2d", 256 * 13 * 13),
    Layer("convolution", 384 * 13 * 13, 256 * 3 * 3),
    Layer("relu", 384 * 13 * 13),
    Layer("convolution", 384 * 13 * 13, 384 * 3 * 3),
    Layer("relu", 384 * 13 * 13),
    Layer("convolution", 256 * 13 * 13, 384 * 3 * 3),
    Layer("relu", 256 * 13 * 13),
    Layer("max_pool2d", 256 * 6 * 6),
    Layer("addmm", 4096, 256 * 6 * 6),
    Layer("relu", 4096),
    Layer("dropout", 4096),
    Layer("addmm", 4096, 4096),
    Layer("relu", 4096),
    Layer("dropout", 4096),
    Layer("addmm", 1000, 4096),
    Layer("_softmax", 1000),
)


def alexnet(compute: Compute, *, as_autograd: bool) -> Step:
    """A step of AlexNet, batch 200, 32 bit; parameters and their gradients are not part of it, as in the paper.

    Args:
        compute: times the ops.
        as_autograd: save what PyTorch saves: inputs of convolutions, linear and normalising layers, outputs of relu,
            both for pooling. Otherwise what cuDNN's interface takes: input and output of every layer that is not a
            convolution or linear, and relu turns the gradient into the next one in place.
    """
    writer = _Writer(compute)
    value = writer.external(BATCH * INPUT_ELEMENTS * FLOAT_BYTES)
    nodes: list[tuple[Layer, int, list[int]]] = []
    for layer in LAYERS:
        before, costly = value, layer.fan_in > 0
        saves_output_only = as_autograd and layer.op in ("relu", "dropout", "_softmax")
        saved = [] if saves_output_only else [writer.pack(before)]
        value = writer.op(layer, "forward", [before], _bytes(layer))
        if not costly and not (as_autograd and layer.op == "dropout"):
            saved.append(writer.pack(value))
        nodes.append((layer, before, saved))
    gradient = writer.op(Layer("loss", 0), "forward", [value], 0)
    for layer, before, saved in reversed(nodes):
        for number in saved:
            writer.unpack(number)
        inputs = [gradient, *(writer.saved[number] for number in saved)]
        in_place = not as_autograd and layer.op == "relu"
        size = writer.sizes[writer.storages[before]]
        gradient = writer.op(layer, "backward", inputs, size, over=gradient if in_place else None)
    return writer.step()


def _bytes(layer: Layer) -> int:
    return BATCH * layer.elements * FLOAT_BYTES


class _Writer:
    """Writes a step down as if it were being run: a storage lives until its last use or request."""

    def __init__(self, compute: Compute) -> None:
        self.compute = compute
        self.ops: list[Op] = []
        self.events: list[Event] = []
        self.saved: list[int] = []
        self.unpacked: list[list[int]] = []
        self.sizes: list[int] = []
        self.storages: list[int] = []
        self.makers: list[int] = []
        self.uses: list[list[int]] = []
        self.last: list[int] = []
        self.absences: list[Absence] = []

    @property
    def moment(self) -> int:
        """The next moment."""
        return len(self.ops) + len(self.events)

    def external(self, size_bytes: int) -> int:
        """A value that the step did not make."""
        return self._value(size_bytes, EXTERNAL, None)

    def op(self, layer: Layer, phase: Phase, inputs: list[int], size_bytes: int, *, over: int | None = None) -> int:
        """Run an op that makes a storage, or a new version of that of ``over``; the value made."""
        moment, tick = self.moment, len(self.ops)
        made = self._value(size_bytes, tick, over)
        for value in (*inputs, made):
            self.last[self.storages[value]] = moment + 1
        for value in inputs:
            self.uses[value].append(tick)
        mutated = () if over is None else ((over, made),)
        backward = phase == "backward"
        name = f"aten.{layer.op}{'_backward' if backward else ''}.default"
        seconds = self._seconds(layer, backward, [self.sizes[self.storages[value]] for value in (*inputs, made)])
        replay: Replay = "opaque" if backward or layer.op == "loss" else "pure"  # dropout too, from its kept mask
        self.ops.append(Op(name, tuple(inputs), (made,), mutated, seconds, 0, replay, phase, f"AlexNet.{tick}"))
        return made

    def pack(self, value: int) -> int:
        """Autograd saves a value; the number of the saved tensor."""
        self.last[self.storages[value]] = max(self.moment, self.last[self.storages[value]])
        self.events.append(Event("pack", len(self.ops), len(self.saved)))
        self.saved.append(value)
        self.unpacked.append([])
        return len(self.saved) - 1

    def unpack(self, saved: int) -> None:
        """Autograd asks for a saved tensor: the absence of its value since its last use ends."""
        value, moment = self.saved[saved], self.moment
        opens = self.last[self.storages[value]]
        if self.makers[value] != EXTERNAL and opens < moment:
            self.absences.append(Absence(value, opens, moment))
        self.unpacked[saved].append(moment)
        self.last[self.storages[value]] = moment + 1
        self.events.append(Event("unpack", len(self.ops), saved))

    def step(self) -> Step:
        """The step."""
        end = self.moment
        values = tuple(
            Value(self.sizes[storage], storage, maker, tuple(uses), end if maker == EXTERNAL else self.last[storage])
            for storage, maker, uses in zip(self.storages, self.makers, self.uses, strict=True)
        )
        saved = tuple(
            Saved(value, "float32", (values[value].size_bytes // FLOAT_BYTES,), (1,), 0, tuple(moments))
            for value, moments in zip(self.saved, self.unpacked, strict=True)
        )
        absences = tuple(sorted(self.absences, key=lambda absence: (absence.value, absence.opens)))
        return Step(tuple(self.ops), values, saved, tuple(self.events), absences, device="cuda")

    def _value(self, size_bytes: int, maker: int, over: int | None) -> int:
        if over is None:
            self.sizes.append(size_bytes)
            self.last.append(0)
        self.storages.append(len(self.sizes) - 1 if over is None else self.storages[over])
        self.makers.append(maker)
        self.uses.append([])
        return len(self.storages) - 1

    def _seconds(self, layer: Layer, backward: bool, sizes: list[int]) -> float:
        products = 2 * BATCH * layer.elements * layer.fan_in * (2 if backward else 1)
        kind: OpClass = "elementwise" if not layer.fan_in else "matmul" if layer.op == "addmm" else "convolution"
        return op_seconds(Work(kind, products, sum(sizes), "float32"), self.compute)


def made_bytes(step: Step) -> int:
    """Bytes of all storages that the step makes, each counted once: what one allocation per tensor takes."""
    return sum({value.storage: value.size_bytes for value in step.values if value.maker != EXTERNAL}.values())
