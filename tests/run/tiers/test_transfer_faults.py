"""Every fault of a transfer or of a directory is reported, and nothing else is lost by it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import fcntl
import gc
import os
import resource
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import SpillError
from ebbtide.run.calibrate import machine_for
from ebbtide.run.tiers import DiskTier
from ebbtide.run.tiers import disk as disk_module
from ebbtide.run.tiers.disk import open_unlinked, switch_to_direct
from ebbtide.run.tiers.memory import take_memory
from ebbtide.run.tiers.transfers import Slot
from tests.conftest import open_files
from tests.run.tiers.stand_ins import MIB, HeldCall, bytes_of, failing, storage_of


def wait_for_end(slot: Slot) -> None:
    deadline = time.monotonic() + 20
    while not slot.finished.is_open:
        assert time.monotonic() < deadline, "nobody ends the transfer"
        time.sleep(0.001)


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
        slot = disk.write(storage)
        assert bytes_of(disk.read(slot).wait()) == bytes_of(storage)
        assert disk.places_in_use == 1

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            (
                errno.EDQUOT,
                r"your quota in spill directory .* is used up .* MiB failed; delete files of yours",
            ),
            (
                errno.EFBIG,
                r"the spill file in .* may not grow so far .File too large.*raise the limit .*`ulimit -f`",
            ),
            (errno.EROFS, r"writing a tensor of 3\.00 MiB in .* failed: Read-only file system; check that disk"),
            (errno.EINVAL, r"writing a tensor of 3\.00 MiB in .* failed: Invalid argument; check that disk"),
        ],
    )
    def test_what_the_system_refuses(
        self, code: int, expected: str, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(disk, "_pwrite", failing(code))
        slot = disk.write(storage_of(3 * MIB))
        with pytest.raises(SpillError, match=expected):
            slot.wait()

    def test_a_limit_within_a_block(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        """Direct I/O takes no part of a block: the system says that it was asked for something else than it was."""
        monkeypatch.setattr(disk, "_pwrite", failing(errno.EINVAL))
        monkeypatch.setattr(resource, "getrlimit", lambda _: (2 * MIB + 100, resource.RLIM_INFINITY))
        slot = disk.write(storage_of(3 * MIB))
        with pytest.raises(SpillError, match=r"may not grow so far \(File too large\)"):
            slot.wait()

    def test_disk_full_and_the_directory_gone(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        (tmp_path / "spill").mkdir()
        with contextlib.closing(DiskTier(tmp_path / "spill")) as disk:
            (tmp_path / "spill").rmdir()
            monkeypatch.setattr(disk, "_pwrite", failing(errno.ENOSPC))
            slot = disk.write(storage_of(8192))
            wait_for_end(slot)
            with pytest.raises(SpillError, match=r"is full.* are free; free some space"):
                slot.wait()

    @pytest.mark.parametrize("gone", ["free_bytes", "format_bytes"])
    def test_disk_full_and_nothing_to_be_said_of_it(
        self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch, gone: str
    ) -> None:
        """A disk behind a network may be gone: the transfer ends all the same."""

        def fail(_: int) -> int:
            raise OSError(errno.ESTALE, os.strerror(errno.ESTALE))

        monkeypatch.setattr(disk, "_pwrite", failing(errno.ENOSPC))
        monkeypatch.setattr(disk_module, gone, fail)
        slot = disk.write(storage_of(8192))
        wait_for_end(slot)
        with pytest.raises(SpillError, match=r"of 8\.00 KiB failed; free some space|moving 8\.00 KiB .*No space left"):
            slot.wait()

    def test_a_fault_in_one_of_many_parts(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        slot = disk.write(storage_of(4 * DiskTier.part_bytes))
        slot.wait()
        real, calls = disk._preadv, iter(range(100))

        def third(fd: int, view: memoryview, offset_bytes: int) -> int:
            if next(calls) == 2:
                raise OSError(errno.EIO, os.strerror(errno.EIO))
            return real(fd, view, offset_bytes)

        monkeypatch.setattr(disk, "_preadv", third)
        with pytest.raises(SpillError, match=r"reading a tensor of 128 MiB .* failed: Input/output error"):
            disk.read(slot).wait()
        disk.read(slot).wait()

    def test_error_while_writing_reaches_a_read_that_waits(
        self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        gate = HeldCall(disk, monkeypatch, "_pwrite")
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
            disk.write(storage_of(3 * DiskTier.part_bytes))
        disk.drain()
        storage = storage_of(3 * DiskTier.part_bytes, seed=1)
        assert bytes_of(disk.read(disk.write(storage)).wait()) == bytes_of(storage)

    @pytest.mark.parametrize("allowed", [0, 1])
    def test_threads_are_limited(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, allowed: int) -> None:
        real, storage = threading.Thread.start, storage_of(3 * DiskTier.part_bytes)
        with contextlib.closing(DiskTier(tmp_path)) as disk:
            slot = disk.write(storage)
            slot.wait()
            left = iter(range(allowed))

            def start(thread: threading.Thread) -> None:
                if next(left, None) is None:
                    raise RuntimeError("can't start new thread")
                real(thread)

            monkeypatch.setattr(threading.Thread, "start", start)
            if not allowed:
                for _ in range(2):
                    with pytest.raises(SpillError, match=r"no thread can be started to move tensors \(can't start"):
                        disk.read(slot)
                monkeypatch.undo()
            assert bytes_of(disk.read(slot).wait()) == bytes_of(storage)
        assert not [thread for thread in threading.enumerate() if thread.name.startswith("ebbtide-disk")]

    def test_an_interrupt_while_a_thread_starts(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """It may run, but is not known to. Closing goes on: the file is given back."""

        def interrupted(_: threading.Thread) -> None:
            raise KeyboardInterrupt

        before = open_files()
        disk = DiskTier(tmp_path)
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", interrupted)
            with pytest.raises(KeyboardInterrupt):
                disk.write(storage_of(8192))
        disk.close()
        assert open_files() == before

    def test_an_interrupt_while_a_thread_ends(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """The threads of the other lane end all the same."""
        before = open_files()
        disk = DiskTier(tmp_path)
        bytes_of(disk.read(disk.write(storage_of(8192))).wait())
        readers, real = disk._reader._threads, disk._writer.close

        def interrupted() -> None:
            real()
            raise KeyboardInterrupt

        monkeypatch.setattr(disk._writer, "close", interrupted)
        with pytest.raises(KeyboardInterrupt):
            disk.close()
        assert not any(thread.is_alive() for thread in readers)
        assert open_files() == before

    def test_drain_raises_nothing(self, disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(disk, "_pwrite", failing(errno.EIO))
        disk.write(storage_of(8192))
        disk.drain()


class TestDirectory:
    def test_an_interrupt_while_it_is_tried(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def interrupted(_: int) -> int:
            raise KeyboardInterrupt

        before = open_files()
        monkeypatch.setattr(disk_module, "switch_to_direct", interrupted)
        with pytest.raises(KeyboardInterrupt):
            DiskTier(tmp_path)
        assert open_files() == before

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

    @pytest.mark.parametrize("use", [DiskTier, machine_for])
    def test_below_one_that_may_not_be_looked_into(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, use: Callable[[Path], object]
    ) -> None:
        def refuse(path: Path) -> bool:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES), str(path))

        monkeypatch.setattr(Path, "exists", refuse)
        with pytest.raises(SpillError, match=r"is not writable \(Permission denied\); choose another"):
            use(tmp_path)

    @pytest.mark.parametrize(
        ("code", "expected"),
        [
            (errno.EMFILE, r"no file can be opened in .*: this process has too many open; .*`ulimit -n`\)$"),
            (errno.ENFILE, r"no file can be opened in .*: the system has too many open"),
            (errno.ENOSPC, r"is full \(No space left on device\); free some space there, or choose another"),
            (errno.EDQUOT, r"your quota in .* is used up \(.*\); delete files of yours there, or choose another"),
            (errno.EROFS, r"is not writable \(Read-only file system\); choose another"),
        ],
    )
    def test_no_file(self, code: int, expected: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        monkeypatch.setattr(os, "open", refuse)
        with pytest.raises(SpillError, match=expected):
            DiskTier(tmp_path)

    def test_full_at_once(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        before = open_files()
        monkeypatch.setattr(os, "pwrite", lambda *_: failing(errno.ENOSPC)(0, memoryview(b""), 0))
        with pytest.raises(SpillError, match=r"is full \(No space left on device\); free some space there, or"):
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
