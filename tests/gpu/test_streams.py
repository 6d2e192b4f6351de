"""The scenarios of `tests.run.backends` on a real device, where every kernel is made to take its time."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.run.backends.cuda import CudaBackend
from ebbtide.run.tiers import Arena, SlowTier, StagedTier, StreamTier, peer_memory, pinned_memory
from tests.run.backends.scenarios import SCENARIOS, Scenario

SIZE = 8 << 20
KERNEL_CYCLES = 2_000_000
"""About a millisecond: the host runs far ahead."""
SEEDS = 5


class Gpu(CudaBackend):
    """A CUDA device with kernels that are slow, by the seed."""

    def __init__(self, seed: int, index: int = 0) -> None:
        super().__init__(index)
        self.seed = seed
        self._dice = random.Random(seed)
        self._wrong: list[tuple[str, torch.Tensor]] = []

    def _pause(self) -> None:
        if self._dice.random() < 0.7:
            torch.cuda._sleep(self._dice.randrange(KERNEL_CYCLES))

    def new(self, number: int) -> torch.UntypedStorage:
        storage = self.allocate(SIZE, 0)
        self.fill(storage, number)
        return storage

    def fill(self, storage: torch.UntypedStorage, number: int) -> None:
        self._pause()
        _bytes(storage).fill_(number % 251)

    def look(self, storage: torch.UntypedStorage, number: int, where: str) -> None:
        self._pause()
        self._wrong.append((f"{where}: value {number} is not there", (_bytes(storage) != number % 251).any()))

    def on(self, stream: Any) -> Any:
        return torch.cuda.stream(stream)

    def order(self, before: Any, after: Any) -> None:
        after.wait_stream(before)

    @property
    def faults(self) -> list[str]:
        torch.cuda.synchronize(self.device)
        return [what for what, wrong in self._wrong if bool(wrong)]


def _bytes(storage: torch.UntypedStorage) -> torch.Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def host_tier(device: CudaBackend, overflow: SlowTier | None = None) -> StreamTier:
    return StreamTier(device, Arena(pinned_memory(device), 64 * SIZE, 64 * SIZE), overflow=overflow)


@pytest.fixture
def tier_of(tmp_path: Path) -> Iterator[Any]:
    made: list[SlowTier] = []

    def make(device: CudaBackend, kind: str) -> SlowTier:
        made.append(host_tier(device) if kind == "host" else StagedTier(tmp_path, device))
        return made[-1]

    yield make
    for tier in made:
        tier.close()


@pytest.mark.parametrize("kind", ["host", "staged"])
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_goes_wrong(scenario: Scenario, kind: str, tier_of: Any) -> None:
    tier = tier_of(CudaBackend(0), kind)
    for seed in range(SEEDS):
        device = Gpu(seed)
        scenario(device, tier)
        assert device.faults == [], f"seed {seed}"


def test_the_host_waits_for_nothing(tier_of: Any) -> None:
    device = Gpu(0)
    tier = tier_of(device, "host")
    before = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for number in range(10):
            if number >= 5:  # by now, no memory has to be asked for any more
                torch.cuda._sleep(50 * KERNEL_CYCLES)
            storage = device.new(number)
            slot = tier.write(storage)
            slot.wait()
            back = tier.read(slot).wait()
            tier.free(slot)
            if number >= 5:
                assert not device.compute().query(), "all of this was queued while the device was still busy"
        device.look(back, number, "at the end")
    finally:
        torch.cuda.set_sync_debug_mode(before)
    assert device.faults == []


def test_copies_run_beside_compute(tier_of: Any) -> None:
    """A value leaves, and comes back, while the compute stream sleeps all the time."""
    device = Gpu(0)
    tier = tier_of(device, "host")
    slot = tier.write(device.new(1))
    tier.free(slot)
    storage = device.new(2)
    torch.cuda.synchronize()
    for way in ("out", "back"):
        transfer = tier.write(storage) if way == "out" else tier.read(slot)
        if way == "out":
            slot = transfer
        copied = transfer.copied if way == "out" else transfer.arrived
        torch.cuda._sleep(200 * KERNEL_CYCLES)
        slept = device.compute().record_event()
        copied.synchronize()
        assert not slept.query(), f"the copy {way} waited for compute, or compute is quicker than a copy of 8 MiB"
        torch.cuda.synchronize()
    device.look(transfer.wait(), 2, "came back beside compute")
    tier.free(slot)
    assert device.faults == []


def test_memory_is_free_as_soon_as_it_is_let_go_of(tier_of: Any) -> None:
    device = Gpu(0)
    tier = tier_of(device, "host")
    slot = tier.write(device.new(1))
    before = torch.cuda.memory_allocated()
    slot.wait()
    assert torch.cuda.memory_allocated() == before - SIZE
    load = tier.read(slot)
    assert torch.cuda.memory_allocated() == before
    del load
    tier.free(slot)


def test_pinned_memory_is_pinned() -> None:
    memory = pinned_memory(CudaBackend(0))(4 << 20)
    assert torch.empty(0, dtype=torch.uint8).set_(memory).is_pinned()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="one device only")
@pytest.mark.parametrize("scenario", SCENARIOS)
def test_a_peer_as_slower_memory(scenario: Scenario) -> None:
    tier = StreamTier(CudaBackend(0), Arena(peer_memory(CudaBackend(1)), 64 * SIZE, 64 * SIZE), kind="device")
    device = Gpu(0)
    scenario(device, tier)
    assert device.faults == []
    tier.close()
