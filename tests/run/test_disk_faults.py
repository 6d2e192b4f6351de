"""After whatever the disk does: one clear error, nothing left behind, and the next step is correct."""

from __future__ import annotations

import contextlib
import errno
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import ebbtide
from ebbtide.decisions import Offload
from ebbtide.errors import SpillError
from ebbtide.machine import Machine
from ebbtide.run import loop
from ebbtide.run.tiers import DiskTier
from tests.run.faults import OBSERVED, PLANNED, Steps, survive
from tests.run.harness import FAST_DISK, STEPS, compare

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

Patch = Callable[[Any], None]


def _failing_write(code: int) -> Patch:
    def patch(tier: Any) -> None:
        def fail(*_: object) -> int:
            raise OSError(code, os.strerror(code))

        tier._pwrite = fail

    return patch


def _failing_read(tier: Any) -> None:
    def fail(*_: object) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    tier._preadv = fail


def _ending_read(tier: Any) -> None:
    tier._preadv = lambda *_: 0


DISK_FAULTS: dict[str, tuple[Patch, str]] = {
    "disk full": (_failing_write(errno.ENOSPC), "is full"),
    "write error": (_failing_write(errno.EIO), "writing a tensor .* failed"),
    "read error": (_failing_read, "reading a tensor .* failed"),
    "short read": (_ending_read, "bytes could be moved"),
}


@contextlib.contextmanager
def patched(memory: ebbtide.Budget, patch: Patch) -> Iterator[None]:
    """The disk misbehaves."""
    tier = memory.tiers["disk"]
    patch(tier)
    try:
        yield
    finally:
        for name in ("_pwrite", "_preadv"):
            tier.__dict__.pop(name, None)


@pytest.mark.parametrize("fault", DISK_FAULTS)
def test_disk_fault_in_a_planned_step(offloading: ebbtide.Budget, fault: str) -> None:
    patch, message = DISK_FAULTS[fault]
    survive(offloading, Steps(PLANNED), SpillError, message, lambda: patched(offloading, patch))
    assert offloading.plan is not None
    assert any(isinstance(decision, Offload) for decision in offloading.plan.decisions)


@pytest.mark.parametrize("fault", DISK_FAULTS)
def test_disk_fault_in_an_observed_step(fault: str, limit_bytes: int, tmp_path: Path) -> None:
    patch, message = DISK_FAULTS[fault]
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        survive(memory, Steps(OBSERVED), SpillError, message, lambda: patched(memory, patch))


def test_wrong_bytes_are_seen_by_checksums(tmp_path: Path) -> None:
    def corrupt(tier: Any) -> None:
        read = type(tier)._preadv

        def flip(fd: int, view: memoryview, offset_bytes: int) -> int:
            count = int(read(tier, fd, view, offset_bytes))
            view[0] ^= 1
            return count

        tier._preadv = flip

    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK, checksum=True) as memory:
        survive(memory, Steps(PLANNED), SpillError, "other than they were written", lambda: patched(memory, corrupt))


def _in_pieces(tier: Any) -> None:
    """Every call moves some sectors only, as the system may."""
    write, read = type(tier)._pwrite, type(tier)._preadv
    tier._pwrite = lambda fd, view, offset_bytes: write(tier, fd, view[:8192], offset_bytes)
    tier._preadv = lambda fd, view, offset_bytes: read(tier, fd, view[:8192], offset_bytes)


def _slowly(tier: Any) -> None:
    """Every transfer is late, whatever the plan expects."""
    write, read = type(tier)._pwrite, type(tier)._preadv

    def late(call: Any, fd: int, view: memoryview, offset_bytes: int) -> int:
        time.sleep(0.004)
        return int(call(tier, fd, view, offset_bytes))

    tier._pwrite = lambda *arguments: late(write, *arguments)
    tier._preadv = lambda *arguments: late(read, *arguments)


@pytest.mark.parametrize("patch", [_in_pieces, _slowly])
def test_an_odd_disk_changes_no_numbers(offloading: ebbtide.Budget, patch: Patch) -> None:
    plain, program = Steps(at=-1), Steps(at=-1)
    with patched(offloading, patch):
        for index in range(STEPS + 2):
            expected = plain.run(index, contextlib.nullcontext)
            compare(expected, program.run(index, offloading.step), f"step {index} ({offloading.state})")
    disk = offloading.tiers["disk"]
    assert isinstance(disk, DiskTier)
    assert disk.read_bytes > 0


@pytest.mark.parametrize("make", ["missing", "a file", "not writable"])
def test_a_directory_that_cannot_be_used(make: str, tmp_path: Path) -> None:
    spill = tmp_path / "spill"
    if make == "a file":
        spill.touch()
    elif make == "not writable":
        spill.mkdir(mode=0o500)
        if os.geteuid() == 0:  # whom no mode stops
            spill = Path("/proc")
    with pytest.raises(SpillError, match=str(spill)):
        ebbtide.Budget("60%", spill=spill, machine=FAST_DISK)


def test_a_process_may_change_its_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "spill").mkdir()
    measured: list[Path] = []

    def measure(spill: Path) -> Machine:
        measured.append(spill)
        return FAST_DISK

    monkeypatch.setattr(loop, "machine_for", measure)
    monkeypatch.chdir(tmp_path)
    with ebbtide.Budget("60%", spill="spill") as memory:
        monkeypatch.chdir("/")
        assert memory.machine is FAST_DISK
    assert measured == [tmp_path / "spill"]


@pytest.mark.skipif(not Path("/dev/shm").is_dir(), reason="needs a tmpfs at /dev/shm")
def test_a_directory_in_ram_is_warned_about_and_works() -> None:
    plain, program = Steps(at=-1), Steps(at=-1)
    with pytest.warns(UserWarning, match="tmpfs"):
        memory = ebbtide.Budget("60%", spill="/dev/shm", machine=FAST_DISK)
    with memory:
        for index in range(STEPS):
            expected = plain.run(index, contextlib.nullcontext)
            compare(expected, program.run(index, memory.step), f"step {index} ({memory.state})")
