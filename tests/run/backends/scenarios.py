"""What programs do on a device, in the order in which a conductor does it; each once went wrong somewhere."""

from __future__ import annotations

import random
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch

from ebbtide.run.holdings import Holding, View, view_of
from ebbtide.run.recipes import Recipe
from ebbtide.run.tiers import Load, Slot, SlowTier


class Rig(Protocol):
    """A device and its kernels, as in `tests.run.backends.rig`: of threads, or a real one."""

    seed: int
    device: torch.device

    def new(self, number: int) -> torch.UntypedStorage: ...
    def fill(self, storage: torch.UntypedStorage, number: int) -> None: ...
    def look(self, storage: torch.UntypedStorage, number: int, where: str) -> None: ...
    def compute(self) -> Any: ...
    def new_stream(self, name: str) -> Any: ...
    def on(self, stream: Any) -> AbstractContextManager[None]: ...
    def order(self, before: Any, after: Any) -> None: ...


Scenario = Callable[[Any, SlowTier], None]


def sent_out(device: Rig, tier: SlowTier, number: int) -> tuple[torch.UntypedStorage, Slot]:
    """A new value, whose copy out was waited for. Only the caller holds it."""
    value = device.new(number)
    slot = tier.write(value)
    slot.wait()
    return value, slot


def away_and_back(device: Rig, tier: SlowTier) -> None:
    """A value leaves as soon as it is made, another takes its memory, it comes back and is used at once."""
    for number in range(0, 30, 10):
        value, slot = sent_out(device, tier, number)
        del value
        other = device.new(number + 1)
        back = tier.read(slot).wait()
        device.look(back, number, "used on arrival")
        device.look(other, number + 1, "took the memory")
        tier.free(slot)


def read_before_it_is_written(device: Rig, tier: SlowTier) -> None:
    """The way back is asked for before the copy out can be there."""
    value = device.new(1)
    slot = tier.write(value)
    load = tier.read(slot)
    device.look(load.wait(), 1, "read at once")
    tier.free(slot)


def memory_still_read(device: Rig, tier: SlowTier) -> None:
    """What comes back gets memory that a kernel is still reading for its former owner."""
    _value, slot = sent_out(device, tier, 1)
    for number in range(2, 6):
        former = device.new(number)
        device.look(former, number, "former owner")
        del former
        load = tier.read(slot)
        device.look(load.wait(), 1, "came back")
        del load
    tier.free(slot)


def written_in_place(device: Rig, tier: SlowTier) -> None:
    """Once the copy out was waited for, somebody who still holds the value writes over it."""
    for number in range(0, 30, 10):
        value, slot = sent_out(device, tier, number)
        device.fill(value, number + 1)
        device.look(tier.read(slot).wait(), number, "came back after an in-place op")
        tier.free(slot)


def given_up(device: Rig, tier: SlowTier) -> None:
    """A value is asked back, and then its graph is dropped without a backward pass."""
    for number in range(0, 30, 10):
        value, slot = sent_out(device, tier, number)
        del value
        load = tier.read(slot)
        tier.free(slot)
        del load, slot
        following = tier.write(device.new(number + 1))
        kept = [device.new(number + 2 + index) for index in range(3)]
        for index, storage in enumerate(kept):
            device.look(storage, number + 2 + index, "took the memory of what was given up")
        device.look(tier.read(following).wait(), number + 1, "written after it")
        tier.free(following)


def place_used_again(device: Rig, tier: SlowTier) -> None:
    """A slot is freed while it is read, and the next copy out gets its place."""
    for number in range(0, 40, 10):
        _value, slot = sent_out(device, tier, number)
        load = tier.read(slot)
        storage = load.wait()
        tier.free(slot)
        following = tier.write(device.new(number + 1))
        device.look(storage, number, "read while its place was given away")
        device.look(tier.read(following).wait(), number + 1, "came to the place")
        tier.free(following)


def other_stream_lets_go(device: Rig, tier: SlowTier) -> None:
    """A value of one compute stream leaves while another is current; the first goes on and takes its memory."""
    side = device.new_stream("side")
    for number in range(0, 30, 10):
        value = device.new(number)
        warm = tier.write(value)
        device.order(device.compute(), side)
        with device.on(side):
            slot = tier.write(value)
            slot.wait()
        warm.wait()
        del value
        other = device.new(number + 1)
        device.look(other, number + 1, "took the memory")
        device.look(tier.read(slot).wait(), number, "came back")
        tier.free(slot)
        tier.free(warm)


def other_stream_copies(device: Rig, tier: SlowTier) -> None:
    """A value is made on one compute stream, which saves it and has asked for no transfer, and leaves while another is
    current, which is not behind the first; the first goes on and takes its memory."""
    side = device.new_stream("side")
    for number in range(0, 30, 10):
        with device.on(side):
            value = device.new(number)
            tier.expect(device.device)
        slot = tier.write(value)
        slot.wait()
        del value
        with device.on(side):
            device.look(device.new(number + 1), number + 1, "took the memory")
        device.look(tier.read(slot).wait(), number, "came back")
        tier.free(slot)
    device.order(side, device.compute())


def other_stream_uses(device: Rig, tier: SlowTier) -> None:
    """A value is asked back while one compute stream is current, and used on another; the first goes on."""
    side = device.new_stream("side")
    for number in range(0, 30, 10):
        _value, slot = sent_out(device, tier, number)
        load = tier.read(slot)
        with device.on(side):
            back = load.wait()
            device.look(back, number, "used on another stream")
        tier.free(slot)
        del load, back, slot
        for index in range(3):
            device.new(number + 1 + index)
    device.order(side, device.compute())


def made(device: Rig, number: int) -> torch.Tensor:
    """A tensor that shows a new value."""
    storage = device.new(number)
    tensor = torch.empty(0, dtype=torch.uint8, device=storage.device)
    return tensor.set_(storage, 0, (storage.nbytes(),), (1,))


def saved(device: Rig, tier: SlowTier, number: int) -> tuple[Holding, View]:
    """A new value, as autograd is given it. Only the caller holds it."""
    tensor, holding = made(device, number), Holding()
    holding.fill(tensor)
    holding.streams = tier.expect(device.device)
    return holding, view_of(holding, tensor, 0)


def other_stream_reads(device: Rig, tier: SlowTier) -> None:
    """A value is let go of while another compute stream, which has saved it too, still reads it; the first, which waits
    for that one no earlier than before the backward pass, goes on."""
    side = device.new_stream("side")
    for number in range(0, 30, 10):
        holding, view = saved(device, tier, number)
        holding.send(tier)
        device.order(device.compute(), side)
        with device.on(side):
            tier.expect(device.device)
            device.look(view.show().untyped_storage(), number, "read on another stream")
        holding.release()
        for index in range(3):
            device.new(number + 1 + index)
        device.order(side, device.compute())
        device.look(view.show().untyped_storage(), number, "came back")
        del holding, view


def both_streams_ask(device: Rig, tier: SlowTier) -> None:
    """A value that two compute streams have saved is asked for on both, which do not wait for each other, after a third
    one asked it back; the one that had it first goes on."""
    sides = [device.new_stream("first"), device.new_stream("second")]
    for side in sides:
        with device.on(side):
            tier.expect(device.device)
    for number in range(0, 30, 10):
        holding, view = saved(device, tier, number)
        holding.send(tier)
        holding.release()
        for side in sides:
            device.order(device.compute(), side)
        holding.fetch()
        for side in sides:
            with device.on(side):
                device.look(view.show().untyped_storage(), number, "asked for on another stream")
        del holding, view
        with device.on(sides[0]):
            for index in range(3):
                device.new(number + 1 + index)
        for side in sides:
            device.order(side, device.compute())


class Again(Recipe):
    """Makes a value from the one before it."""

    def __init__(self, device: Rig, number: int, leaf: Holding) -> None:
        super().__init__(number, [], {number - 1: leaf}, (number - 1,))
        self.device = device

    def _run_all(self, values: dict[int, torch.Tensor]) -> None:
        leaf = self.leaves[self.target - 1].tensor
        assert leaf is not None
        self.device.look(leaf.untyped_storage(), self.target - 1, "read to make another value again")
        values[self.target] = made(self.device, self.target)


def made_again(device: Rig, tier: SlowTier) -> None:
    """A value is dropped while one of two other compute streams that have saved it still reads it. Both ask for it, and
    do not wait for each other; the streams to which what it was made from belongs, and it itself, go on."""
    sides = [device.new_stream("first"), device.new_stream("second")]
    for number in range(0, 30, 10):
        leaf, _ = saved(device, tier, number)
        holding, view = saved(device, tier, number + 1)
        for side in sides:
            device.order(device.compute(), side)
            with device.on(side):
                tier.expect(device.device)
                device.look(view.show().untyped_storage(), number + 1, "read on another stream")
        holding.drop(Again(device, number + 1, leaf))
        del leaf
        device.new(number + 2)
        for side in sides:
            device.order(side, device.compute())
            device.order(device.compute(), side)
            with device.on(side):
                device.look(view.show().untyped_storage(), number + 1, "asked for on another stream")
        del holding, view
        device.new(number + 2)
        with device.on(sides[0]):
            for index in range(3):
                device.new(number + 3 + index)
        for side in sides:
            device.order(side, device.compute())


def at_random(device: Rig, tier: SlowTier) -> None:
    """Values come, go, return, are written over and given up, in an order that the seed of the device says."""
    dice = random.Random(device.seed)
    here: list[tuple[int, torch.UntypedStorage]] = []
    leaving: list[tuple[int, torch.UntypedStorage, Slot]] = []
    away: list[tuple[int, Slot]] = []
    coming: list[tuple[int, Slot, Load]] = []

    def some(pool: list[tuple]) -> tuple:  # type: ignore[type-arg]
        return pool.pop(dice.randrange(len(pool)))

    for number in range(60):
        match dice.randrange(8):
            case 0 | 1:
                here.append((number, device.new(number)))
            case 2 if here:
                what, storage = some(here)
                leaving.append((what, storage, tier.write(storage)))
            case 3 if leaving:
                what, storage, slot = some(leaving)
                slot.wait()
                if dice.random() < 0.3:
                    device.fill(storage, number)
                away.append((what, slot))
            case 4 if away:
                what, slot = some(away)
                coming.append((what, slot, tier.read(slot)))
            case 5 if coming:
                what, slot, load = some(coming)
                here.append((what, load.wait()))
                tier.free(slot)
            case 6 if here:
                what, storage = some(here)
                device.look(storage, what, "at random")
                if dice.random() < 0.5:
                    here.append((what, storage))
            case 7 if coming and dice.random() < 0.3:
                tier.free(some(coming)[1])
            case _:
                device.new(number)
    for what, slot in away:
        device.look(tier.read(slot).wait(), what, "at the end")
    for what, storage in here:
        device.look(storage, what, "at the end")


SCENARIOS: tuple[Scenario, ...] = (
    away_and_back,
    read_before_it_is_written,
    memory_still_read,
    written_in_place,
    given_up,
    place_used_again,
    other_stream_lets_go,
    other_stream_copies,
    other_stream_uses,
    other_stream_reads,
    both_streams_ask,
    made_again,
    at_random,
)
