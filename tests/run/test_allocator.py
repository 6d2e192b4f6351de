"""The arena among others: what PyTorch frees by whatever allocator there is, several budgets, several threads."""

from __future__ import annotations

import errno
import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.run import allocator, calibrate, resident
from ebbtide.run.native import arena_library, find_compiler
from tests.run.harness import FAST_DISK, Program, Record, compare, run_plain
from tests.run.programs import Chain

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(find_compiler() is None, reason="the arena takes a C++ compiler"),
]
STEPS = 12


class Convolutions(Program):
    """oneDNN takes memory for itself in each of them. No random numbers, which threads would share."""

    def build(self) -> nn.Module:
        layers = [nn.Conv2d(16 if k else 3, 16, 3, padding=1) for k in range(5)]
        return nn.Sequential(*(part for layer in layers for part in (layer, nn.BatchNorm2d(16), nn.ReLU())))

    def loss(self, index: int) -> Tensor:
        loss: Tensor = self.model(self.data(index, 8, 3, 32, 32)).square().mean()
        return loss


def comes_from_the_arena() -> bool:
    library = arena_library()
    assert library is not None
    before = library.ebbtide_arena_mark()
    block = torch.zeros(1 << 20, dtype=torch.uint8)
    return int(library.ebbtide_arena_most()) - before >= block.numel()


def test_what_onednn_holds_may_be_older_or_younger_than_the_arena() -> None:
    """It is freed by the allocator of that time, not by the one that it came from."""
    values = torch.randn(512, 256)
    older = values.to_mkldnn()
    with allocator.tuned():
        younger = older.to_dense().to_mkldnn()
        del older
        assert comes_from_the_arena()
    assert not comes_from_the_arena()
    assert torch.equal(younger.to_dense(), values)
    del younger


def test_what_no_memory_has_room_for_is_refused_as_elsewhere() -> None:
    """There would be addresses for it, and to write there ends the process."""
    lines = (line.split() for line in Path("/proc/meminfo").read_text().splitlines())
    size = 2 * sum(1024 * int(words[1]) for words in lines if words[0] in ("MemTotal:", "SwapTotal:"))

    def is_given() -> bool:
        try:
            torch.empty(size, dtype=torch.uint8)
        except RuntimeError:
            return False
        return True

    plain = is_given()
    with allocator.tuned():
        assert is_given() == plain
        assert comes_from_the_arena()


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_settings_for_some_time_are_those_from_before_afterwards() -> None:
    with allocator.tuned():
        with allocator.tuned():
            pass
        assert comes_from_the_arena()
    assert not comes_from_the_arena()


def test_a_loop_that_calibrates_keeps_the_arena(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its second step does, on a machine on which nobody has; what an op costs that runs again is measured so, too."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(calibrate, "_measure", lambda *_: FAST_DISK.links)
    program = Chain(0)
    with ebbtide.Budget("60%", spill=tmp_path) as memory:
        for index in range(3):
            program.run(index, memory.step)
        assert memory._loop.machine.replay_seconds > 0
        assert comes_from_the_arena()
    assert not comes_from_the_arena()


def test_without_proc(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As in a jail: nobody knows what is resident, and the steps are the same."""
    real = os.open

    def refuse(path: Any, *rest: Any, **named: Any) -> int:
        if str(path).startswith("/proc/self/"):
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), path)
        return real(path, *rest, **named)

    monkeypatch.setattr(os, "open", refuse)
    monkeypatch.setattr(resident, "_statm", None)
    program = Chain(0)
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as memory:
        for index, record in enumerate(run_plain(Chain)):
            compare(record, program.run(index, memory.step), f"step {index}")
        assert memory.state == "planned"


def test_a_fork_while_another_thread_takes_memory() -> None:
    """As for the workers of a data loader. The child, too, can take memory."""
    stop = threading.Event()

    def take() -> None:
        while not stop.is_set():
            torch.empty(1 << 18, dtype=torch.uint8)

    with allocator.tuned(), ThreadPoolExecutor(2) as pool:
        for _ in range(2):
            pool.submit(take)
        try:
            for _ in range(50):
                child = os.fork()
                if child == 0:
                    torch.empty(1 << 18, dtype=torch.uint8)
                    os._exit(0)
                assert ended(child)
        finally:
            stop.set()


def ended(child: int) -> bool:
    """Whether a process ends well within half a minute; it is killed otherwise."""
    until = time.monotonic() + 30
    while time.monotonic() < until:
        found, status = os.waitpid(child, os.WNOHANG)
        if found:
            return os.waitstatus_to_exitcode(status) == 0
        time.sleep(0.001)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    return False


def test_budgets_in_several_threads(tmp_path: Path) -> None:
    expected = run_plain(Convolutions, STEPS)
    programs = [Convolutions(0) for _ in range(3)]

    def train(program: Program) -> tuple[list[Record], str]:
        with ebbtide.Budget("70%", spill=tmp_path, machine=FAST_DISK) as memory:
            return [program.run(index, memory.step) for index in range(STEPS)], memory.state

    with ThreadPoolExecutor(len(programs)) as pool:
        for records, state in pool.map(train, programs):
            assert state != "observe"
            for index, (record, found) in enumerate(zip(expected, records, strict=True)):
                compare(record, found, f"step {index}")


def test_a_budget_that_begins_leaves_the_arena_to_another(tmp_path: Path) -> None:
    first, second = (ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) for _ in range(2))
    with first, second:
        for index in range(4):
            Chain(0).run(index, first.step)
        Chain(0).run(0, second.step)
        assert comes_from_the_arena()


def test_a_budget_that_is_dropped_leaves_the_allocator(tmp_path: Path) -> None:
    gc.collect()
    memory, program = ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK), Chain(0)
    for index in range(4):
        program.run(index, memory.step)
    assert comes_from_the_arena()
    del memory
    gc.collect()
    assert not comes_from_the_arena()


def test_a_budget_that_ends_leaves_the_arena_to_another(tmp_path: Path) -> None:
    gc.collect()  # budgets that others left open
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as first:
        with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as second:
            for memory in (first, second):
                program = Chain(0)
                for index in range(4):
                    program.run(index, memory.step)
        assert comes_from_the_arena()
    assert not comes_from_the_arena()
