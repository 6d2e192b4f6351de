"""Budgets and steps that end where somebody interrupts them."""

from __future__ import annotations

import gc
import subprocess
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
import torch

import ebbtide
from ebbtide.errors import SpillError
from ebbtide.run.tiers import DiskTier
from tests.conftest import open_files, runtime_threads
from tests.run.faults import Steps
from tests.run.harness import FAST_DISK
from tests.run.tiers.stand_ins import bytes_of, storage_of

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt


def test_an_interrupt_while_a_budget_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All is given back all the same: closing again would do nothing."""
    before = open_files()
    memory = ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK)
    program = Steps(at=-1)
    for index in range(4):
        program.compute(index, memory.step)
    assert runtime_threads()
    monkeypatch.setattr(DiskTier, "drain", _interrupt)
    with pytest.raises(KeyboardInterrupt):
        memory.close()
    assert runtime_threads() == []
    assert open_files() == before
    assert not memory._loop.allocator_lease.is_taken
    memory.close()


def test_a_tier_that_is_closed_by_its_own_thread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As the garbage collector may do, which runs in any thread: amid a transfer, which goes on."""
    before = open_files()
    disk: Any = DiskTier(tmp_path)
    real: Any = disk._pwrite

    def closing(fd: int, view: memoryview, offset_bytes: int) -> int:
        disk.drain()
        disk.close()
        assert open_files() > before
        return int(real(fd, view, offset_bytes))

    with monkeypatch.context() as patch:
        patch.setattr(disk, "_pwrite", closing)
        disk.write(storage_of(8192)).wait()
        with pytest.raises(SpillError, match="closed"):
            disk.write(storage_of(8192))
    disk = real = None
    gc.collect()
    assert open_files() == before


def test_an_interrupt_as_a_step_has_ended(tmp_path: Path) -> None:
    """The next one begins as ever."""
    program = Steps(at=-1)
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as memory:
        for index in range(6):
            step = memory.step()
            if index == 4:
                step._compiled.callback(_interrupt)
                with pytest.raises(KeyboardInterrupt):
                    program.compute(index, lambda step=step: step)  # type: ignore[misc]
            else:
                program.compute(index, lambda step=step: step)  # type: ignore[misc]
        assert memory.measured[-1].left == ""


@pytest.mark.parametrize("at", [0, 4], ids=["observe", "planned"])
def test_the_process_ends_amid_a_step(tmp_path: Path, at: int) -> None:
    """In a generator that nobody closes: the interpreter does, with the last things that it does."""
    script = f"""
        import contextlib
        from pathlib import Path
        import ebbtide
        from tests.run.faults import Steps
        from tests.run.harness import FAST_DISK

        def steps():
            for index in range(8):
                with memory.step():
                    yield program.compute(index, contextlib.nullcontext)

        program, memory = Steps(at=-1), ebbtide.Budget("60%", spill=Path({str(tmp_path)!r}), machine=FAST_DISK)
        left = steps()
        for _ in range({at} + 1):
            next(left)
        """
    done = subprocess.run([sys.executable, "-c", textwrap.dedent(script)], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


def test_what_came_back_may_be_resized(tmp_path: Path) -> None:
    """As a Function does that frees what it has used up."""
    disk = DiskTier(tmp_path)
    try:
        storage = disk.read(disk.write(storage_of(8192))).wait()
        if not storage.resizable():
            pytest.skip("there is no arena here")
        expected = bytes_of(storage)
        storage.resize_(16384)
        assert bytes_of(storage)[:8192] == expected
        storage.resize_(0)
        assert storage.nbytes() == 0
        assert torch.empty(0, dtype=torch.uint8).set_(storage).numel() == 0
    finally:
        disk.close()
