"""What goes out comes back bit for bit; memory and places are given back when they should be."""

from __future__ import annotations

import contextlib
import errno
import gc
import os
import random
import threading
import time
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch

from ebbtide.errors import SpillError
from ebbtide.observe.mode import DispatchMode
from ebbtide.run.allocator import set_default, set_exact, trim
from ebbtide.run.holdings import Holding, view_of
from ebbtide.run.tiers import DiskTier, QueuedTier
from ebbtide.run.tiers import queued as queued_module
from ebbtide.run.tiers.places import Places
from ebbtide.run.tiers.transfers import Slot, Transfer
from tests.run.tiers.stand_ins import MIB, HeldCall, bytes_of, resident_bytes, storage_of


def wait_for_places(tier: QueuedTier, count: int) -> None:
    """Wait until so many are in use: a worker lets go of a transfer only after it has ended."""
    deadline = time.monotonic() + 20
    while tier.places_in_use != count:
        assert time.monotonic() < deadline, "places on the disk are left"
        time.sleep(0.001)


class TestRoundTrip:
    @pytest.mark.parametrize("size", [0, 1, 63, 511, 512, 513, 1023, 1024, 4095, 4096, 4097, 100_003, 5 * MIB + 7])
    def test_sizes(self, tier: QueuedTier, size: int) -> None:
        storage = storage_of(size)
        slot = tier.write(storage)
        slot.wait()
        back = tier.read(slot).wait()
        assert slot.written
        assert back.nbytes() == size
        assert bytes_of(back) == bytes_of(storage)
        assert size == 0 or back.data_ptr() != storage.data_ptr()

    def test_every_alignment_is_kept(self, tier: QueuedTier) -> None:
        for offset in range(0, 512, 64):
            for size in (64, 1000, 4096, 70_001):
                storage = storage_of(size, seed=offset + size, offset_bytes=offset)
                back = tier.read(tier.write(storage)).wait()
                assert back.data_ptr() % 512 == storage.data_ptr() % 512
                assert bytes_of(back) == bytes_of(storage)

    def test_transfers_in_many_parts(self, tier: QueuedTier) -> None:
        storage = storage_of(2 * DiskTier.part_bytes + 12_345, offset_bytes=64)
        assert bytes_of(tier.read(tier.write(storage)).wait()) == bytes_of(storage)

    def test_memory_of_torch(self, tier: QueuedTier) -> None:
        tensor = torch.arange(300_000, dtype=torch.float64)
        back = tier.read(tier.write(tensor.untyped_storage())).wait()
        again = torch.empty(0, dtype=torch.float64).set_(back, 0, tensor.shape, tensor.stride())
        assert torch.equal(again, tensor)

    @pytest.mark.parametrize("dtype", [torch.bfloat16, torch.bool, torch.complex64, torch.int64])
    def test_memory_that_comes_back_serves_any_dtype(self, disk: DiskTier, dtype: torch.dtype) -> None:
        tensor = torch.ones(24, 10, dtype=dtype)
        back = disk.read(disk.write(tensor.untyped_storage())).wait()
        again = torch.empty(0, dtype=dtype).set_(back, 10, (11, 10), (10, 1))
        assert torch.equal(again.add_(again), tensor[1:12] + tensor[1:12])

    def test_a_slot_can_be_read_twice(self, tier: QueuedTier) -> None:
        slot = tier.write(storage := storage_of(9000))
        first, second = tier.read(slot), tier.read(slot)
        assert bytes_of(first.wait()) == bytes_of(second.wait()) == bytes_of(storage)

    def test_into_given_memory(self, tier: QueuedTier) -> None:
        slot = tier.write(storage := storage_of(70_001))
        into = storage_of(70_001, seed=1)
        assert tier.read(slot, into).wait() is into
        assert bytes_of(into) == bytes_of(storage)
        for other in (storage_of(70_000), storage_of(70_001, offset_bytes=64)):
            with pytest.raises(SpillError, match="from elsewhere"):
                tier.read(slot, other)

    def test_no_dispatch_mode_sees_a_transfer(self, tier: QueuedTier) -> None:
        seen = []

        class Watch(DispatchMode):
            def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
                seen.append(func)
                return func(*args, **(kwargs or {}))

        storage = storage_of(10_000)
        with Watch():
            tier.read(tier.write(storage)).wait()
        assert not seen

    def test_many_threads(self, tier: QueuedTier) -> None:
        faults: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                dice = random.Random(seed)
                for turn in range(12):
                    storage = storage_of(dice.randrange(200_000), seed=100 * seed + turn, offset_bytes=64 * turn % 512)
                    slot = tier.write(storage)
                    load = tier.read(slot)
                    tier.free(slot)
                    assert bytes_of(load.wait()) == bytes_of(storage)
            except BaseException as fault:
                faults.append(fault)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        tier.drain()
        assert not faults
        assert tier.places_in_use == 0
        assert tier.written_bytes == tier.read_bytes > 0


class TestMemory:
    def test_written_storage_is_let_go(self, tier: QueuedTier) -> None:
        storage = storage_of(3 * DiskTier.part_bytes)
        gone = weakref.ref(storage)
        slot = tier.write(storage)
        slot.wait()
        assert slot.unwritten is None
        del storage
        assert gone() is None

    @pytest.mark.parametrize("checksum", [False, True])
    @pytest.mark.parametrize("own", ["arena", "mapping"])
    def test_storage_that_gets_other_memory_while_it_is_written(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, own: str, checksum: bool
    ) -> None:
        set_exact()  # each large tensor has a mapping of its own, which is gone when the tensor is
        numbers = torch.arange(3 * DiskTier.part_bytes // 4 + 5)
        tensor = numbers.clone()
        if own == "arena":
            tensor = (
                torch.empty(0, dtype=numbers.dtype).set_(storage_of(numbers.nbytes, offset_bytes=64)).copy_(numbers)
            )
        with contextlib.closing(DiskTier(tmp_path, checksum=checksum)) as disk:
            gate = HeldCall(disk, monkeypatch, "_pwrite")
            slot = disk.write(tensor.untyped_storage())
            early = disk.read(slot)
            assert gate.entered.wait(20)
            tensor.share_memory_()
            other = storage_of(numbers.nbytes, seed=1, offset_bytes=64)  # where the tensor lay
            gate.open.set()
            slot.wait()
            back = [torch.empty(0, dtype=numbers.dtype).set_(load.wait()) for load in (early, disk.read(slot))]
            assert all(torch.equal(one, numbers) for one in back)
            assert slot.unwritten is None
        del other
        set_default()

    def test_memory_that_came_back_goes_back_to_the_system(self, disk: DiskTier) -> None:
        slot = disk.write(storage_of(32 * MIB))
        load = disk.read(slot)
        storage = load.wait()
        tensor = torch.empty(0, dtype=torch.uint8).set_(storage)
        held = resident_bytes()
        del load, storage
        assert abs(resident_bytes() - held) < 4 * MIB
        del tensor
        trim()
        assert resident_bytes() < held - 28 * MIB

    def test_no_load_keeps_memory(self, disk: DiskTier) -> None:
        slot = disk.write(storage_of(8 * MIB))
        disk.read(slot).wait()
        before = resident_bytes()
        for _ in range(20):
            disk.read(slot).wait()
        assert resident_bytes() < before + 16 * MIB

    @pytest.mark.parametrize("early", [False, True])
    def test_a_worker_that_is_not_done_with_a_load_keeps_no_memory(
        self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch, early: bool
    ) -> None:
        """It may be put aside right after it has said that the copy is there: what came back counted longer, then."""
        settle, going_on = disk._settle, threading.Event()

        def settle_late(transfer: Transfer, slot: Slot) -> None:
            assert going_on.wait(20)
            settle(transfer, slot)  # type: ignore[arg-type]

        slot = disk.write(storage_of(50_000))
        if not early:
            slot.wait()
            disk.drain()
        monkeypatch.setattr(disk, "_settle", settle_late)
        memory = disk.read(slot).wait()
        gone = weakref.ref(memory)
        del memory
        try:
            assert gone() is None
        finally:
            going_on.set()

    def test_no_memory_is_an_error(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = disk.write(storage_of(5000))

        def refuse(*_: int) -> torch.UntypedStorage:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(queued_module, "take_memory", refuse)
        with pytest.raises(SpillError, match=r"no RAM to bring 4\.88 KiB back"):
            disk.read(slot)

    def test_storages_elsewhere_are_refused(self, tier: QueuedTier) -> None:
        with pytest.raises(SpillError, match="takes storages in RAM, not on meta"):
            tier.write(torch.empty(3, device="meta").untyped_storage())


class TestPlaces:
    def test_places_are_used_again(self, disk: DiskTier) -> None:
        for seed in range(30):
            slots = [disk.write(storage_of(10_000 * (1 + index), seed)) for index in range(4)]
            for slot in slots:
                disk.free(slot)
            disk.drain()
        assert disk.places_in_use == 0
        assert disk.file_bytes <= 4 * 10_000 * 4 + 4 * 4096

    def test_the_file_takes_no_more_than_it_needs(self, disk: DiskTier) -> None:
        slots = [disk.write(storage_of(MIB, seed)) for seed in range(4)]
        disk.drain()
        assert disk.file_bytes <= 4 * MIB + 4 * 4096
        disk.free(slots[1])
        disk.free(slots[2])
        disk.write(storage_of(2 * MIB)).wait()
        assert disk.file_bytes <= 4 * MIB + 4 * 4096

    def test_neighbours_become_one_gap(self) -> None:
        places = Places()
        offsets = [places.take(4096 * size) for size in (1, 2, 3, 1)]
        assert offsets == [0, 4096, 3 * 4096, 6 * 4096]
        places.give_back(offsets[0], 4096)
        places.give_back(offsets[2], 3 * 4096)
        places.give_back(offsets[1], 2 * 4096)
        assert places.take(6 * 4096) == 0
        assert places.end_bytes == 7 * 4096

    def test_the_best_gap_is_taken_and_the_last_one_grows(self) -> None:
        places = Places()
        offsets = [places.take(4096 * size) for size in (4, 1, 2, 1, 1)]
        for index, size in ((0, 4), (2, 2), (4, 1)):
            places.give_back(offsets[index], 4096 * size)
        assert places.take(2 * 4096) == offsets[2]
        assert places.take(9 * 4096) == offsets[4]
        assert places.end_bytes == offsets[4] + 9 * 4096

    def test_random_places_never_overlap(self) -> None:
        dice, places = random.Random(3), Places()
        taken: dict[int, int] = {}
        for _ in range(2000):
            if taken and dice.random() < 0.5:
                offset = dice.choice(list(taken))
                places.give_back(offset, taken.pop(offset))
            else:
                size = 4096 * dice.randint(1, 9)
                offset = places.take(size)
                assert all(offset + size <= other or other + length <= offset for other, length in taken.items())
                taken[offset] = size
        for offset, size in taken.items():
            places.give_back(offset, size)
        end_bytes = places.end_bytes
        assert places.take(end_bytes) == 0
        assert places.end_bytes == end_bytes


class TestFree:
    def test_an_interrupt_never_gives_a_place_back_twice(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(place: Any) -> None:
            release(place)
            raise KeyboardInterrupt

        release = disk._release
        slot = disk.write(storage_of(100_000))
        slot.wait()
        disk.drain()
        disk.free(slot)
        with monkeypatch.context() as patch:
            patch.setattr(disk, "_release", interrupted)
            with pytest.raises(KeyboardInterrupt):
                disk.drain()
        del slot
        disk.drain()
        first, second = disk.write(storage_of(100_000, seed=1)), disk.write(storage_of(100_000, seed=2))
        assert first.place.offset_bytes != second.place.offset_bytes

    def test_while_it_is_written(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = HeldCall(disk, monkeypatch, "_pwrite")
        slot = disk.write(storage_of(2 * DiskTier.part_bytes))
        assert gate.entered.wait(20)
        disk.free(slot)
        assert disk.places_in_use == 1
        gate.open.set()
        disk.drain()
        assert disk.places_in_use == 0
        slot.wait()
        assert slot.unwritten is None

    def test_while_it_is_read(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = disk.write(storage := storage_of(100_000))
        gate = HeldCall(disk, monkeypatch, "_preadv")
        load = disk.read(slot)
        assert gate.entered.wait(20)
        disk.free(slot)
        other = disk.write(storage_of(100_000, seed=1))
        other.wait()
        assert disk.places_in_use == 2
        assert not load.ready
        gate.open.set()
        assert bytes_of(load.wait()) == bytes_of(storage)
        disk.drain()
        assert disk.places_in_use == 1

    def test_a_read_that_waits_for_its_write_survives(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = HeldCall(disk, monkeypatch, "_pwrite")
        slot = disk.write(storage := storage_of(50_000))
        load = disk.read(slot)
        disk.free(slot)
        gate.open.set()
        assert bytes_of(load.wait()) == bytes_of(storage)

    def test_a_slot_that_dies_gives_its_place_back(self, disk: DiskTier) -> None:
        slot = disk.write(storage_of(100_000))
        slot.wait()
        with disk._lock:  # whoever lets go of it may hold the lock, or be the garbage collector
            del slot
        wait_for_places(disk, 0)
        slot = disk.write(storage := storage_of(100_000))
        load = disk.read(slot)
        del slot
        assert bytes_of(load.wait()) == bytes_of(storage)
        assert disk.places_in_use == 1, "the load shows the slot"
        del load
        wait_for_places(disk, 0)

    def test_what_a_holding_fetched_and_nobody_asked_for_goes_with_it(self, tier: QueuedTier) -> None:
        holding = Holding()
        holding.fill(torch.ones(4096))
        holding.send(tier)
        holding.release()
        holding.fetch()
        assert holding.load is not None
        memory = weakref.ref(holding.load.storage)
        gc.collect()
        gc.disable()  # memory of a device does not wait for it
        try:
            del holding
            wait_for_places(tier, 0)
            tier.drain()
            assert memory() is None
        finally:
            gc.enable()

    def test_who_writes_to_what_was_released_is_told(self, tier: QueuedTier) -> None:
        tensor, holding = torch.ones(4096), Holding()
        holding.fill(tensor)
        view = view_of(holding, tensor, 0)
        holding.send(tier)
        holding.release()
        assert holding.tensor is None
        assert torch.equal(view.show(), torch.ones(4096))
        tensor.zero_()
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            view.show()

    def test_what_no_holding_wants_is_not_written(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        holdings = [Holding() for _ in range(3)]
        store, stored = disk._store, []

        def note(slot: Slot, start: int, stop: int) -> None:
            stored.append(slot.size_bytes)
            store(slot, start, stop)

        monkeypatch.setattr(disk, "_store", note)
        gate = HeldCall(disk, monkeypatch, "_pwrite")
        for index, holding in enumerate(holdings):
            holding.fill(torch.zeros(4096 * (1 + index)))
            holding.send(disk)
        assert gate.entered.wait(20)
        del holding, holdings[:2]
        gate.open.set()
        disk.drain()
        assert stored == [16384, 3 * 16384]
        wait_for_places(disk, 1)

    def test_twice_is_once(self, tier: QueuedTier) -> None:
        slot = tier.write(storage_of(5000))
        tier.free(slot)
        tier.free(slot)
        tier.drain()
        assert tier.places_in_use == 0

    def test_reading_after_it_is_an_error(self, tier: QueuedTier) -> None:
        slot = tier.write(storage_of(5000))
        tier.free(slot)
        with pytest.raises(SpillError, match="read after it was freed"):
            tier.read(slot)

    def test_from_a_finalizer_while_the_lock_is_held(self, disk: DiskTier) -> None:
        slot = disk.write(storage_of(5000))
        slot.wait()
        with disk._lock:
            disk.free(slot)
        assert disk.places_in_use == 0
