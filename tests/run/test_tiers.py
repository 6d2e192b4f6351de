"""The tiers: what goes out comes back bit for bit, and every fault is reported without losing anything else."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import random
import signal
import subprocess
import sys
import textwrap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.errors import SpillError
from ebbtide.run.allocator import trim
from ebbtide.run.tiers import DiskTier, HostTier, QueuedTier
from ebbtide.run.tiers import base as base_module
from ebbtide.run.tiers.base import PART_BYTES
from ebbtide.run.tiers.disk import Places, open_unlinked, switch_to_direct
from ebbtide.run.tiers.memory import take_memory

MIB = 1 << 20
Tiers = list[QueuedTier]


def storage_of(size_bytes: int, seed: int = 0, offset_bytes: int = 0) -> torch.UntypedStorage:
    storage = take_memory(size_bytes, offset_bytes)
    if size_bytes:
        ctypes.memmove(storage.data_ptr(), random.Random(seed).randbytes(size_bytes), size_bytes)
    return storage


def bytes_of(storage: torch.UntypedStorage) -> bytes:
    return ctypes.string_at(storage.data_ptr(), storage.nbytes()) if storage.nbytes() else b""


@pytest.fixture(params=["disk", "disk-checksum", "disk-ram", "host"])
def tier(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[QueuedTier]:
    made: QueuedTier
    match request.param:
        case "disk":
            made = DiskTier(tmp_path)
        case "disk-checksum":
            made = DiskTier(tmp_path, checksum=True)
        case "disk-ram":
            with pytest.warns(UserWarning, match="is in RAM"):
                made = DiskTier("/dev/shm")
        case _:
            made = HostTier()
    yield made
    made.close()


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[DiskTier]:
    with contextlib.closing(DiskTier(tmp_path)) as made:
        yield made


class Gate:
    """Stands in for a system call of a tier: holds it back until opened, then lets it through."""

    def __init__(self, tier: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        self.entered = threading.Event()
        self.open = threading.Event()
        real = getattr(tier, call)

        def held(fd: int, view: memoryview, offset_bytes: int) -> int:
            self.entered.set()
            assert self.open.wait(20)
            return int(real(fd, view, offset_bytes))

        monkeypatch.setattr(tier, call, held)


def failing(code: int) -> Callable[[int, memoryview, int], int]:
    def fail(fd: int, view: memoryview, offset_bytes: int) -> int:
        raise OSError(code, os.strerror(code))

    return fail


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
        storage = storage_of(2 * PART_BYTES + 12_345, offset_bytes=64)
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

        class Watch(TorchDispatchMode):
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
        storage = storage_of(3 * PART_BYTES)
        gone = weakref.ref(storage)
        slot = tier.write(storage)
        slot.wait()
        assert slot.unwritten is None
        del storage
        assert gone() is None

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

    def test_no_memory_is_an_error(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = disk.write(storage_of(5000))

        def refuse(*_: int) -> torch.UntypedStorage:
            raise OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))

        monkeypatch.setattr(base_module, "take_memory", refuse)
        with pytest.raises(SpillError, match=r"no RAM to bring 4\.88 KiB back"):
            disk.read(slot)

    def test_storages_elsewhere_are_refused(self, tier: QueuedTier) -> None:
        with pytest.raises(SpillError, match="takes storages in RAM, not on meta"):
            tier.write(torch.empty(3, device="meta").untyped_storage())


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


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
        gate = Gate(disk, monkeypatch, "_pwrite")
        slot = disk.write(storage_of(2 * PART_BYTES))
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
        gate = Gate(disk, monkeypatch, "_preadv")
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
        gate = Gate(disk, monkeypatch, "_pwrite")
        slot = disk.write(storage := storage_of(50_000))
        load = disk.read(slot)
        disk.free(slot)
        gate.open.set()
        assert bytes_of(load.wait()) == bytes_of(storage)

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


class TestFaults:
    def test_disk_full(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "_pwrite", failing(errno.ENOSPC))
        storage = storage_of(3 * MIB)
        slot = disk.write(storage)
        with pytest.raises(SpillError, match=r"is full.*a tensor of 3\.00 MiB.* are free; free some space") as caught:
            slot.wait()
        assert str(disk.directory) in str(caught.value)
        assert not slot.written
        assert slot.unwritten is storage
        with pytest.raises(SpillError, match="is full"):
            disk.read(slot).wait()
        monkeypatch.undo()
        disk.free(slot)
        assert bytes_of(disk.read(disk.write(storage)).wait()) == bytes_of(storage)
        assert disk.places_in_use == 1

    def test_a_fault_in_one_of_many_parts(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = disk.write(storage_of(4 * PART_BYTES))
        slot.wait()
        real, calls = disk._preadv, iter(range(100))

        def third(fd: int, view: memoryview, offset_bytes: int) -> int:
            if next(calls) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, view, offset_bytes)

        monkeypatch.setattr(disk, "_preadv", third)
        with pytest.raises(SpillError, match=r"reading a tensor of 32\.0 MiB .* failed: Input/output error"):
            disk.read(slot).wait()
        disk.read(slot).wait()

    def test_error_while_writing_reaches_a_read_that_waits(
        self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = Gate(disk, monkeypatch, "_pwrite")
        slot = disk.write(storage_of(50_000))
        load = disk.read(slot)
        gate.open.set()
        load.wait()
        monkeypatch.setattr(disk, "_pwrite", failing(errno.EIO))
        with pytest.raises(SpillError, match="writing a tensor of"):
            disk.read(disk.write(storage_of(50_000))).wait()

    @pytest.mark.parametrize("call", ["_pwrite", "_preadv"])
    @pytest.mark.parametrize("most", [4096, 5000, 70_000])
    def test_short_transfers_go_on(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str, most: int) -> None:
        real = getattr(disk, call)
        monkeypatch.setattr(
            disk, call, lambda fd, view, offset: min(real(fd, view[: max(512, most // 512 * 512)], offset), most)
        )
        storage = storage_of(300_123)
        assert bytes_of(disk.read(disk.write(storage)).wait()) == bytes_of(storage)

    @pytest.mark.parametrize("call", ["_pwrite", "_preadv"])
    def test_no_progress_is_an_error(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch, call: str) -> None:
        monkeypatch.setattr(disk, call, lambda fd, view, offset: 0)
        with pytest.raises(SpillError, match=r"only 0 of \d+ bytes could be moved"):
            disk.read(disk.write(storage_of(8192))).wait()

    def test_file_cut_short(self, disk: DiskTier) -> None:
        slot = disk.write(storage_of(65_536))
        slot.wait()
        os.ftruncate(disk._fd, 16_384)
        with pytest.raises(SpillError, match="only 16384 of 65536 bytes could be moved"):
            disk.read(slot).wait()

    def test_checksum(self, tmp_path: Path) -> None:
        with contextlib.closing(DiskTier(tmp_path, checksum=True)) as disk:
            slot = disk.write(storage_of(65_536))
            slot.wait()
            ctypes.memmove((page := take_memory(4096)).data_ptr(), bytes(4096), 4096)
            os.pwrite(disk._fd, (ctypes.c_char * 4096).from_address(page.data_ptr()), 4096)
            with pytest.raises(SpillError, match=r"came back from .* other than they were written"):
                disk.read(slot).wait()

    def test_faults_hold_no_storage(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = disk.write(storage_of(8192))
        monkeypatch.setattr(disk, "_preadv", failing(errno.EIO))
        load = disk.read(slot)
        gone = weakref.ref(load)
        for _ in range(2):
            with pytest.raises(SpillError, match="Input/output error"):
                load.wait()
        del load
        gc.collect()
        assert gone() is None

    def test_an_interrupt_leaves_nothing_to_wait_for(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        real, calls = disk._writer.submit, iter(range(100))

        def interrupted(job: Callable[[bool], None]) -> None:
            if next(calls) == 1:
                raise KeyboardInterrupt
            real(job)

        monkeypatch.setattr(disk._writer, "submit", interrupted)
        with pytest.raises(KeyboardInterrupt):
            disk.write(storage_of(3 * PART_BYTES))
        disk.drain()
        storage = storage_of(3 * PART_BYTES, seed=1)
        assert bytes_of(disk.read(disk.write(storage)).wait()) == bytes_of(storage)

    def test_drain_raises_nothing(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "_pwrite", failing(errno.EIO))
        disk.write(storage_of(8192))
        disk.drain()


class TestDirectory:
    def test_missing(self, tmp_path: Path) -> None:
        with pytest.raises(SpillError, match="nowhere does not exist; make it, or choose another"):
            DiskTier(tmp_path / "nowhere")

    def test_a_file(self, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        with pytest.raises(SpillError, match="file is not a directory"):
            DiskTier(tmp_path / "file")
        with pytest.raises(SpillError, match="does not exist"):
            DiskTier(tmp_path / "file" / "below")

    def test_not_writable(self) -> None:
        with pytest.raises(SpillError, match=r"/proc is not writable \(.*\); choose another"):
            DiskTier("/proc")

    def test_full_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = open_files()
        monkeypatch.setattr(os, "pwrite", lambda *_: failing(errno.ENOSPC)(0, memoryview(b""), 0))
        with pytest.raises(SpillError, match="cannot be used: No space left"):
            DiskTier(tmp_path)
        assert open_files() == before

    def test_leaves_no_name(self, tmp_path: Path) -> None:
        with contextlib.closing(DiskTier(tmp_path)) as disk:
            disk.write(storage_of(10_000)).wait()
            assert list(tmp_path.iterdir()) == []
            assert os.fstat(disk._fd).st_mode & 0o777 == 0o600

    def test_without_unnamed_files(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        real = os.open

        def refuse(path: Any, flags: int, *rest: Any, **named: Any) -> int:
            if flags & os.O_TMPFILE == os.O_TMPFILE:
                raise OSError(errno.EOPNOTSUPP, os.strerror(errno.EOPNOTSUPP))
            return real(path, flags, *rest, **named)

        monkeypatch.setattr(os, "open", refuse)
        fd = open_unlinked(tmp_path)
        state = os.fstat(fd)
        os.close(fd)
        assert list(tmp_path.iterdir()) == []
        assert (state.st_nlink, state.st_mode & 0o777) == (0, 0o600)

    @pytest.mark.parametrize("offered", [4096, 1])
    def test_other_blocks(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, offered: int) -> None:
        real = os.pwrite

        def only(fd: int, view: memoryview, offset: int) -> int:
            if offset % offered or offered == 1:
                raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
            return real(fd, view, offset)

        monkeypatch.setattr(os, "pwrite", only)
        fd = open_unlinked(tmp_path)
        assert switch_to_direct(fd) == offered
        assert bool(fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT) == (offered > 1)
        os.close(fd)
        disk = DiskTier(tmp_path)
        monkeypatch.undo()
        with contextlib.closing(disk):
            for offset in (0, 64, 4032):
                storage = storage_of(3 * 4096 + 17, offset_bytes=offset)
                back = disk.read(disk.write(storage)).wait()
                assert bytes_of(back) == bytes_of(storage)
                assert (back.data_ptr() - storage.data_ptr()) % max(offered, 512) == 0


class TestEnd:
    def test_nothing_is_left(self, tmp_path: Path) -> None:
        files, threads = open_files(), threading.active_count()
        for make in (lambda: DiskTier(tmp_path), HostTier):
            tier: QueuedTier = make()
            tier.read(tier.write(storage_of(100_000))).wait()
            tier.close()
            tier.close()
        assert (open_files(), threading.active_count()) == (files, threads)

    def test_a_tier_that_is_dropped_ends_itself(self, tmp_path: Path) -> None:
        files, threads = open_files(), threading.active_count()
        tier = DiskTier(tmp_path)
        tier.read(tier.write(storage_of(100_000))).wait()
        tier.drain()
        del tier
        deadline = time.monotonic() + 5
        while (open_files(), threading.active_count()) != (files, threads) and time.monotonic() < deadline:
            gc.collect()
        assert (open_files(), threading.active_count()) == (files, threads)

    def test_closed(self, tier: QueuedTier) -> None:
        slot = tier.write(storage_of(5000))
        slot.wait()
        tier.close()
        with pytest.raises(SpillError, match="is closed"):
            tier.write(storage_of(5000))
        with pytest.raises(SpillError, match="is closed"):
            tier.read(slot)
        tier.free(slot)
        tier.drain()
        assert tier.places_in_use == 0

    def test_what_has_not_started_fails(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        gate = Gate(disk, monkeypatch, "_pwrite")
        slots = [disk.write(storage_of(50_000)) for _ in range(3)]
        load = disk.read(slots[2])
        assert gate.entered.wait(20)
        closer = threading.Thread(target=disk.close)
        closer.start()
        while not disk._writer._closing:
            time.sleep(0.001)
        gate.open.set()
        closer.join(20)
        slots[0].wait()
        for waitable in (slots[1], slots[2], load):
            with pytest.raises(SpillError, match="closed before a transfer ended"):
                waitable.wait()

    def test_the_interpreter_ends(self, tmp_path: Path) -> None:
        script = """
            import sys, torch
            from ebbtide.run.tiers import DiskTier
            tier = DiskTier(sys.argv[1])
            slots = [tier.write(torch.zeros(8 << 20, dtype=torch.uint8).untyped_storage()) for _ in range(8)]
            loads = [tier.read(slot) for slot in slots]
        """
        subprocess.run([sys.executable, "-c", textwrap.dedent(script), str(tmp_path)], check=True, timeout=60)


def open_files() -> int:
    return len(os.listdir("/proc/self/fd"))


def in_child(action: Callable[[], None]) -> None:
    """Run ``action`` in a forked child and check that it returned."""
    child = os.fork()
    if child == 0:
        signal.alarm(20)  # a child that hangs is killed
        try:
            action()
            os._exit(0)
        except BaseException as fault:
            os.write(2, repr(fault).encode())
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
class TestFork:
    def test_a_child_is_refused(self, tier: QueuedTier) -> None:
        slot = tier.write(storage_of(50_000))
        load = tier.read(slot)
        load.wait()

        def child() -> None:
            with pytest.raises(SpillError, match="made in another process"):
                tier.write(storage_of(10))
            with pytest.raises(SpillError, match="made in another process"):
                tier.read(slot)
            slot.wait()
            load.wait()
            tier.free(slot)
            tier.drain()
            tier.close()

        in_child(child)
        assert bytes_of(tier.read(slot).wait()) == bytes_of(storage_of(50_000))
        assert tier.places_in_use == 1

    def test_a_child_closes_its_copy_of_the_file(self, disk: DiskTier) -> None:
        def child() -> None:
            with pytest.raises(OSError, match="Bad file descriptor"):
                os.fstat(disk._fd)

        in_child(child)
        os.fstat(disk._fd)

    def test_a_child_can_make_its_own(self, disk: DiskTier) -> None:
        disk.write(storage_of(50_000)).wait()

        def child() -> None:
            with contextlib.closing(DiskTier(disk.directory)) as own:
                assert bytes_of(own.read(own.write(storage_of(9000))).wait()) == bytes_of(storage_of(9000))

        in_child(child)

    def test_waiting_for_the_parent_is_an_error(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        real, entered = disk._pwrite, threading.Event()

        def slow(fd: int, view: memoryview, offset_bytes: int) -> int:
            entered.set()
            time.sleep(0.05)
            return real(fd, view, offset_bytes)

        monkeypatch.setattr(disk, "_pwrite", slow)
        slots = [disk.write(storage_of(50_000)) for _ in range(4)]
        assert entered.wait(20)

        def child() -> None:
            with pytest.raises(SpillError, match="made in another process"):
                slots[-1].wait()

        in_child(child)
        slots[-1].wait()

    def test_forks_amid_reads_change_nothing(self, disk: DiskTier) -> None:
        storage = storage_of(2 * PART_BYTES)
        slot = disk.write(storage)
        expected = bytes_of(storage)
        for _ in range(5):
            load = disk.read(slot)
            in_child(lambda: None)
            assert bytes_of(load.wait()) == expected


class TestPinned:
    def test_buffers_are_pinned_and_unpinned(self, monkeypatch: pytest.MonkeyPatch) -> None:
        pinned: dict[int, int] = {}

        class Runtime:
            def cudaHostRegister(self, pointer: int, size_bytes: int, flags: int) -> int:  # noqa: N802
                pinned[pointer] = size_bytes
                return 0

            def cudaHostUnregister(self, pointer: int) -> int:  # noqa: N802
                del pinned[pointer]
                return 0

        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "cudart", Runtime)
        monkeypatch.setattr(torch.cuda, "check_error", lambda code: None)
        host = HostTier()
        first, _, empty = (host.write(storage_of(size)) for size in (5000, 6000, 0))
        assert sorted(pinned.values()) == [5000, 6000]
        host.drain()
        host.free(first)
        host.free(empty)
        host.drain()
        assert list(pinned.values()) == [6000]
        host.close()
        assert not pinned
