"""Tiers that are closed, dropped or forked leave nothing behind."""

from __future__ import annotations

import contextlib
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from ebbtide.errors import SpillError
from ebbtide.run.tiers import DiskTier, QueuedTier
from tests.conftest import open_files
from tests.run.tiers.stand_ins import HeldCall, bytes_of, storage_of


class TestEnd:
    def test_nothing_is_left(self, tmp_path: Path) -> None:
        files, threads = open_files(), threading.active_count()
        tier = DiskTier(tmp_path)
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
        gate = HeldCall(disk, monkeypatch, "_pwrite")
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
        tier.drain()

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
        storage = storage_of(2 * DiskTier.part_bytes)
        slot = disk.write(storage)
        expected = bytes_of(storage)
        for _ in range(5):
            load = disk.read(slot)
            in_child(lambda: None)
            assert bytes_of(load.wait()) == expected
