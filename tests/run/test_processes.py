"""Steps of a program that starts other processes."""

from __future__ import annotations

import contextlib
import os
import signal
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset

import ebbtide
from ebbtide.errors import EbbtideError
from ebbtide.run.native import arena_library
from ebbtide.run.resident import rss_bytes
from tests.conftest import hooks_left, modes_left
from tests.run.faults import Steps, assert_clean
from tests.run.harness import STEPS, Guard, Record, compare
from tests.run.programs import Chain

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


class _Rows(Dataset[Tensor]):
    """Rows that a worker process makes."""

    def __len__(self) -> int:
        return 6 * 256

    def __getitem__(self, index: int) -> Tensor:
        return torch.full((64,), 0.001 * index).sin()


class _Loaded(Chain):
    """Trains on batches that worker processes make."""

    def data(self, index: int, *shape: int) -> Tensor:
        return self.batch

    def train(self, guard: Guard) -> list[Record]:
        """Two epochs; workers start anew in each."""
        loader = DataLoader(_Rows(), 256, shuffle=True, num_workers=2, multiprocessing_context="fork")
        records: list[Record] = []
        for _ in range(2):
            for self.batch in loader:
                records.append(self.run(len(records), guard))
        return records


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")  # Python 3.12 and later, of any fork next to threads
def test_data_loader_workers_fork_with_a_live_budget(memory: ebbtide.Budget) -> None:
    expected, program = _Loaded().train(contextlib.nullcontext), _Loaded()
    for index, (plain, found) in enumerate(zip(expected, program.train(memory.step), strict=True)):
        compare(plain, found, f"step {index}")
    assert_clean(memory)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_child_process_neither_hangs_nor_harms(offloading: ebbtide.Budget) -> None:
    plain, program = Steps(at=-1), Steps(at=-1)
    for index in range(STEPS):
        compare(plain.look(index, contextlib.nullcontext), program.look(index, offloading.step), f"step {index}")
    child = os.fork()
    if child == 0:
        signal.alarm(20)
        torch.set_num_threads(1)  # as workers of a DataLoader do: threads of OpenMP do not survive a fork
        try:
            program.look(0, offloading.step)
            os._exit(2)  # it cannot have moved anything
        except EbbtideError:
            offloading.close()
            os._exit(0)
        finally:
            os._exit(3)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    for index in range(2):
        compare(plain.look(index, contextlib.nullcontext), program.look(index, offloading.step), f"after, {index}")
    assert_clean(offloading)


class _DoneInChildError(Exception):
    """Ends the step in a child, and nowhere else."""


def _alone() -> Record:
    """What a child computes for itself; with one thread, as threads of OpenMP do not survive a fork."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        with torch.enable_grad():
            return Steps(at=-1).look(0, contextlib.nullcontext)
    finally:
        torch.set_num_threads(threads)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("where", ["forward", "backward"])
def test_a_child_of_a_step_is_no_part_of_it(offloading: ebbtide.Budget, where: str) -> None:
    """It computes as a child of any program, and may leave the context that it has not entered."""
    expected, process = _alone(), os.getpid()
    plain, program = Steps(at=-1), Steps(at=-1)

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            torch.set_num_threads(1)  # also to compare
            compare(expected, _alone(), "in the child")
            raise _DoneInChildError
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0

    program.in_forward, program.in_backward = (fork, None) if where == "forward" else (None, fork)
    for program.at in range(STEPS):
        try:
            found = program.look(program.at, offloading.step)
        except _DoneInChildError:
            os._exit(hooks_left() + modes_left())
        finally:
            if os.getpid() != process:
                os._exit(99)
        compare(plain.look(program.at, contextlib.nullcontext), found, f"step {program.at}")
    assert offloading.state == "planned"
    assert_clean(offloading)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("steps", [0, STEPS], ids=["observed", "planned"])
def test_a_child_that_ends_the_step_learns_nothing(offloading: ebbtide.Budget, steps: int) -> None:
    """The rest of it ran in its parent."""
    program = Steps(at=-1)
    for index in range(steps):
        program.look(index, offloading.step)
    child = -1
    try:
        with offloading.step():
            program.loss(steps)
            child = os.fork()
            if child == 0:
                signal.alarm(20)
        if child == 0:
            os._exit(len(offloading.measured) - steps)
    finally:
        if child == 0:
            os._exit(99)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert len(offloading.measured) == steps + 1
    assert_clean(offloading)


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("memory", ["slow"], indirect=True)  # its plans compute again, whatever the machine's speed
def test_what_a_child_of_a_step_does_is_not_written_down(memory: ebbtide.Budget) -> None:
    """A worker that is started within a step lives on, and would keep a record of all its ops and tensors."""
    program, arena = Steps(at=-1), arena_library()

    def recorded() -> int:
        return arena.ebbtide_arena_recorded(None, None, None, None, 0) if arena is not None else 0

    def fork() -> None:
        child = os.fork()
        if child == 0:
            signal.alarm(20)
            before = recorded()
            for _ in range(9):
                torch.empty(1 << 16)
            os._exit(hooks_left() + modes_left() + recorded() - before)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0, memory.state

    program.in_forward = fork
    states = []
    for program.at in range(STEPS):
        states.append(memory.state)
        program.look(program.at, memory.step)
    assert {"observe", "verify", "audit", *(["rehearse"] if arena is not None else []), "planned"} <= set(states)


def test_a_child_that_has_closed_all_files(tmp_path: Path) -> None:
    """Those that it opens then are its own, whatever their numbers."""
    assert rss_bytes() > 0
    process = os.fork()
    if process == 0:
        os.closerange(3, 256)
        own = {os.open(tmp_path / "log", os.O_CREAT | os.O_WRONLY) for _ in range(60)}
        size = rss_bytes()
        os._exit(0 if size > 0 and all(os.readlink(f"/proc/self/fd/{one}").endswith("/log") for one in own) else 1)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0
