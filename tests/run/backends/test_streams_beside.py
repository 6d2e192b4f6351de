"""Streams on which nothing is saved: their ops read, or make, what moves all the same."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

import ebbtide
from ebbtide.run.holdings import Holding, view_of
from ebbtide.run.tiers import Arena, SlowTier, StreamTier
from tests.run.backends.rig import Device, close, host_tier
from tests.run.backends.threads import InlineBackend, InlineStream
from tests.run.harness import FAST_DISK, Guard, Record
from tests.run.programs import Chain
from tests.run.tiers.stand_ins import MIB

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


def makes(device: Device, tier: SlowTier) -> None:
    """A side stream makes what another one saves, and then the next one, before the other is done with the former.

    One that only reads is `tests.run.backends.scenarios.other_stream_reads`.
    """
    side = device.new_stream("side")
    for number in range(0, 30, 10):
        with device.on(side):
            tier.expect(device.device)
            first = device.new(number)
        device.order(side, device.compute())
        tensor, holding = torch.empty(0, dtype=torch.uint8).set_(first, 0, (first.nbytes(),), (1,)), Holding()
        holding.fill(tensor)
        holding.streams = tier.expect(device.device)
        view = view_of(holding, tensor, 0)
        del first, tensor
        device.look(view.show().untyped_storage(), number, "used by the other stream")
        holding.send(tier)
        holding.release()
        with device.on(side):
            kept = [device.new(number + 1 + index) for index in range(3)]
        device.look(view.show().untyped_storage(), number, "used in the backward pass")
        device.order(device.compute(), side)
        del holding, view, kept


def test_a_stream_that_is_known_is_waited_for() -> None:
    for seed in range(10):
        device = Device(seed)
        tier = host_tier(device)
        makes(device, tier)
        assert close(device, tier) == []


class TwoStreams(InlineBackend):
    """Has another compute stream, which runs what it is given at once, too; counts what the two share."""

    def __init__(self) -> None:
        super().__init__(0)
        self.other, self.is_other, self.shared = InlineStream(), False, 0

    def compute(self) -> Any:
        return self.other if self.is_other else self._inline

    def used_on(self, storage: torch.UntypedStorage, stream: Any) -> None:
        self.shared += 1

    @contextlib.contextmanager
    def on_other(self) -> Iterator[None]:
        self.is_other = True
        try:
            yield
        finally:
            self.is_other = False


class Beside(Chain):
    """Norms of what the layers make are taken on another stream, of which nothing is saved."""

    backend: TwoStreams

    def loss(self, index: int) -> Tensor:
        x = self.data(index, 256, 64)
        for layer in self.model:
            x = layer(x)
            with self.backend.on_other():
                self.kept = {"norm": x.detach().float().norm()}
        return x.square().mean()


class Elsewhere(Chain):
    """All of the step runs on another stream than it is entered on."""

    backend: TwoStreams

    def compute(self, index: int, guard: Guard) -> Record:
        with guard(), self.backend.on_other():
            loss = self.loss(index)
            loss.backward()
        return {"loss": loss}


def after_steps(kind: type[Beside | Elsewhere], spill: Path) -> TwoStreams:
    """The device of some steps within a budget."""
    with TwoStreams() as backend, ebbtide.Budget("60%", spill=spill, machine=FAST_DISK) as memory:
        memory.tiers["disk"].close()
        memory.tiers["disk"] = StreamTier(backend, Arena(torch.UntypedStorage, 64 * MIB, 64 * MIB), name="disk")
        program = kind()
        program.backend = backend
        for index in range(8):
            program.run(index, memory.step)
        assert memory.state == "planned"
        return backend


def test_a_stream_on_which_nothing_is_saved_is_known(tmp_path: Path) -> None:
    backend = after_steps(Beside, tmp_path)
    assert backend.other in backend.streams._seen
    assert backend.shared > 0


def test_a_stream_that_is_current_between_steps_alone_shares_nothing(tmp_path: Path) -> None:
    """Memory that several streams share goes back late."""
    backend = after_steps(Elsewhere, tmp_path)
    assert list(backend.streams._seen) == [backend.other]
    assert backend.shared == 0
