"""Steps made up for the planner's tests: small random programs, and networks in the large."""

from __future__ import annotations

import dataclasses
import random
from typing import Literal

from ebbtide.machine import Link, Machine, Tier
from ebbtide.step import EXTERNAL, Absence, Event, Op, Replay, Saved, Step, Value

KIB = 1024
MIB = 1024 * 1024
NO_END = 1 << 60


def disk_machine(
    out_bandwidth: float = 3e9,
    in_bandwidth: float = 1.5e9,
    *,
    slowdown: float = 0.0,
    latency: float = 1e-4,
    compute_seconds: float = 0.0,
) -> Machine:
    """A machine with a disk."""
    return Machine(
        "paper",
        "ram",
        (Tier("ram", "device"), Tier("disk", "disk")),
        (
            Link("ram", "disk", latency, out_bandwidth, out_bandwidth, slowdown, compute_seconds),
            Link("disk", "ram", latency, in_bandwidth, in_bandwidth, slowdown, compute_seconds),
        ),
    )


def lone_machine() -> Machine:
    """A machine without a slow tier."""
    return Machine("lone", "ram", (Tier("ram", "device"),), ())


@dataclasses.dataclass
class _Storage:
    size_bytes: int
    born: int
    values: list[int]
    needs: list[tuple[int, int]] = dataclasses.field(default_factory=list)
    unpacks: list[int] = dataclasses.field(default_factory=list)
    stays: int = 0


class Tape:
    """Writes a step down as if it were being run: ops, saves, requests; lifetimes follow from use."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.events: list[Event] = []
        self.saved: list[tuple[int, list[int]]] = []
        self.storages: list[_Storage] = []
        self.storage_of: list[int] = []
        self.maker: list[int] = []
        self.uses: list[list[int]] = []

    @property
    def moment(self) -> int:
        """The next moment."""
        return len(self.ops) + len(self.events)

    def external(self, size_bytes: int) -> int:
        """A value that the step did not make."""
        return self._value(self._storage(size_bytes, -1), EXTERNAL)

    def op(
        self,
        inputs: list[int],
        sizes: list[int],
        *,
        writes: int | None = None,
        seconds: float = 1e-3,
        replay: Replay = "pure",
        workspace: int = 0,
        phase: Literal["forward", "backward"] = "forward",
        name: str = "aten.op.default",
        module: str = "",
    ) -> list[int]:
        """Run an op: new storages of ``sizes``, and a new version of value ``writes``; returns the values made."""
        moment, tick = self.moment, len(self.ops)
        outputs = [self._value(self._storage(size, moment), tick) for size in sizes]
        mutated: tuple[tuple[int, int], ...] = ()
        if writes is not None:
            new = self._value(self.storage_of[writes], tick)
            mutated = ((writes, new),)
            outputs.append(new)
        for value in {*inputs, *outputs, *([] if writes is None else [writes])}:
            self.storages[self.storage_of[value]].needs.append((moment, moment + 1))
        for value in dict.fromkeys(inputs):
            self.uses[value].append(tick)
        read = tuple(dict.fromkeys(inputs))
        module = module or f"layer.{tick}"
        self.ops.append(Op(name, read, tuple(outputs), mutated, seconds, workspace, replay, phase, module))
        return outputs

    def pack(self, value: int) -> int:
        """Autograd saves ``value``; returns the number of the saved tensor."""
        self.storages[self.storage_of[value]].needs.append((self.moment, self.moment))
        self.events.append(Event("pack", len(self.ops), len(self.saved)))
        self.saved.append((value, []))
        return len(self.saved) - 1

    def unpack(self, saved: int) -> None:
        """Autograd asks for a saved tensor."""
        value, moments = self.saved[saved]
        moments.append(self.moment)
        storage = self.storages[self.storage_of[value]]
        storage.unpacks.append(self.moment)
        storage.needs.append((self.moment, self.moment + 1))
        self.events.append(Event("unpack", len(self.ops), saved))

    def hold(self, value: int, until: int) -> None:
        """The program holds ``value`` until moment ``until``."""
        self.storages[self.storage_of[value]].needs.append((self.moment, until))

    def retain(self, saved: int, until: int = NO_END) -> None:
        """A graph has a saved tensor until moment ``until``, and nothing asks for it any more."""
        self.storages[self.storage_of[self.saved[saved][0]]].stays = until

    def step(self) -> Step:
        """The step."""
        end = self.moment
        dies = [min(end, max([need for _, need in s.needs] + [s.born + 1, s.stays])) for s in self.storages]
        absences = []
        shown = {moment: value for value, moments in self.saved for moment in moments}
        for storage, gone in zip(self.storages, dies, strict=True):
            if storage.born >= 0:
                absences += self._absences(storage, gone, shown)
        values = [
            Value(
                self.storages[storage].size_bytes,
                storage,
                maker,
                tuple(uses),
                end if self.storages[storage].born < 0 else dies[storage],
            )
            for storage, maker, uses in zip(self.storage_of, self.maker, self.uses, strict=True)
        ]
        saved = [
            Saved(value, "uint8", (values[value].size_bytes,), (1,), 0, tuple(moments)) for value, moments in self.saved
        ]
        absences.sort(key=lambda absence: (absence.value, absence.opens))
        return Step(tuple(self.ops), tuple(values), tuple(saved), tuple(self.events), tuple(absences))

    def _absences(self, storage: _Storage, gone: int, shown: dict[int, int]) -> list[Absence]:
        found = []
        for closes in sorted(set(storage.unpacks)):
            opens = max(end for start, end in storage.needs if start < closes)
            if opens < closes < gone:
                found.append(Absence(shown[closes], opens, closes))
        opens = max((need for _, need in storage.needs), default=gone)
        if storage.stays and opens < gone:
            found.append(Absence(storage.values[-1], opens, gone))
        return found

    def _storage(self, size_bytes: int, born: int) -> int:
        self.storages.append(_Storage(size_bytes, born, []))
        return len(self.storages) - 1

    def _value(self, storage: int, maker: int) -> int:
        number = len(self.storage_of)
        self.storage_of.append(storage)
        self.maker.append(maker)
        self.uses.append([])
        self.storages[storage].values.append(number)
        return number


def random_step(seed: int, length: int = 8, *, retained: float = 0.0) -> Step:
    """A small program with everything the simulator has rules for, then its backward pass, after which a share of what
    was saved is ``retained`` by its graph. Of that, some is never asked for."""
    dice = random.Random(seed)
    tape = Tape()
    live = [tape.external(dice.randrange(1, 5) * 16 * KIB) for _ in range(2)]
    parameters = list(live)
    statistics = tape.external(KIB)
    frozen: set[int] = set()
    nodes: list[list[int]] = []
    for _ in range(length):
        made, statistics = _forward_op(dice, tape, live, parameters, statistics, frozen)
        node = []
        choices = [value for value in dict.fromkeys([*live[-3:], *made]) if value not in parameters]
        for value in dice.sample(choices, k=min(len(choices), dice.choice([0, 1, 1, 2]))):
            node.append(tape.pack(value))
            frozen.add(tape.storage_of[value])
        nodes.append(node)
        if dice.random() < 0.15:
            tape.hold(live[-1], tape.moment + dice.randrange(1, 12))
    gradient = live[-1]
    kept = {saved for node in nodes for saved in node if retained and dice.random() < retained}
    unasked = {saved for saved in kept if dice.random() < 0.3}
    for saved in kept:
        tape.retain(saved, dice.choice([NO_END, tape.moment, tape.moment + dice.randrange(1, 20)]))
    for node in reversed(nodes):
        node[:] = [saved for saved in node if saved not in unasked]
        for saved in node:
            tape.unpack(saved)
            if dice.random() < 0.2:
                tape.unpack(saved)
        inputs = [gradient, *(tape.saved[saved][0] for saved in node)]
        gradient = tape.op(
            inputs,
            [dice.randrange(0, 6) * 16 * KIB],
            seconds=dice.uniform(1e-4, 3e-3),
            replay="opaque",
            workspace=dice.choice([0, 0, 40 * KIB]),
            phase="backward",
        )[0]
    return tape.step()


def _forward_op(
    dice: random.Random, tape: Tape, live: list[int], parameters: list[int], statistics: int, frozen: set[int]
) -> tuple[list[int], int]:
    seconds, workspace = dice.uniform(1e-4, 3e-3), dice.choice([0, 0, 50 * KIB])
    inputs = [live[-1], *dice.sample(live, k=dice.choice([0, 1]))]
    sizes = [dice.randrange(0, 7) * 16 * KIB for _ in range(dice.choice([1, 1, 1, 2]))]
    kind = dice.random()
    fresh = [v for v in live if v not in parameters and tape.storage_of[v] not in frozen]
    if kind < 0.25 and fresh:
        target = fresh[-1]
        made = tape.op([target, *inputs], [], writes=target, seconds=seconds, replay="in_place", workspace=workspace)
        live[:] = [made[-1] if value == target else value for value in live]
        return made, statistics
    if kind < 0.4:
        made = tape.op([*inputs, statistics], sizes, writes=statistics, seconds=seconds, replay="batch_norm")
        live.append(made[0])
        return made[:-1], made[-1]
    replay: Replay = "random" if kind < 0.5 else "opaque" if kind < 0.55 else "pure"
    made = tape.op(inputs, sizes, seconds=seconds, replay=replay, workspace=workspace)
    live.append(made[0])
    return made, statistics


def tiny_step(seed: int, values: int, gradients: tuple[tuple[int, float], ...] = ()) -> Step:
    """``values`` values and their absences around one turn; sizes and times vary, some values cannot be made again.

    ``gradients``: bytes and seconds of further gradients, each made of the former, before the first value is wanted.
    """
    tape = Tape()
    value = tape.external(64 * KIB)
    numbers = []
    for place in range(values):
        seconds = 1e-3 * (1 + (seed * 7 + place * 3) % 5)
        size = 64 * KIB * (1 + (seed + place * place) % 4)
        value = tape.op([value], [size], seconds=seconds, replay="opaque" if (seed + place) % 3 == 0 else "pure")[0]
        numbers.append(tape.pack(value))
    gradient = tape.op([value], [KIB], seconds=1e-3, replay="opaque")[0]
    for size, seconds in gradients:
        tape.pack(gradient)
        gradient = tape.op([gradient], [size], seconds=seconds, replay="opaque")[0]
    for number in reversed(numbers):
        tape.unpack(number)
        gradient = tape.op([gradient, tape.saved[number][0]], [64 * KIB], seconds=3e-3, phase="backward")[0]
    return tape.step()


def network_step(
    layers: int, *, size_bytes: int = 4 * MIB, seconds: float = 8e-3, weight_bytes: int = MIB, seed: int = 0
) -> Step:
    """A convolutional network: per layer a dear convolution, batch norm, in-place ReLU; sizes fall, times vary."""
    dice = random.Random(seed)
    tape = Tape()
    value = tape.external(size_bytes)
    nodes: list[tuple[list[int], float, int]] = []
    for layer in range(layers):
        size = max(64 * KIB, size_bytes >> (3 * layer // layers))
        weight, statistics = tape.external(weight_bytes), tape.external(KIB)
        dear, cheap = seconds * dice.uniform(0.5, 1.5), seconds * 0.06 * size / size_bytes + 1e-5
        before = value
        value = tape.op([before, weight], [size], seconds=dear, workspace=size // 4, name="aten.convolution.default")[0]
        nodes.append(([tape.pack(before), tape.pack(weight)], 2 * dear, size))
        before = value
        made = tape.op([before, statistics], [size, KIB], writes=statistics, seconds=cheap, replay="batch_norm")
        nodes.append(([tape.pack(before), tape.pack(made[1])], 2 * cheap, size))
        value = tape.op([made[0]], [], writes=made[0], seconds=cheap / 2, replay="in_place", name="aten.relu_.default")[
            0
        ]
        nodes.append(([tape.pack(value)], cheap, size))
    gradient = tape.op([value], [KIB], seconds=1e-4, phase="backward")[0]
    for saved, duration, size in reversed(nodes):
        for number in saved:
            tape.unpack(number)
        inputs = [gradient, *(tape.saved[number][0] for number in saved)]
        gradient = tape.op(
            inputs, [size], seconds=duration, replay="opaque", workspace=size // 4, phase="backward", name="aten.back"
        )[0]
    return tape.step()
