"""Steps on a device that is asynchronous and whose allocator counts, played by the CPU: see `tests.run.gauges`."""

from __future__ import annotations

import collections
import contextlib
import functools
import gc
import weakref
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Offload, Recompute
from ebbtide.errors import OutOfMemoryError, StepError
from ebbtide.observe.clock import HostClock
from ebbtide.plan import plain_peak_bytes
from ebbtide.run import allocator
from ebbtide.run.device import TrainingDevice
from ebbtide.run.gauges import Gauges
from ebbtide.run.observing import observe_step
from ebbtide.run.shortage import out_of_memory
from ebbtide.run.tiers import DiskTier
from ebbtide.units import format_bytes
from tests.run.gauges import UNIT, ArenaMemory, LaggingClock, install
from tests.run.harness import FAST_DISK, HELD_MORE, SLOW_DISK, Program, Record, compare

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

STEPS = 8
WIDTH = 256
CPU = torch.device("cpu")
CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.10 GiB of which 1.20 GiB is free."
)


class Block(nn.Module):
    """A linear layer and two activations; `logsumexp` takes a workspace as large as what it reads."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x)
        return (x - x.logsumexp(1, keepdim=True)).tanh()


class Blocks(Program):
    """Blocks, trained with state in the optimizer and beside a tensor that no step touches."""

    def __init__(self, at: int = -1, act: Callable[[], object] = lambda: None) -> None:
        super().__init__()
        self.at, self.act = at, act
        self.ballast = torch.zeros(1 << 19)

    def build(self) -> nn.Module:
        return nn.Sequential(*(Block() for _ in range(6)))

    def optimize(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.model.parameters(), lr=1e-3)

    def loss(self, index: int) -> Tensor:
        loss = self.model(self.data(index, 512, WIDTH)).square().mean()
        if index == self.at:
            self.act()
        return loss


@pytest.fixture(autouse=True)
def arena() -> Iterator[None]:
    """All large tensors come from the arena, which counts them."""
    allocator.set_tuned()
    yield
    allocator.set_default()


@pytest.fixture
def clock() -> LaggingClock:
    return LaggingClock()


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch, clock: LaggingClock) -> ArenaMemory:
    """Steps run on a device with this memory and this clock."""
    memory = ArenaMemory()
    install(monkeypatch, Gauges(CPU, clock, memory))
    return memory


def within(limit: int | str, spill: Path, *, recompute: bool = False, hard: bool = False) -> ebbtide.Budget:
    machine = SLOW_DISK if recompute else FAST_DISK
    return ebbtide.Budget(limit, spill=spill, machine=machine, tune_allocator=False, hard=hard)


@functools.cache
def plain_records() -> tuple[Record, ...]:
    """They would count on the device, if they were kept there."""
    allocator.set_default()
    program = Blocks()
    records = tuple(program.run(index, contextlib.nullcontext) for index in range(STEPS))
    allocator.set_tuned()
    return records


# --- memory --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("recompute", [False, True], ids=["offload", "recompute"])
def test_the_planned_peak_is_what_the_allocator_hands_out(recompute: bool, device: ArenaMemory, tmp_path: Path) -> None:
    expected, program = plain_records(), Blocks()

    peaks = []
    with within("80%", tmp_path, recompute=recompute) as memory:
        for index in range(STEPS):
            gc.collect()

            @contextlib.contextmanager
            def guard() -> Iterator[None]:
                device.start_peak()
                with memory.step():
                    yield
                peaks.append(device.peak_bytes())

            compare(expected[index], program.run(index, guard), f"step {index} ({memory.state})")
        assert memory.state == "planned"
        plan, step = memory.plan, memory.observed
    assert plan is not None
    assert step is not None
    assert any(isinstance(decision, Recompute if recompute else Offload) for decision in plan.decisions)
    assert plan.resting_bytes > 4 * program.ballast.numel()
    assert max(step.values[value].size_bytes for op in step.ops for value in op.outputs if not step.values[value].uses)
    assert peaks[-1] == pytest.approx(plan.peak_bytes, rel=0.01)
    assert plan.peak_bytes <= plan.limit_bytes < plan.plain_peak_bytes
    device.start_peak()
    program.run(STEPS, contextlib.nullcontext)
    assert device.peak_bytes() == pytest.approx(plan.plain_peak_bytes, rel=0.01)


def test_what_others_hold_counts_in_observed_steps(device: ArenaMemory, tmp_path: Path) -> None:
    program = Blocks()
    program.ballast = torch.zeros(0)
    program.run(0, contextlib.nullcontext)
    device.start_peak()
    program.run(1, contextlib.nullcontext)
    limit = device.peak_bytes() + (1 << 20)
    moved = []
    for size in (6 << 20, 0):
        program.ballast = torch.zeros(size, dtype=torch.uint8)
        with within(limit, tmp_path) as memory:
            program.run(2, memory.step)
            disk = memory.tiers["disk"]
            assert isinstance(disk, DiskTier)
            moved.append(disk.written_bytes)
    assert moved[0] > 0 == moved[1]


class Skipping(Blocks):
    """Leaves a block out in one step."""

    def loss(self, index: int) -> Tensor:
        h = self.data(index, 512, WIDTH)
        for place, block in enumerate(self.model):
            h = h if (index, place) == (STEPS, 3) else block(h)
        return h.square().mean()


def test_a_step_that_is_counted_in_the_middle_of_training_and_holds_too_much_is_warned_of(
    device: ArenaMemory, tmp_path: Path
) -> None:
    """Something else may lie there by then; nothing says of a step on a device what it holds but that it is counted."""
    program, due = Skipping(), list[int]()
    with within("80%", tmp_path) as memory:
        for index in range(2 * STEPS + 2):
            is_due = memory._loop.parts.due == index
            told = pytest.warns(UserWarning, match=HELD_MORE) if is_due else contextlib.nullcontext()
            due += [index] if is_due else []
            more = torch.zeros(1 << 24) if is_due else None
            with told:
                program.run(index, memory.step)
            del more
        assert memory.state == "planned"
    assert due == [2 * STEPS + 1]


# --- time ----------------------------------------------------------------------------------------------------------


def test_times_are_read_when_the_device_is_done(device: ArenaMemory, clock: LaggingClock, tmp_path: Path) -> None:
    program = Blocks()
    with within("80%", tmp_path) as memory:

        @contextlib.contextmanager
        def guard() -> Iterator[None]:
            with memory.step():
                clock.inside = True
                yield
                clock.inside = False

        while memory.state != "planned":
            program.run(0, guard)
        step, waits, ran = memory.observed, clock.waits, len(memory.measured)
        assert step is not None
        # Its own time, and that before each event and before the next op: what the recorder does then is left out.
        events = collections.Counter(event.tick for event in step.events)
        spans = [2 + events[tick + 1] for tick in range(len(step.ops) - 1)]
        assert [op.duration_seconds for op in step.ops[:-1]] == pytest.approx([UNIT * count for count in spans])
        for index in range(6):
            program.run(index, guard)
        assert clock.waits == waits, "a planned step waited for the device"
        assert [m.seconds for m in memory.measured[ran:]] == [None] * 6
        assert memory.observed is step
        clock.catch_up()
        program.run(6, guard)
        assert None not in [m.seconds for m in memory.measured[ran : ran + 6]]
        assert memory.measured[-1].seconds is None
        assert memory.observed is not step, "the durations are refined from what was read"
        assert clock.waits == waits
        str(memory.report())
        assert memory.measured[-1].seconds is not None


# --- running out of it ---------------------------------------------------------------------------------------------


def run_out() -> None:
    raise torch.OutOfMemoryError(CUDA_MESSAGE)


@pytest.mark.parametrize("at", [0, 1, STEPS - 2], ids=["first", "second", "planned"])
def test_running_out_of_memory(at: int, device: ArenaMemory, tmp_path: Path) -> None:
    device.free = 16 << 20
    reference, program, states = Blocks(), Blocks(at, run_out), []
    with within(1 << 40, tmp_path) as memory:
        for index in range(2 * STEPS):
            states.append(memory.state)
            if index != at:
                expected = reference.run(index, contextlib.nullcontext)
                compare(expected, program.run(index, memory.step), f"step {index} ({states[-1]})")
                continue
            planned = memory.plan
            with pytest.raises(OutOfMemoryError) as caught:
                program.compute(index, memory.step)
            program.optimizer.zero_grad()
            assert memory.state == "observe"
        fits = caught.value.fits_bytes
        assert fits is not None
        assert memory.plan is not None
        assert memory.plan.limit_bytes == fits, "plans stay within what fits"
        assert memory.limit_bytes == 1 << 40
    error, message = caught.value, str(caught.value)
    assert isinstance(error, torch.OutOfMemoryError)
    assert isinstance(error, MemoryError)
    assert message.startswith("CUDA out of memory. ")  # scripts look for it
    assert error.asked_bytes == 2 << 30
    assert error.planned_bytes == (planned.peak_bytes if planned is not None else None)
    told = [2 << 30, fits, device.free, *([planned.peak_bytes] if planned is not None else [])]
    assert all(format_bytes(size) in message for size in told)
    assert states[-1] in ("planned", "idle")


def test_a_smaller_request_that_failed_for_holes(device: ArenaMemory, tmp_path: Path) -> None:
    device.free = 3 << 30
    with within(1 << 40, tmp_path) as memory, pytest.raises(OutOfMemoryError, match="expandable_segments") as caught:
        Blocks(0, run_out).compute(0, memory.step)
    assert caught.value.fits_bytes is not None
    assert caught.value.fits_bytes < device.allocated_bytes() + (2 << 30) + (64 << 20)


@pytest.mark.parametrize(
    ("fault", "match"),
    [
        (torch.OutOfMemoryError(CUDA_MESSAGE), "not the memory that the budget is for"),
        (RuntimeError("DefaultCPUAllocator: not enough memory: you tried to allocate 4096 bytes."), "of RAM"),
    ],
)
def test_other_memory_says_nothing_of_the_budget(fault: Exception, match: str, device: ArenaMemory) -> None:
    error = out_of_memory(fault, torch.device("cuda", 1), device, None, 1 << 30)
    assert error.fits_bytes is None
    assert match in str(error)


@pytest.mark.parametrize(
    ("kind", "message"),
    [
        (torch.AcceleratorError, "CUDA error: out of memory\nSearch for `cudaErrorMemoryAllocation'"),
        (RuntimeError, "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate(handle)`"),
    ],
)
def test_libraries_that_find_no_memory(
    kind: type[Exception], message: str, device: ArenaMemory, tmp_path: Path
) -> None:
    def fail() -> None:
        raise kind(message)

    with within(1 << 40, tmp_path) as memory:
        with pytest.raises(OutOfMemoryError, match=r"CUDA out of memory\. In a step on cpu, memory") as caught:
            Blocks(0, fail).compute(0, memory.step)
        assert memory.state == "observe"
    assert isinstance(caught.value, torch.OutOfMemoryError)
    assert caught.value.asked_bytes is None


def test_a_device_that_does_not_even_take_the_time(
    device: ArenaMemory, clock: LaggingClock, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """After a fault of its own, CUDA refuses everything; the step is taken down all the same."""

    def refuse() -> int:
        raise RuntimeError("CUDA error: an illegal memory access was encountered")

    def fail() -> None:
        monkeypatch.setattr(clock, "mark", refuse)
        refuse()

    program = Blocks(0, fail)
    with within(1 << 40, tmp_path) as memory:
        with pytest.raises(RuntimeError, match="illegal memory access"):
            program.compute(0, memory.step)
        monkeypatch.undo()
        memory.close()


def test_the_error_keeps_no_tensor_alive(device: ArenaMemory, tmp_path: Path) -> None:
    program, seen = Blocks(), []

    def fail(_module: nn.Module, _inputs: object, output: Tensor) -> None:
        seen.append(weakref.ref(output))
        run_out()

    with within("80%", tmp_path) as memory:
        for index in range(STEPS):
            program.run(index, memory.step)
        program.model[2].register_forward_hook(fail)
        gc.collect()
        gc.disable()
        try:
            with contextlib.suppress(OutOfMemoryError):
                program.compute(STEPS, memory.step)
            assert [reference() for reference in seen] == [None]
        finally:
            gc.enable()


def test_other_errors_are_left_alone(device: ArenaMemory, tmp_path: Path) -> None:
    def fail() -> None:
        raise RuntimeError("something else")

    with within("80%", tmp_path) as memory, pytest.raises(RuntimeError, match=r"^something else$"):
        Blocks(0, fail).compute(0, memory.step)


# --- the cap -------------------------------------------------------------------------------------------------------


def test_a_hard_limit(device: ArenaMemory, tmp_path: Path) -> None:
    program, states = Blocks(), []
    with within("80%", tmp_path, recompute=True, hard=True) as memory:
        for index in range(STEPS):
            states.append(memory.state)
            program.run(index, memory.step)
        limit = memory.limit_bytes
    assert states[2:4] == ["verify", "audit"]
    assert device.caps == [limit, None], "off while true values are compared, and when the budget is closed"


def test_a_hard_limit_in_bytes_holds_from_the_first_step_on(device: ArenaMemory, tmp_path: Path) -> None:
    program = Blocks()
    with within(1 << 40, tmp_path, hard=True) as memory:
        program.run(0, memory.step)
        assert device.caps == [1 << 40]
    assert device.caps == [1 << 40, None]


def test_a_hard_limit_goes_with_its_budget(device: ArenaMemory, tmp_path: Path) -> None:
    """One that is dropped and never closed, as in a notebook, would cap those that are made later."""
    program, memory = Blocks(), within(1 << 40, tmp_path, hard=True)
    program.run(0, memory.step)
    assert device.caps == [1 << 40]
    del memory
    gc.collect()
    assert device.caps == [1 << 40, None]


def test_no_hard_limit_on_a_cpu(tmp_path: Path) -> None:
    with within("80%", tmp_path, hard=True) as memory, pytest.raises(StepError, match="on a CPU"):
        Blocks().compute(0, memory.step)


# --- where steps run -----------------------------------------------------------------------------------------------


def test_a_step_that_runs_elsewhere_than_expected_is_looked_at_again(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    wrong = ArenaMemory()
    wrong.device = torch.device("cuda", 3)
    install(monkeypatch, Gauges(wrong.device, LaggingClock(), wrong), Gauges(CPU, HostClock(), None))
    expected, program, states = plain_records(), Blocks(), []
    with within("80%", tmp_path) as memory:
        for index, record in enumerate(expected):
            states.append(memory.state)
            compare(record, program.run(index, memory.step), f"step {index} ({states[-1]})")
        assert memory.observed is not None
        assert memory.observed.device == "cpu"
    assert states[:3] == ["observe"] * 3
    assert "observe" not in states[3:]


class Elsewhere:
    """The memory of a device on which nothing is."""

    device = torch.device("cuda", 0)

    def size_of(self, storage: torch.UntypedStorage) -> int:
        return storage.nbytes() if storage.device == self.device else 0

    def allocated_bytes(self) -> int:
        return 1 << 20

    def start_peak(self) -> None: ...

    def peak_bytes(self) -> int:
        return 1 << 20

    def free_bytes(self) -> int:
        return 1 << 20

    def cap(self, limit_bytes: int | None) -> None: ...


def test_memory_that_ran_out_on_another_device_than_was_expected_is_looked_after_from_then_on(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """The first step is expected on the current device, but the model is on another one, where the step does not fit
    unless something moves: PyTorch's own error says where, and the next step is kept within the budget."""
    install(monkeypatch, Gauges(Elsewhere.device, LaggingClock(), Elsewhere()), Gauges(CPU, HostClock(), None))
    limit_bytes = int(0.7 * plain_limit())
    with within(limit_bytes, tmp_path) as memory:
        disk = memory.tiers["disk"]
        assert isinstance(disk, DiskTier)

        def run_short_unless_something_moved() -> None:
            disk.drain()
            if not disk.written_bytes:
                raise torch.OutOfMemoryError(CUDA_MESSAGE.replace("GPU 0", "GPU 1"))

        program = Blocks(0, run_short_unless_something_moved)
        with pytest.raises(torch.OutOfMemoryError, match="GPU 1") as caught:
            program.run(0, memory.step)
        assert not isinstance(caught.value, OutOfMemoryError)
        assert memory._loop.ground is not None
        assert memory._loop.ground.device == CPU
        program.optimizer.zero_grad()
        program.run(0, memory.step)
        assert disk.written_bytes > 0


def plain_limit() -> int:
    """What a plain step needs."""
    program = Blocks()
    return plain_peak_bytes(observe_step(lambda: program.loss(0).backward(), CPU))


def test_what_fits_on_one_device_says_nothing_of_another(monkeypatch: pytest.MonkeyPatch) -> None:
    install(monkeypatch, Gauges(Elsewhere.device, LaggingClock(), Elsewhere()), Gauges(CPU, HostClock(), None))
    ground = TrainingDevice()
    ground.note_out_of_memory(torch.OutOfMemoryError(CUDA_MESSAGE), None, 1 << 40)
    assert ground.within(1 << 40) == ground.fits_bytes
    assert not ground.follow({CPU: 100})
    assert ground.within(1 << 40) == 1 << 40
