"""Worker threads begin and end whatever interrupts whoever waits for them."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from ebbtide.run.tiers import DiskTier
from ebbtide.run.tiers.gate import Gate
from tests.conftest import open_files
from tests.run.tiers.stand_ins import HeldCall, bytes_of, storage_of


def test_what_comes_after_an_interrupt_while_a_thread_starts(disk: DiskTier, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whether it runs or not, another one does the work."""
    real = threading.Thread.start

    def started(thread: threading.Thread) -> None:
        real(thread)
        raise KeyboardInterrupt

    storage = storage_of(8192)
    for start in (started, lambda _: started(threading.Thread())):
        with monkeypatch.context() as patch:
            patch.setattr(threading.Thread, "start", start)
            with pytest.raises(KeyboardInterrupt):
                disk.write(storage)
    assert not disk._writer.gates
    assert bytes_of(disk.read(disk.write(storage)).wait()) == bytes_of(storage)
    assert len(disk._writer.gates) == 1


def test_an_interrupt_while_close_waits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is raised when the file is given back, which is not before the worker has ended."""
    before, waits, real = open_files(), iter(range(100)), Gate.wait
    disk = DiskTier(tmp_path)
    held = HeldCall(disk, monkeypatch, "_pwrite")
    disk.write(storage_of(8192))
    assert held.entered.wait(20)

    def interrupted(gate: Gate) -> None:
        if next(waits) == 0:
            raise KeyboardInterrupt
        assert open_files() > before
        held.open.set()
        real(gate)

    monkeypatch.setattr(Gate, "wait", interrupted)
    with pytest.raises(KeyboardInterrupt):
        disk.close()
    assert held.open.is_set()
    assert open_files() == before
