"""Calibration: links that can be believed, in bounded time, and remembered."""

from __future__ import annotations

import errno
import json
import math
import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from ebbtide.errors import SpillError
from ebbtide.machine import Link, Machine, Tier, check_machine
from ebbtide.run import beside, replay_cost
from ebbtide.run import calibrate as module
from ebbtide.run.calibrate import FREE_BYTES, calibrate, machine_for
from ebbtide.run.fits import LATENCY_BYTES, slope
from ebbtide.run.native import arena_library
from ebbtide.run.script import Script
from ebbtide.run.tiers.disk import DiskTier

MADE_UP = Machine(
    name="made up",
    fast="ram",
    tiers=(Tier("ram", "device"), Tier("disk", "disk")),
    links=(Link("ram", "disk", 1e-4, 2e9, 1e9, 0.1), Link("disk", "ram", 1e-4, 1e9, 1e9, 0.1)),
)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "ebbtide"


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Replaces the measurement; holds a word for each time that it was made."""
    made: list[str] = []

    def measure(tier: DiskTier, report: module.Progress) -> tuple[Link, ...]:
        made.append(tier.name)
        return MADE_UP.links

    monkeypatch.setattr(module, "_measure", measure)
    return made


def test_measures_this_machine(tmp_path: Path) -> None:
    steps: list[tuple[float, str]] = []
    generator = torch.get_rng_state()
    machine = calibrate(tmp_path, progress=lambda done, doing: steps.append((done, doing)))
    check_machine(machine)
    assert machine.fast == "ram"
    assert [tier.kind for tier in machine.slow_tiers()] == ["disk"]
    for link in (machine.link("ram", "disk"), machine.link("disk", "ram")):
        assert 0 < link.latency_seconds < 0.1
        assert 1e6 < link.duplex_bytes_per_second <= link.bandwidth_bytes_per_second < 1e12
        assert 0 <= link.compute_slowdown < 1
        assert 0 <= link.compute_seconds < 0.01
    assert 0 <= machine.replay_seconds < 0.01  # a busy machine's clock may find that they cost nothing
    assert [done for done, _ in steps] == sorted(done for done, _ in steps)
    assert steps[-1] == (1.0, "done")
    assert torch.equal(torch.get_rng_state(), generator)
    assert machine_for(tmp_path) == machine


MEASURES_NOTHING = """
import sys
from ebbtide.run import calibrate as module
from ebbtide.run.native import arena_library
from ebbtide.run.tiers.memory import take_memory

def measure(tier, report):
    arena = arena_library()
    arena.ebbtide_arena_mark()
    memory = take_memory(1 << 20)
    memory.fill_(1)
    print(arena.ebbtide_arena_most())
    return MADE_UP.links

MADE_UP = module.Machine.load(sys.argv[1])
module._measure = measure
module.calibrate(sys.argv[2])
"""


@pytest.mark.skipif(arena_library() is None, reason="needs a compiler")
def test_measures_in_the_arena_even_before_any_step(tmp_path: Path) -> None:
    """Disks are slower to and from other memory, and who calibrates first decides for all."""
    MADE_UP.save(tmp_path / "machine.json")
    command = [sys.executable, "-c", MEASURES_NOTHING, str(tmp_path / "machine.json"), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert int(done.stdout) >= 1 << 20


class DiskClock:
    """The seconds for which a disk was busy, in the place of the module `time`: on it nothing else takes any."""

    sleep = staticmethod(time.sleep)

    def __init__(self, bytes_per_second: float) -> None:
        self.seconds = 0.0
        self._bytes_per_second = bytes_per_second
        self._lock = threading.Lock()

    def transfer(self, size_bytes: int) -> None:
        """Take as long as so many bytes do."""
        seconds = size_bytes / self._bytes_per_second
        time.sleep(seconds)
        with self._lock:
            self.seconds += seconds

    def perf_counter(self) -> float:
        return self.seconds


def test_a_slow_disk_takes_bounded_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rate = 50e6
    clock = DiskClock(rate)
    write, read = DiskTier._pwrite, DiskTier._preadv

    def slow_write(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
        clock.transfer(len(view))
        return write(self, fd, view, offset_bytes)

    def slow_read(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
        clock.transfer(len(view))
        return read(self, fd, view, offset_bytes)

    monkeypatch.setattr(DiskTier, "_pwrite", slow_write)
    monkeypatch.setattr(DiskTier, "_preadv", slow_read)
    monkeypatch.setattr(beside._Compute, "_run", lambda _: None)  # of a busy machine's cores it may get few
    monkeypatch.setattr(module, "time", clock)
    machine = calibrate(tmp_path)
    assert clock.seconds < 8
    for link in machine.links:
        assert link.latency_seconds == pytest.approx(LATENCY_BYTES / rate)
        assert link.bandwidth_bytes_per_second == pytest.approx(rate, rel=0.01)


@pytest.mark.parametrize("lost_seconds", [5e-6, 0.0, -5e-6])
def test_what_ops_that_run_again_cost_besides_their_own_time(
    lost_seconds: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """None costs less than nothing, whatever the clock says on a busy machine."""
    op_seconds = 1e-6

    def seconds(script: Script, _: torch.Tensor) -> float:
        return 1.0 + len(script.known) * (op_seconds + lost_seconds)

    monkeypatch.setattr(replay_cost, "_seconds", seconds)
    monkeypatch.setattr(replay_cost, "_forward_seconds", lambda _: replay_cost.OPS * op_seconds)
    assert replay_cost.lost_per_replay() == pytest.approx(max(lost_seconds, 0.0), abs=1e-12)


def test_what_is_timed_begins_where_a_block_of_any_disk_may() -> None:
    """Of 4 KiB that began elsewhere nothing went to a disk with blocks of 4 KiB: its latency was that of Python."""
    source = module._random_storage(1 << 20)
    parts = [module._part(source, LATENCY_BYTES + 512) for _ in range(8)]
    assert [part.data_ptr() % 4096 for part in parts] == [0] * 8


def test_slope_finds_the_rate_behind_the_latency() -> None:
    sizes = [1 << 20, 4 << 20, 16 << 20]
    assert slope({size: 2e-3 + size / 1.5e9 for size in sizes}, 2e-3) == pytest.approx(1.5e9)
    assert math.isfinite(slope({1 << 20: 1e-4}, 1e-3))


def test_remembered_by_directory(tmp_path: Path, quick: list[str], cache: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    first.mkdir()
    second.mkdir()
    for spill in (first, first, second, tmp_path / "second" / ".." / "first"):
        assert machine_for(spill).links == MADE_UP.links
    assert len(quick) == 2
    assert len(list(cache.iterdir())) == 2


@pytest.mark.parametrize("content", ["", "{", json.dumps({"format": "ebbtide-machine", "version": 0})])
def test_a_broken_cache_is_made_again(
    tmp_path: Path, quick: list[str], cache: Path, content: str, caplog: pytest.LogCaptureFixture
) -> None:
    machine_for(tmp_path)
    (file,) = cache.iterdir()
    file.write_text(content)
    assert machine_for(tmp_path).links == MADE_UP.links
    assert len(quick) == 2
    assert "calibrating again" in caplog.text
    assert Machine.load(file).links == MADE_UP.links


def test_a_cache_that_cannot_be_written(
    tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/proc")
    assert machine_for(tmp_path).links == MADE_UP.links
    assert "is not remembered" in caplog.text


def test_a_disk_without_room_for_it(
    tmp_path: Path, quick: list[str], cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    machine_for(tmp_path)
    before = {path: path.read_bytes() for path in cache.iterdir()}

    def full(_source: Path, _target: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(Path, "replace", full)
        assert calibrate(tmp_path).links == MADE_UP.links
    assert "cannot be written (No space left on device)" in caplog.text
    assert {path: path.read_bytes() for path in cache.iterdir()} == before


def test_nowhere_to_remember_it(
    tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "cache_path", lambda name: None)
    assert machine_for(tmp_path).links == MADE_UP.links
    assert "is not remembered: there is no home directory" in caplog.text


def test_too_little_space(tmp_path: Path, quick: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "free_bytes", lambda directory: FREE_BYTES - 1)
    with pytest.raises(SpillError, match="has 256 MiB free, and calibrating needs 256 MiB"):
        calibrate(tmp_path)
    assert not quick


def test_a_missing_directory(tmp_path: Path) -> None:
    for make in (machine_for, calibrate):
        with pytest.raises(SpillError, match="nowhere does not exist"):
            make(tmp_path / "nowhere")


def test_a_fault_of_the_disk_is_reported(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
        raise OSError(5, "Input/output error")

    monkeypatch.setattr(DiskTier, "_preadv", fail)
    with pytest.raises(SpillError, match="Input/output error"):
        calibrate(tmp_path)


def test_half_of_the_turns_have_to_do_where_each_takes_long() -> None:
    assert list(beside._turns(8, 60.0)) == list(range(8))
    assert list(beside._turns(8, 0.0)) == list(range(4))


def test_what_is_measured_surely_is_believed() -> None:
    assert beside.likely([5.0, 5.1, 4.9, 5.0], usual=2.0, spread=1.0) == pytest.approx(5.0, rel=0.01)
    assert beside.likely([0.0], usual=2.0, spread=1.0) == 0.0


def test_what_scatters_counts_less_than_what_is_usual() -> None:
    samples = [-9.0, 8.0, -7.0, 10.0, -1.0, 2.0, -12.0, 13.0]
    found = beside.likely(samples, usual=2.0, spread=1.0)
    assert 1.8 < found < 2.0
    assert beside.likely([-sample - 30 for sample in samples], usual=2.0, spread=9.0) == 0.0
