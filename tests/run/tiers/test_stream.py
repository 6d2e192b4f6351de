"""Tiers of streams give back what they took; each device has tiers of its own."""

from __future__ import annotations

import gc
import os
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.errors import SpillError
from ebbtide.run.tiers import Arena, DeviceTiers, DiskTier, StagedTier, StreamTier, peer_memory
from ebbtide.run.tiers.pinned import PlannedPlaces
from ebbtide.run.tiers.stream import StreamSlot
from tests.run.backends.threads import InlineBackend, Temper
from tests.run.tiers.stand_ins import MIB, bytes_of, storage_of

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.fixture
def backend() -> Iterator[InlineBackend]:
    with InlineBackend(temper=Temper.LATE) as made:
        yield made


def tier_whose_memory_is_followed(backend: InlineBackend) -> tuple[StreamTier, list[weakref.ref[torch.UntypedStorage]]]:
    """A tier, and references to the pieces of memory that it takes."""
    memories: list[weakref.ref[torch.UntypedStorage]] = []

    def take(size_bytes: int) -> torch.UntypedStorage:
        memory = torch.UntypedStorage(size_bytes)
        memories.append(weakref.ref(memory))
        return memory

    return StreamTier(backend, Arena(take, MIB, MIB)), memories


def test_a_peer_without_room_takes_what_it_has_room_for(backend: InlineBackend, tmp_path: Path) -> None:
    """Something else may have taken its memory since it was asked how much is free."""

    class Full(InlineBackend):
        def allocate(self, size_bytes: int, like: int) -> torch.UntypedStorage:
            if size_bytes > 4 * MIB:
                raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 8.00 MiB.")
            return super().allocate(size_bytes, like)

    with Full() as peer:
        arena, disk = Arena(peer_memory(peer), 100 * MIB, 2 * MIB), StagedTier(tmp_path, backend)
        tier = StreamTier(backend, arena, kind="device", overflow=disk)
        tier.settle(PlannedPlaces((3 * MIB, 5 * MIB), (0, 3 * MIB), 8 * MIB))
        assert arena.size_bytes == arena.limit_bytes == 2 * MIB
        storage = storage_of(3 * MIB)
        assert bytes_of(tier.read(tier.write(storage)).wait()) == bytes_of(storage)
        assert disk.written_bytes == 3 * MIB
        tier.close()


def test_a_peer_leaves_host_memory_to_the_tier_behind_it(backend: InlineBackend) -> None:
    """Its slots are of the same class. Places that went back by the peer made each step wait for the device."""
    finished: list[Any] = []
    with InlineBackend() as peer:
        host = StreamTier(backend, Arena(torch.UntypedStorage, 8 * MIB, 8 * MIB))
        tier = StreamTier(backend, Arena(peer_memory(peer), MIB, MIB), kind="device", overflow=host)
        slots = [tier.write(storage_of(MIB // 2, seed)) for seed in range(6)]
        assert (tier.places_in_use, host.places_in_use) == (2, 4)
        for seed, slot in enumerate(slots):
            slot.wait()
            assert bytes_of(tier.read(slot).wait()) == bytes_of(storage_of(MIB // 2, seed))
            tier.free(slot)
        assert (tier.read_bytes, host.read_bytes) == (MIB, 2 * MIB)
        assert (tier.places_in_use, host.places_in_use) == (0, 0)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(backend, "finish", finished.append)
            tier.settle()
            host.settle()
        assert not finished
        tier.close()
        host.close()


def test_a_tier_that_nobody_closes_waits_for_its_copies(backend: InlineBackend) -> None:
    """Then its memory goes back: pinned memory must not go while the device still copies to it."""
    finished: list[Any] = []
    tier, memories = tier_whose_memory_is_followed(backend)
    tier.write(storage_of(1000)).wait()
    gone = weakref.ref(tier)

    def finish(stream: Any) -> None:
        assert memories[-1]() is not None
        finished.append(stream)
        real(stream)

    real = backend.finish
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(backend, "finish", finish)
        del tier
        gc.collect()
    assert gone() is None
    assert len(finished) == 2, "one stream out, one back"


class TestStreamTier:
    def test_the_host_waits_for_nothing(self, backend: InlineBackend) -> None:
        tier = StreamTier(backend, Arena(torch.UntypedStorage, MIB, MIB))
        slot = tier.write(storage_of(1000))
        written_at_once = slot.written
        slot.wait()
        assert slot.written
        assert not written_at_once
        tier.close()

    def test_a_copy_that_was_never_queued_is_not_there(self, backend: InlineBackend) -> None:
        tier = StreamTier(backend, Arena(torch.UntypedStorage, MIB, MIB))
        assert not StreamSlot(tier, storage_of(1000)).written
        tier.close()

    def test_places_are_given_back(self, backend: InlineBackend) -> None:
        tier = StreamTier(backend, Arena(torch.UntypedStorage, MIB, MIB))
        for seed in range(12):
            slot = tier.write(storage := storage_of(MIB // 2, seed))
            load = tier.read(slot)
            if seed % 3:
                assert bytes_of(load.wait()) == bytes_of(storage)
            if seed % 2:
                tier.free(slot)
            elif not seed % 3:
                del slot, load
                gc.collect()  # a slot that is being read and was never freed hangs in a cycle
        assert tier.places_in_use == 0
        tier.close()

    def test_a_full_tier_says_so(self, backend: InlineBackend) -> None:
        tier = StreamTier(backend, Arena(torch.UntypedStorage, MIB, MIB))
        slot = tier.write(storage_of(MIB))
        with pytest.raises(SpillError, match=r"no place for 1000 B \(it has 1\.00 MiB, and 1\.00 MiB at the most\)"):
            tier.write(storage_of(1000))
        tier.free(slot)
        tier.write(storage_of(1000)).wait()
        tier.close()

    def test_what_has_no_place_goes_behind(self, backend: InlineBackend, tmp_path: Path) -> None:
        disk = StagedTier(tmp_path, backend)
        tier = StreamTier(backend, Arena(torch.UntypedStorage, 10 * MIB), overflow=disk)
        storage = storage_of(MIB)
        for expected in (1, 1):
            slot = tier.write(storage)
            assert bytes_of(tier.read(slot).wait()) == bytes_of(storage)
            tier.free(slot)
            tier.drain()
            assert disk.written_bytes == expected * MIB
            tier.settle()
        tier.close()
        with pytest.raises(SpillError, match="closed"):
            tier.write(storage)
        with pytest.raises(SpillError, match="closed"):
            disk.write(storage)

    def test_memory_goes_back_with_the_tier(self, backend: InlineBackend) -> None:
        tier, memories = tier_whose_memory_is_followed(backend)
        slot = tier.write(storage_of(1000))
        tier.free(slot)
        tier.close()
        del slot
        assert memories[0]() is None

    @pytest.mark.parametrize("way", ["dies", "is freed", "is read"])
    def test_memory_goes_back_with_what_outlives_the_tier(self, backend: InlineBackend, way: str) -> None:
        """As the graph of a step in which something was raised does, whose traceback has it."""
        tier, memories = tier_whose_memory_is_followed(backend)
        slot = tier.write(storage_of(1000))
        load = tier.read(slot) if way == "is read" else None
        tier.close()
        assert memories[0]() is not None
        if way == "is freed":
            tier.free(slot)
        else:
            del slot, load
        gc.collect()
        assert memories[0]() is None
        assert tier.places_in_use == 0
        with pytest.raises(SpillError, match="closed"):
            tier.write(storage_of(1000))

    def test_not_in_another_process(self, backend: InlineBackend, monkeypatch: pytest.MonkeyPatch) -> None:
        tier = StreamTier(backend, Arena(torch.UntypedStorage, MIB, MIB))
        with monkeypatch.context() as patch:
            patch.setattr(os, "getpid", lambda: -1)
            with pytest.raises(SpillError, match="another process"):
                tier.write(storage_of(10))
        tier.close()


class TestDevices:
    def test_each_device_has_its_own_tier(self, tmp_path: Path) -> None:
        made: list[torch.device] = []

        def make(device: torch.device) -> DiskTier:
            made.append(device)
            return DiskTier(tmp_path)

        tiers = DeviceTiers("host", "host", make, lambda device: None)
        storage = storage_of(1000)
        slots = [tiers.write(storage) for _ in range(3)]
        with pytest.raises(SpillError, match="not on meta"):
            tiers.write(torch.empty(3, device="meta").untyped_storage())
        assert made == [torch.device("cpu"), torch.device("meta")]
        for slot in slots:
            assert bytes_of(tiers.read(slot).wait()) == bytes_of(storage)
            tiers.free(slot)
        tiers.drain()
        assert isinstance(cpu := tiers.of(torch.device("cpu")), DiskTier)
        assert cpu.places_in_use == 0
        tiers.close()
