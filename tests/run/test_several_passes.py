"""A graph that is kept for another backward pass: what the first one has asked for leaves again until the next one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import itertools
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
import tests.run.programs_rare  # noqa: F401  (registers its programs)
from ebbtide.decisions import Decision, Keep, Offload, Plan, Recompute
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine, Tier
from ebbtide.observe.recorder import Recorder
from ebbtide.plan import plain_peak_bytes, simulate, solve
from ebbtide.plan.problem import Facts
from ebbtide.plan.recipes import deeper_recipes, find_recipes
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import PeakMeter
from ebbtide.run.safe import SafePolicy
from ebbtide.run.tiers import DiskTier
from ebbtide.run.tiers.transfers import Load
from ebbtide.step import Step
from tests.conftest import QUICK_SECONDS
from tests.run.harness import (
    FAST_DISK,
    SLOW_DISK,
    Guard,
    Program,
    Record,
    assert_identical_within,
    paper_machine,
    run_plain,
)
from tests.run.programs import PROGRAMS

FAIR_DISK = paper_machine("ram", Tier("disk", "disk"), bandwidth_bytes_per_second=1e8, latency_seconds=1e-6)
"""A value takes longer to it than most ops take: plans offload some values and recompute others."""

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


def between_passes(step: Step, decisions: tuple[Decision, ...]) -> list[Decision]:
    """What a plan does with values that were away before."""
    values = [absence.value for absence in step.absences]
    return [decision for number, decision in enumerate(decisions) if values[number] in values[:number]]


def observed(program: Program, index: int = 0) -> Step:
    """What lies inside the step of a program, while nothing moves."""
    recorder = Recorder()
    policy = SafePolicy(None, lambda: pytest.fail("something moved"), recorder)

    @contextlib.contextmanager
    def guard() -> Iterator[None]:
        with torch.autograd.graph.saved_tensors_hooks(policy.pack, policy.unpack), recorder:
            yield

    program.compute(index, guard)
    return recorder.finish()


def timeless(step: Step) -> Step:
    """What a step did, however long it took."""
    ops = tuple(dataclasses.replace(op, duration_seconds=0.0, workspace_bytes=0) for op in step.ops)
    return dataclasses.replace(step, ops=ops)


@pytest.mark.parametrize("share", [0.8, 0.6, 0.4])
@pytest.mark.parametrize("name", ["TwoLosses", "TaskGradients", "GradientPenalty", "CheckpointedReentrant"])
def test_a_step_is_observed_as_it_is_without_a_budget(name: str, share: float, tmp_path: Path) -> None:
    """Whatever the safe policy moved in it, and however often."""
    program = PROGRAMS[name]()
    program.run(0, contextlib.nullcontext)
    plain = observed(program, 1)
    limit = int(share * plain_peak_bytes(plain))  # of a percentage nothing would be known yet
    with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as memory, contextlib.suppress(BudgetError):
        program = PROGRAMS[name]()
        for index in range(2):
            program.run(index, memory.step)
    disk = memory.tiers["disk"]
    assert isinstance(disk, DiskTier)
    assert disk.written_bytes > 0
    assert memory.observed is not None
    assert timeless(memory.observed) == timeless(plain)


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK])
def test_what_an_earlier_pass_made_is_computed_again(machine: Machine, tmp_path: Path) -> None:
    """By ops of that pass, captured as it ran; nothing has to wait for a slow disk."""
    kind = PROGRAMS["Derivatives"]
    found: list[ebbtide.Budget] = []
    trial = assert_identical_within(kind, run_plain(kind), "60%", machine, tmp_path, found.append, may_raise_limit=1)
    step = found[-1].observed
    assert step is not None
    again = [decision for decision in trial.decisions if isinstance(decision, Recompute)]
    assert any(step.ops[tick].phase == "backward" for decision in again for tick in decision.ops)
    assert not trial.banned
    if machine is SLOW_DISK:
        assert not any(isinstance(decision, Offload) for decision in trial.decisions)


@pytest.fixture
def steady_plans(monkeypatch: pytest.MonkeyPatch, quick_plans: Callable[..., Plan]) -> None:
    """Plans for steps whose ops take the same time each: a clock does not decide what happens to which value."""

    def steady(step: Step, *arguments: Any, **options: Any) -> Plan:
        ops = tuple(dataclasses.replace(op, duration_seconds=1e-4, workspace_bytes=0) for op in step.ops)
        return quick_plans(dataclasses.replace(step, ops=ops), *arguments, **options)

    monkeypatch.setattr("ebbtide.run.solving.solve", steady)


@pytest.mark.usefixtures("steady_plans")
@pytest.mark.parametrize(("machine", "expected"), [(FAST_DISK, Offload), (SLOW_DISK, Recompute)])
@pytest.mark.parametrize("name", ["TwoLosses", "TaskGradients"])
def test_values_leave_again(name: str, machine: Machine, expected: type[Decision], tmp_path: Path) -> None:
    kind: type[Program] = PROGRAMS[name]
    trial = assert_identical_within(kind, run_plain(kind), "70%", machine, tmp_path)
    step = observed(kind())
    assert len(step.absences) == len(trial.decisions)
    assert any(isinstance(decision, expected) for decision in between_passes(step, trial.decisions))


@pytest.mark.usefixtures("steady_plans")
def test_one_value_moves_and_is_recomputed(tmp_path: Path) -> None:
    """In one step of one plan a value goes different ways, and comes back the same."""
    kind = PROGRAMS["TaskGradients"]
    step = observed(kind())
    found = set()
    for limit, machine in itertools.product(["70%", "80%", "85%"], [FAST_DISK, FAIR_DISK]):
        trial = assert_identical_within(kind, run_plain(kind), limit, machine, tmp_path)
        ways: dict[int, list[type[Decision]]] = {}
        for absence, decision in zip(step.absences, trial.decisions, strict=True):
            ways.setdefault(absence.value, []).append(type(decision))
        found |= {pair for kinds in ways.values() for pair in itertools.pairwise(kinds)}
    assert {(Recompute, Offload), (Offload, Recompute), (Offload, Offload), (Keep, Recompute)} <= found


def test_observed_steps_stay_near_the_budget(tmp_path: Path) -> None:
    program = PROGRAMS["TaskGradients"]()
    with PeakMeter() as plain:
        program.compute(0, contextlib.nullcontext)
    limit = int(0.7 * plain.peak_bytes)
    with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as memory, PeakMeter() as meter:
        program.compute(0, memory.step)
    assert meter.peak_bytes < limit + 0.1 * plain.peak_bytes


def test_passes_of_two_threads_ask_for_one_value(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """While one of them waits for it to come back, the other one does, too."""
    asked, wait = threading.Event(), Load.wait

    def wait_long(load: Load) -> torch.UntypedStorage:
        asked.set()
        time.sleep(0.05)
        return wait(load)

    monkeypatch.setattr(Load, "wait", wait_long)
    monkeypatch.setattr(Kind, "is_timed", False)  # hooks are short where nobody takes the time
    one, two = torch.randn(2, 64, requires_grad=True)

    def gradients(index: int, guard: Guard) -> list[torch.Tensor]:
        asked.clear()
        with guard(), concurrent.futures.ThreadPoolExecutor(2) as threads:
            value = torch.rand(4096, 64, generator=torch.Generator().manual_seed(index))
            losses = [(value * each).sum() for each in (one, two)]
            del value
            _, large, _ = one * one, torch.ones(4, 4096, 64), one * one  # what is saved is when values may leave
            _, large = one * one, large + large
            first = threads.submit(torch.autograd.grad, losses[0], one)
            asked.wait(0.2)
            second = threads.submit(torch.autograd.grad, losses[1], two)
            return [*first.result(), *second.result()]

    with ebbtide.Budget("93%", spill=tmp_path, machine=FAST_DISK) as memory:
        for index in range(6):
            expected = gradients(index, contextlib.nullcontext)
            told = pytest.warns(match="ran in another thread") if index < 2 else contextlib.nullcontext()
            with told:
                found = gradients(index, memory.step)
            assert all(map(torch.equal, found, expected))
        assert memory.state == "planned"
        assert memory.plan is not None
        assert any(isinstance(decision, Offload) for decision in memory.plan.decisions)
        assert asked.is_set()


class Denoised(Program):
    """Two losses, and a pass for each. What the last node of all saves is the noise that was to be found, which nobody
    has written to, so that the op which saves it might do that yet: backward passes make no node that tells of its
    end."""

    def build(self) -> nn.Module:
        shapes = [(256,)] * 8 + [(64, 256)]
        return nn.ParameterList([nn.Parameter(0.1 * torch.randn(shape)) for shape in shapes])

    def losses(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        *scales, weight = self.model
        h, noisy = self.data(index, 256, 256), self.data(index + 100, 256, 64)
        for scale in scales:
            h = torch.tanh(h * (1 + scale))
        noise = 0.5 * self.data(index + 200, 256, 256)
        return h.square().mean(), F.mse_loss(noisy @ weight, noise)

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            first, second = self.losses(index)
            first.backward()
            second.backward()
        return {"first": first, "second": second}


def test_what_the_last_node_saves_is_away_in_the_pass_before_its_own(tmp_path: Path) -> None:
    trial = assert_identical_within(Denoised, run_plain(Denoised), 1 << 16, FAST_DISK, tmp_path, may_raise_limit=1)
    assert any(isinstance(decision, Offload) for decision in trial.decisions)


def recomputing(step: Step, machine: Machine, limit_bytes: int, **options: Any) -> Plan:
    """A plan that computes again whatever it can, from as far back as it may."""
    plan, facts = solve(step, machine, limit_bytes, **options | {"seconds": QUICK_SECONDS}), Facts.of(step)
    recipes = find_recipes(step, options.get("banned", frozenset()))
    decisions = tuple(
        decision if ops is None else Recompute([ops, *deeper_recipes(facts, absence, ops)][-1])
        for decision, absence, ops in zip(plan.decisions, step.absences, recipes, strict=True)
    )
    peak = simulate(step, machine, decisions).peak_bytes
    return dataclasses.replace(plan, decisions=decisions, peak_bytes=peak, limit_bytes=max(peak, limit_bytes))


def test_what_was_made_again_for_a_pass_and_is_gone_is_known(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nobody keeps the energy whose gradients are forces: its nodes are gone before what follows from them is saved,
    and what they had saved was read in another place."""
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(128, 128), nn.Tanh(), nn.Linear(128, 128)), torch.randn(256, 128)

    def gradients(guard: Guard) -> list[Tensor]:
        with guard():
            h = model(x)
            (forces,) = torch.autograd.grad((h.cos() * h).sum(), h, create_graph=True)
            loss = (forces.tanh() * forces.tanh().sigmoid()).mean()
            del forces
            return list(torch.autograd.grad(loss, list(model.parameters())))

    expected = gradients(contextlib.nullcontext)
    monkeypatch.setattr("ebbtide.run.solving.solve", recomputing)
    with ebbtide.Budget("92%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for _ in range(6):
            assert all(map(torch.equal, expected, gradients(memory.step)))
    assert [measured.state for measured in memory.measured].count("verify") == 1
