"""What graphs hold to the end of a step leaves where no plan meets the limit without that; it is never lost."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Offload
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.run.looks import MOST_SKIPPED
from ebbtide.run.meter import PeakMeter
from tests.run.backends.test_programs import TIERS, streams
from tests.run.backends.threads import InlineBackend
from tests.run.harness import (
    FAST_DISK,
    NO_DISK,
    SLOW_DISK,
    STEPS,
    Guard,
    Program,
    Record,
    allowed_raises,
    assert_identical_within,
    compare,
    once,
    plain_peak_bytes,
    run_plain,
)
from tests.run.programs import mlp

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

BATCH = 1024
MACHINES = {"fast": FAST_DISK, "slow": SLOW_DISK}


class Retained(Program):
    """A loop that keeps its graph for no reason, until the next step makes another one."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 16)

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            self.last = self.model(self.data(index, BATCH, 64)).square().mean()
            self.last.backward(retain_graph=True)
        return {"loss": self.last}


class Dropped(Retained):
    """The same with dropout, whose masks nothing can make again."""

    def build(self) -> nn.Module:
        inner = [each for _ in range(4) for each in (nn.Linear(128, 128), nn.GELU(), nn.Dropout(0.2))]
        return nn.Sequential(nn.Linear(64, 128), *inner)


class Looked(Program):
    """A loop that looks at what the model says of other data, with gradients on, and keeps that."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 16)

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            self.seen = self.model(self.data(1000 + index, BATCH, 64))
            loss = self.model(self.data(index, BATCH, 64)).square().mean()
            loss.backward()
        return {"loss": loss, "seen": self.seen}


class Functions(Program):
    """What `Retained` and `Looked` do, in functions whose graphs end with them, before the optimizer's step."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 16)

    def look(self, index: int) -> float:
        y = self.model(self.data(1000 + index, BATCH, 64))
        return float(y.square().mean().item())

    def train(self, index: int) -> Tensor:
        loss = self.model(self.data(index, BATCH, 64)).square().mean()
        loss.backward(retain_graph=True)
        return loss.detach()

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            seen = self.look(index)
            loss = self.train(index)
            self.optimizer.step()
        return {"loss": loss, "seen": torch.tensor(seen)}

    def update(self) -> None:
        self.optimizer.zero_grad()


class AskedLater(Program):
    """A loop that goes through its graph once more after the step, now and then."""

    steady = False

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 16)

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            y = self.model(self.data(index, BATCH, 64))
            y.square().mean().backward(retain_graph=True)
        if index % 2:
            y.abs().sum().backward()
        return {"y": y}


class AskedNow(AskedLater):
    """A loop that goes through its graph once more within the step, now and then."""

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            self.y = self.model(self.data(index, BATCH, 64))
            self.y.square().mean().backward(retain_graph=True)
            if index in (4, 6):
                self.y.abs().sum().backward(retain_graph=True)
        return {"y": self.y}


class AskedByAnotherStep(Program):
    """A loop of two steps: the second one goes through the graph of the first one, and one of its own."""

    steady = False

    def build(self) -> nn.Module:
        return nn.ModuleList([mlp(64, 128, 128, 128, 16), mlp(16, 128, 128, 16)])

    def compute(self, index: int, guard: Guard) -> Record:
        first, second = self.model
        with guard():
            y = first(self.data(index, BATCH, 64))
            loss = y.square().mean()
            loss.backward(retain_graph=True)
        with guard():
            (loss + second(y).square().mean()).backward()
        return {"loss": loss}


class Taught(Program):
    """A pupil whose targets are features of a teacher, of which a graph is made, too, for no reason: it lives on as the
    pass through the pupil's lets go of that, and each of the targets is asked for in it."""

    def build(self) -> nn.Module:
        return nn.ModuleList([nn.ModuleList([nn.Linear(64, 64) for _ in range(6)]) for _ in range(2)])

    def train(self, index: int) -> tuple[Tensor, Tensor]:
        taught = seen = self.data(index, 2 * BATCH, 64)
        loss = torch.zeros(())
        for teacher, pupil in zip(*self.model, strict=True):
            taught, seen = torch.tanh(teacher(taught)), torch.tanh(pupil(seen))
            loss = loss + F.mse_loss(seen, taught.detach())
        loss.backward()
        return loss.detach(), taught.mean().detach()

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            loss, mean = self.train(index)
        return {"loss": loss, "mean": mean}


class Skipping(Program):
    """A loop that skips some batches, of which there is no backward pass then."""

    skipped: frozenset[int] = frozenset()

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 16)

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            loss = self.model(self.data(index, BATCH, 64)).square().mean()
            if index not in self.skipped:
                loss.backward()
        return {"loss": loss}


class SkippingSecond(Skipping):
    skipped = frozenset({1, 5})


class SkippingFirst(Skipping):
    skipped = frozenset({0, 1, 2, 6})


class PassBehind(Program):
    """A loop whose backward passes come behind its steps."""

    def build(self) -> nn.Module:
        return mlp(64, 128, 128, 128, 128, 16)

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            loss = self.model(self.data(index, BATCH, 64)).square().mean()
        loss.backward()
        return {"loss": loss}


PROGRAMS: list[Callable[[], Program]] = [
    Retained,
    Dropped,
    Looked,
    Functions,
    AskedLater,
    AskedNow,
    AskedByAnotherStep,
    Taught,
]


@once
def plain(build: Callable[[], Program]) -> list[Record]:
    """What plain PyTorch computes."""
    return run_plain(build)


@pytest.mark.parametrize("machine", MACHINES)
@pytest.mark.parametrize("limit", ["60%", "35%"])
@pytest.mark.parametrize("build", PROGRAMS)
def test_identical(build: Callable[[], Program], limit: str, machine: str, tmp_path: Path) -> None:
    trial = assert_identical_within(
        build, plain(build), limit, MACHINES[machine], tmp_path, may_raise_limit=allowed_raises(build)
    )
    if build in (Retained, Dropped, Looked, Functions, Taught):
        assert trial.states[-1] == "planned"
        assert any(isinstance(decision, Offload) for decision in trial.decisions)


@pytest.mark.parametrize("kind", TIERS)
@pytest.mark.parametrize("build", PROGRAMS)
def test_identical_on_streams(build: Callable[[], Program], kind: str, tmp_path: Path) -> None:
    with InlineBackend(PROGRAMS.index(build)) as backend:
        prepare = streams(backend, kind, tmp_path)
        assert_identical_within(
            build, plain(build), "50%", FAST_DISK, tmp_path, prepare, may_raise_limit=allowed_raises(build)
        )


@pytest.mark.parametrize("machine", [FAST_DISK, NO_DISK], ids=["disk", "none"])
@pytest.mark.parametrize("build", [SkippingSecond, SkippingFirst])
def test_skipped_batches_end_no_training(build: type[Skipping], machine: Machine, tmp_path: Path) -> None:
    """Not even where no plan for them meets the limit: they are beginnings of other steps."""
    program, limit_bytes = build(), int(0.75 * plain_peak_bytes(Skipping))
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=machine) as memory:

        @contextlib.contextmanager
        def metered() -> Iterator[None]:
            with PeakMeter() as meter, memory.step():
                yield
            latest = memory.measured[-1]  # the first one that is not skipped leaves a plan for those that are
            assert meter.peak_bytes <= limit_bytes or latest.state == "observe" or latest.left

        for index, record in enumerate(plain(build)):
            compare(record, program.run(index, metered), f"step {index}")
        assert any(one.state in ("verify", "audit") and not one.left for one in memory.measured)
        assert sum(one.state == "observe" for one in memory.measured) <= 5
        assert memory.plan is not None
        assert memory.plan.binds


def peaks_after(skipped: int, tmp_path: Path) -> tuple[list[int], list[str | None], int]:
    """What steps hold after so many ``skipped`` ones, what they are for, and the limit."""
    torch.manual_seed(0)
    model, batch, peaks = mlp(*(256,) * 7), torch.randn(3072, 256), []
    with PeakMeter() as meter:
        model(batch).square().mean().backward()
    model.zero_grad()
    limit_bytes = int(0.6 * meter.peak_bytes)
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        for number in range(skipped + 4):
            with PeakMeter() as meter, memory.step():
                loss = model(batch).square().mean()
                if number >= skipped:
                    loss.backward()
            del loss
            model.zero_grad()
            peaks.append(meter.peak_bytes)
        return peaks[skipped:], [measured.state for measured in memory.measured[skipped:]], limit_bytes


@pytest.mark.parametrize("skipped", [2, MOST_SKIPPED])
def test_the_first_step_that_is_not_skipped_holds_what_the_first_of_all_does(skipped: int, tmp_path: Path) -> None:
    """A plan for those that are would leave it no room for its backward pass."""
    peaks, states, limit_bytes = peaks_after(skipped, tmp_path)
    assert states[0] == "observe"
    assert states[1] != "observe"
    assert peaks[0] <= peaks_after(0, tmp_path)[0][0]
    assert max(peaks[1:]) <= limit_bytes


def test_steps_that_never_have_a_backward_pass(tmp_path: Path) -> None:
    """Where nothing can leave, that is said once it cannot be that they were all skipped."""
    program, limit_bytes = PassBehind(), int(0.75 * plain_peak_bytes(Skipping))
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=NO_DISK) as memory:
        for index in range(MOST_SKIPPED + 1):
            program.run(index, memory.step)
        with pytest.raises(BudgetError, match="no backward pass"):
            program.run(MOST_SKIPPED + 1, memory.step)
    assert len(memory.measured) == MOST_SKIPPED + 2  # two looks, before the first plan


def test_a_pass_that_comes_behind_its_step(tmp_path: Path) -> None:
    limit_bytes = int(0.75 * plain_peak_bytes(Skipping))
    expected = run_plain(PassBehind, STEPS + MOST_SKIPPED)
    trial = assert_identical_within(PassBehind, expected, limit_bytes, FAST_DISK, tmp_path, metered=False)
    assert trial.states[-1] == "planned"
    assert any(isinstance(decision, Offload) for decision in trial.decisions)


@pytest.mark.parametrize("keeps", [Retained, Looked])
def test_half_of_the_peak_is_enough(keeps: Callable[[], Program], tmp_path: Path) -> None:
    """Of what plain PyTorch needs, though nothing but the graph makes it need so much."""
    program = keeps()
    with ebbtide.Budget("50%", spill=tmp_path, machine=FAST_DISK) as memory:

        @contextlib.contextmanager
        def metered() -> Iterator[None]:
            with PeakMeter() as meter, memory.step():
                yield
            peaks.append(meter.peak_bytes)

        peaks: list[int] = []
        for index in range(6):
            program.run(index, metered)
        assert memory.plan is not None
        assert max(peaks[2:]) <= memory.plan.limit_bytes < 0.51 * memory.plan.plain_peak_bytes
        step = memory.observed
        assert step is not None
        pairs = zip(step.absences, memory.plan.decisions, strict=True)
        finals = [decision for absence, decision in pairs if step.is_final(absence)]
        assert any(isinstance(decision, Offload) for decision in finals)
        assert "torch.no_grad()" in str(memory.report())


def test_what_left_for_good_is_asked_for_after_the_budget_is_closed(tmp_path: Path) -> None:
    def gradients(guard: Guard) -> list[Tensor]:
        torch.manual_seed(0)
        model, data = mlp(64, 128, 128, 128, 128, 16), torch.randn(BATCH, 64)
        for _ in range(6):
            model.zero_grad()
            with guard():
                loss = model(data).square().mean()
                loss.backward(retain_graph=True)
        model.zero_grad()
        loss.backward()
        return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]

    expected = gradients(contextlib.nullcontext)
    with ebbtide.Budget("40%", spill=tmp_path, machine=FAST_DISK) as memory:
        found = gradients(memory.step)
        assert memory.state == "planned"
    assert all(torch.equal(one, other) for one, other in zip(expected, found, strict=True))
