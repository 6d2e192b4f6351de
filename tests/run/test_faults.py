"""After whatever goes wrong in a step: one clear error, nothing left behind, and the next step is correct."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import signal
import sys
import threading
from collections.abc import Generator, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

import ebbtide
from ebbtide.errors import (
    BudgetError,
    OutOfMemoryError,
    PlanError,
    RecordError,
    SpillError,
    StepError,
)
from ebbtide.machines import load_machine
from ebbtide.observe import passes
from ebbtide.observe.drafts import SeenStorage
from ebbtide.observe.hooks import pop_hooks
from ebbtide.observe.storages import Storages
from ebbtide.run.holdings import Holding, View
from ebbtide.run.tiers import DiskTier
from ebbtide.units import format_bytes
from tests.conftest import open_files, runtime_threads
from tests.run.faults import OBSERVED, PLANNED, VERIFIED, Steps, assert_clean, survive
from tests.run.harness import FAST_DISK, STEPS, Record, compare

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

# --- the user's own faults -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("at", [OBSERVED, 1, VERIFIED, PLANNED], ids=["observe", "again", "verify", "planned"])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_exception_in_user_code(memory: ebbtide.Budget, where: str, at: int, error: type[BaseException]) -> None:
    def fail() -> None:
        raise error("by the user")

    program = Steps(at, forward=fail) if where == "forward" else Steps(at, backward=fail)
    survive(memory, program, error, "by the user")


@pytest.mark.parametrize("at", [OBSERVED, VERIFIED, PLANNED])
def test_a_generator_is_closed_within_a_step(tmp_path: Path, at: int) -> None:
    """As by ``break`` in the loop over it: nothing is learnt, and nobody is told."""

    def steps() -> Iterator[Record]:
        while True:
            with memory.step():
                yield program.compute(0, contextlib.nullcontext)
            program.optimizer.zero_grad()

    plain, program = Steps(at=-1), Steps(at=-1)
    expected = plain.compute(0, contextlib.nullcontext)
    with ebbtide.Budget("80%", spill=tmp_path, machine=FAST_DISK) as memory:
        for last in (at, STEPS):
            for index, found in enumerate(steps()):
                compare(expected, found, f"step {index}")
                if index == last:
                    break
            program.optimizer.zero_grad()
            assert_clean(memory)
        assert len(memory.measured) == at + STEPS
        assert memory.state == "planned"


def test_a_step_is_left_in_another_thread(memory: ebbtide.Budget) -> None:
    def steps() -> Generator[None, None, None]:
        for index in range(STEPS):
            with memory.step():
                program.compute(index, contextlib.nullcontext)
                yield
            program.optimizer.zero_grad()

    program, generator, faults = Steps(at=-1), steps(), list[BaseException]()
    for _ in range(STEPS):
        next(generator)

    def close() -> None:
        try:
            generator.close()
        except StepError as fault:
            faults.append(fault)

    thread = threading.Thread(target=close)
    thread.start()
    thread.join()
    assert "left in another thread than it began in" in str(faults.pop())
    pop_hooks()
    assert_clean(memory)


@pytest.mark.parametrize("at", [OBSERVED, VERIFIED, 3, PLANNED])
def test_plain_steps_after_one_that_was_left_in_another_thread(offloading: ebbtide.Budget, at: int) -> None:
    program, faults, told = Steps(at=-1), list[BaseException](), [*passes._told.each]
    for index in range(at):
        program.look(index, offloading.step)
    expected = program.look(at, contextlib.nullcontext)
    running = offloading.step()
    running.__enter__()

    def leave() -> None:
        try:
            running.__exit__(None, None, None)
        except StepError as fault:
            faults.append(fault)

    compare(expected, program.look(at, contextlib.nullcontext), "the step itself")
    thread = threading.Thread(target=leave)
    thread.start()
    thread.join()
    assert "left in another thread than it began in" in str(faults.pop())
    offloading.close()
    for index in range(2):
        compare(expected, program.look(at, contextlib.nullcontext), f"plain step {index}")
    assert all(tell in told for tell in passes._told.each), "what has observed the step, or run it, is kept"
    assert_clean(offloading)


def _too_much() -> None:
    torch.empty(1 << 48)


def _none_left() -> None:
    raise MemoryError


@pytest.mark.parametrize("at", [OBSERVED, VERIFIED, PLANNED])
def test_no_memory_left(memory: ebbtide.Budget, at: int) -> None:
    match = "Out of memory. In a step on cpu, 1024 TiB was asked for: .* of RAM are available"
    survive(memory, Steps(at, forward=_too_much), OutOfMemoryError, match)


def test_no_memory_left_for_python(offloading: ebbtide.Budget) -> None:
    match = "Out of memory. In a step on cpu, memory was asked for: .* The planned peak is"
    survive(offloading, Steps(PLANNED, backward=_none_left), OutOfMemoryError, match)


@pytest.fixture
def nobody_told_of_collections() -> Iterator[None]:
    """Python prints and loses what is raised in those who are told, as hypothesis is, and in finalizers of what other
    tests have left, as those of torch.compile are."""
    gc.collect()
    told = gc.callbacks[:]
    gc.callbacks.clear()
    yield
    gc.callbacks[:] = told


@pytest.mark.usefixtures("nobody_told_of_collections")
@pytest.mark.parametrize("observes", [False, True], ids=["planned", "observe"])
def test_interrupt_at_any_moment(observes: bool, memory: ebbtide.Budget) -> None:
    plain, program, inside = Steps(at=-1), Steps(at=0), False
    raised, caught = 0, 0

    def interrupt(*_: object) -> None:
        nonlocal raised
        if inside:
            raised += 1
            raise KeyboardInterrupt

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        nonlocal inside
        with memory.step():
            inside = True
            try:
                yield
            finally:
                inside = False

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for index in range(40):
            if index >= STEPS:
                memory._loop.looks.left = int(observes)
                signal.setitimer(signal.ITIMER_REAL, (1e-3 if observes else 2e-4) * (index - STEPS + 1))
                try:
                    program.attempt(guard)
                except KeyboardInterrupt:
                    caught += 1
                signal.setitimer(signal.ITIMER_REAL, 0)
                assert caught == raised, "an interrupt was lost in a finalizer"
                assert_clean(memory)
            expected = plain.look(index, contextlib.nullcontext)
            compare(expected, program.look(index, memory.step), f"step {index} ({memory.state})")
    finally:
        signal.signal(signal.SIGALRM, before)


@pytest.mark.parametrize("at", [OBSERVED, 1])
def test_interrupt_in_a_finalizer(memory: ebbtide.Budget, at: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where steps are observed, finalizers are Python code; what is raised there would be printed and lost."""
    shown, raised = Storages.shown, False

    def interrupted(storages: Storages, storage: SeenStorage, views: int) -> None:
        nonlocal raised
        shown(storages, storage, views)
        if views < 0 and not raised:
            raised = True
            raise KeyboardInterrupt("within a finalizer")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(Storages, "shown", interrupted)
            yield

    hook = sys.unraisablehook
    survive(memory, Steps(at), KeyboardInterrupt, "within a finalizer", around)
    assert sys.unraisablehook is hook


@pytest.mark.parametrize("kind", [Holding, View])
def test_interrupt_in_a_constructor(
    memory: ebbtide.Budget, kind: type[Holding] | type[View], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where steps are observed, what is half made has a finalizer."""

    def interrupted(*_: object) -> None:
        raise KeyboardInterrupt("within a constructor")

    @contextlib.contextmanager
    def around() -> Iterator[None]:
        with monkeypatch.context() as patched:
            patched.setattr(kind, "__init__", interrupted)
            yield

    survive(memory, Steps(OBSERVED), KeyboardInterrupt, "within a constructor", around)


def test_nested_step_is_refused(memory: ebbtide.Budget) -> None:
    def nest() -> None:
        with pytest.raises(StepError, match="nested"):
            memory.step().__enter__()

    plain, program = Steps(at=-1), Steps(PLANNED, forward=nest, backward=nest)
    for index in range(STEPS + 2):
        expected = plain.run(index, contextlib.nullcontext)
        compare(expected, program.run(index, memory.step), f"step {index} ({memory.state})")
    assert_clean(memory)


def test_a_context_is_for_one_step(memory: ebbtide.Budget) -> None:
    plain, program = Steps(at=-1), Steps(at=-1)
    for index in range(STEPS):
        expected, context = plain.run(index, contextlib.nullcontext), memory.step()
        compare(expected, program.run(index, [context].pop), f"step {index} ({memory.state})")
        with pytest.raises(StepError, match="anew for each"), context:
            pass
        assert_clean(memory)


def test_step_in_a_second_thread_is_refused(memory: ebbtide.Budget) -> None:
    caught: list[str] = []

    def other() -> None:
        try:
            Steps(at=-1).look(0, memory.step)
        except StepError as error:
            caught.append(str(error))

    def meanwhile() -> None:
        thread = threading.Thread(target=other)
        thread.start()
        thread.join()

    plain, program = Steps(at=-1), Steps(PLANNED, forward=meanwhile, backward=meanwhile)
    for index in range(STEPS + 2):
        expected = plain.run(index, contextlib.nullcontext)
        compare(expected, program.run(index, memory.step), f"step {index} ({memory.state})")
    assert len(caught) == 2
    assert all("thread" in text for text in caught)
    assert_clean(memory)


def test_steps_may_come_from_different_threads(memory: ebbtide.Budget) -> None:
    plain, program = Steps(at=-1), Steps(at=-1)
    for index in range(STEPS + 2):
        expected = plain.run(index, contextlib.nullcontext)
        found: list[Record] = []
        thread = threading.Thread(target=lambda number=index, into=found: into.append(program.run(number, memory.step)))
        thread.start()
        thread.join()
        compare(expected, found[0], f"step {index} ({memory.state})")
    assert_clean(memory)


def test_a_report_without_a_plan_says_where_plans_come_from(tmp_path: Path) -> None:
    weights = torch.ones(1 << 14, requires_grad=True)
    with ebbtide.Budget("1KiB", spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(4):
            with pytest.raises(StepError, match=r"the latest step has no plan; .* unless it raises"):
                memory.report()
            with contextlib.suppress(BudgetError), memory.step():
                weights.sin().sum().backward()


def test_a_closed_budget_says_so(memory: ebbtide.Budget) -> None:
    memory.close()
    memory.close()
    with pytest.raises(StepError, match="closed"), memory.step():
        pass


def test_a_graph_that_outlives_its_budget_says_so(offloading: ebbtide.Budget) -> None:
    program = Steps(at=-1)
    for index in range(STEPS):
        program.look(index, offloading.step)
    with offloading.step():
        loss = program.loss(STEPS)
    offloading.close()
    with pytest.raises(SpillError):
        loss.backward()


def test_a_budget_that_is_dropped_leaves_nothing(tmp_path: Path) -> None:
    before, program = open_files(), Steps(at=-1)
    budget = ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK)
    for index in range(STEPS):
        program.look(index, budget.step)
    assert runtime_threads()
    del budget
    gc.collect()
    assert runtime_threads() == []
    assert open_files() <= before


def test_nothing_grows(memory: ebbtide.Budget, tmp_path: Path) -> None:
    program, disk = Steps(at=-1), memory.tiers["disk"]
    assert isinstance(disk, DiskTier)

    def measure(start: int) -> tuple[int, int, int]:
        for index in range(start, start + 12):
            program.look(index, memory.step)
        assert_clean(memory)
        tensors = sum(issubclass(type(thing), Tensor) for thing in gc.get_objects())
        return tensors, len(open_files()), disk.file_bytes

    settling = 0
    while not memory.settled:  # another plan may move more
        program.look(settling, memory.step)
        settling += 1
        assert settling < 40
    first, second = measure(settling), measure(settling + 12)
    assert first == second
    assert list(tmp_path.iterdir()) == []


# --- budgets that are too small ------------------------------------------------------------------------------------


def test_a_machine_with_other_memories_is_refused_where_plans_are_made(tmp_path: Path) -> None:
    """It was in the middle of the first step that moved something, and of each one after it."""
    program = Steps(at=-1)
    with ebbtide.Budget("60%", spill=tmp_path, machine=load_machine("h200")) as memory:
        program.look(0, memory.step)
        with pytest.raises(PlanError, match=r"H200.* may move values to 'host', but all that this Budget has is disk;"):
            program.look(1, memory.step)
        assert_clean(memory)
        assert memory.state == "observe"


def test_a_machine_that_cannot_be_is_refused_at_once(tmp_path: Path) -> None:
    links = tuple(dataclasses.replace(link, bandwidth_bytes_per_second=0.0) for link in FAST_DISK.links)
    with pytest.raises(RecordError, match=r"bandwidth 0\.0; it must be > 0"):
        ebbtide.Budget("60%", spill=tmp_path, machine=dataclasses.replace(FAST_DISK, links=links))


@pytest.mark.parametrize("limit", ["3%", 4096], ids=str)
def test_a_budget_too_small_says_what_is_reachable(limit: int | str, tmp_path: Path) -> None:
    program = Steps(at=-1)
    with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as memory:
        program.look(0, memory.step)
        with pytest.raises(BudgetError) as caught:
            program.look(1, memory.step)
        error = caught.value
        assert memory.observed is not None
        assert error.reachable_bytes > error.limit_bytes == memory.limit_bytes
        assert error.op == memory.observed.ops[error.tick].name
        assert error.module == memory.observed.ops[error.tick].module
        for part in (format_bytes(error.limit_bytes), format_bytes(error.reachable_bytes), error.op, error.module):
            assert part in str(error)
        assert_clean(memory)
        plain = Steps(at=-1).look(5, contextlib.nullcontext)
        with contextlib.suppress(BudgetError):  # it may refuse again, but must not compute something else
            compare(plain, program.look(5, memory.step), "the step after")
        assert_clean(memory)
