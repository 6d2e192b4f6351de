"""Errors and interrupts where a step begins, ends, or is planned for, and steps of which a budget sees only a part."""

from __future__ import annotations

import contextlib
import copy
import ctypes
import gc
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.observe.interrupts import Interrupts
from ebbtide.run import allocator, kinds, rehearsed
from ebbtide.run.resident import rss_bytes
from ebbtide.run.versions import ChangedError
from tests.conftest import hooks_left, modes_left
from tests.run.harness import FAST_DISK, HELD_MORE, SLOW_DISK, Guard
from tests.run.programs import Chain

MIB = 2**20


@pytest.fixture
def memory(tmp_path: Path) -> Iterator[ebbtide.Budget]:
    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as budget:
        yield budget


def once(patched: pytest.MonkeyPatch, where: Any, name: str, at: int = 1) -> None:
    """Interrupt call number ``at`` of a function, which is then what it was."""
    real, calls = getattr(where, name), 0

    def interrupted(*arguments: Any, **options: Any) -> Any:
        nonlocal calls
        calls += 1
        if calls == at:
            patched.setattr(where, name, real)
            raise KeyboardInterrupt(name)
        return real(*arguments, **options)

    patched.setattr(where, name, interrupted)


class Refilled:
    """The next batch comes into one buffer before each backward pass; what autograd saves was made of the last one."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.linear = nn.Linear(256, 8)
        self.buffer = np.zeros((4096, 256), np.uint8)
        self.x = torch.from_numpy(self.buffer)
        self.fetch(0)

    def fetch(self, index: int) -> None:
        self.buffer[...] = np.random.default_rng(index).integers(0, 255, self.buffer.shape, dtype=np.uint8)

    def step(self, index: int, guard: Guard) -> tuple[list[Tensor], str]:
        """Loss and gradients, and the error that was raised as the step ended."""
        refused = ""
        try:
            with guard():
                z = self.linear(self.x.float()) + 0.5
                extra = torch.zeros(2 * MIB).sum()
                self.fetch(index + 1)
                loss = z.square().mean() + extra
                loss.backward()
        except (BudgetError, KeyboardInterrupt) as error:
            refused = type(error).__name__
        found = [loss.detach(), *(p.grad.clone() for p in self.linear.parameters() if p.grad is not None)]
        self.linear.zero_grad()
        return found, refused


@pytest.mark.parametrize("interrupted", [False, True])
def test_what_was_seen_to_differ_is_never_used_unseen(
    interrupted: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There is no plan without it, or none was made: the loop goes on, and each step verifies."""
    plain, loop = Refilled(), Refilled()
    if interrupted:
        once(monkeypatch, kinds, "plan_for", at=2)
    refusals = []
    with ebbtide.Budget(11 * MIB, spill=tmp_path, machine=FAST_DISK) as memory:
        for index in range(6):
            expected, _ = plain.step(index, contextlib.nullcontext)
            found, refused = loop.step(index, memory.step)
            assert all(map(torch.equal, expected, found)), index
            refusals.append(refused)
    first = "KeyboardInterrupt" if interrupted else "BudgetError"
    assert refusals == ["", "", first, "BudgetError", "BudgetError", "BudgetError"]


@pytest.mark.parametrize("limit", ["65%", "85%"])
def test_what_later_steps_write_to_is_spared(limit: str, tmp_path: Path) -> None:
    """Nothing in plain PyTorch needs it any more; but values are computed from it. One step fails, and no other."""
    torch.manual_seed(0)
    first, second = torch.randn(64, 64, requires_grad=True), torch.randn(64, 64, requires_grad=True)

    def step(guard: Guard, writes: bool) -> list[Tensor]:
        x = torch.randn(4096, 64, generator=torch.Generator().manual_seed(1))
        with guard():
            h = x @ first
            outer = h.sin().sum()
            c = (h.detach() * 1.3 + second.sum()).tanh()
            for _ in range(5):
                c = (c * 1.1).tanh()
            inner = c.sum()
            del c
            grads = [*torch.autograd.grad(outer, first)]
            if writes:
                with torch.no_grad():
                    h.detach().zero_()
            return [*grads, *torch.autograd.grad(inner, second)]

    failed = 0
    with ebbtide.Budget(limit, spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(16):
            expected = step(contextlib.nullcontext, index >= 7)
            try:
                assert all(map(torch.equal, expected, step(memory.step, index >= 7)))
            except ChangedError:
                failed += 1
        assert memory.state == "planned"
    assert failed <= 1


class Frozen(nn.Module):
    """Norms in evaluation mode; nobody is told when they are trained: that counts no version."""

    def __init__(self) -> None:
        super().__init__()
        self.convolutions = nn.ModuleList([nn.Conv2d(8, 8, 3, padding=1) for _ in range(4)])
        self.norms = nn.ModuleList([nn.BatchNorm2d(8) for _ in range(4)])
        self.eval()

    def forward(self, x: Tensor) -> Tensor:
        for convolution, norm in zip(self.convolutions, self.norms, strict=True):
            x = torch.sigmoid(norm(convolution(x)))
        return x


@pytest.mark.parametrize("way", ["recalibrated", "thawed"])
@pytest.mark.parametrize("limit", ["80%", "60%"])
def test_norms_that_later_steps_train(limit: str, way: str, tmp_path: Path) -> None:
    """Between the forward and the backward pass, in steps 8 and 9 alone."""

    def step(model: Frozen, index: int, guard: Guard) -> list[Tensor]:
        generator = torch.Generator().manual_seed(index)
        first, second = (torch.randn(16, 8, 16, 16, generator=generator) for _ in range(2))
        trains = index in (8, 9)
        with guard():
            loss = model(first).square().mean()
            if way == "thawed":
                loss = loss + model.train(trains)(2 * second + 1).square().mean()
            elif trains:
                with torch.no_grad():
                    model.train()(3 * second + 1)
            model.eval()
            loss.backward()
        found = [loss.detach(), *(p.grad.clone() for p in model.parameters() if p.grad is not None)]
        model.zero_grad()
        return found + [buffer.clone() for buffer in model.buffers()]

    torch.manual_seed(0)
    plain = Frozen()
    planned = copy.deepcopy(plain)
    with ebbtide.Budget(limit, spill=tmp_path, machine=SLOW_DISK) as memory, warnings.catch_warnings():
        warnings.filterwarnings("ignore", HELD_MORE)
        for index in range(11):
            expected = step(plain, index, contextlib.nullcontext)
            assert all(map(torch.equal, expected, step(planned, index, memory.step))), index
            if index == 7:
                assert memory.plan is not None
                assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)


@pytest.mark.parametrize("machine", [SLOW_DISK, FAST_DISK], ids=["slow", "fast"])
@pytest.mark.parametrize("since", [0, 7])
def test_a_backward_pass_in_inference_mode(since: int, machine: Machine, tmp_path: Path) -> None:
    plain, planned = Chain(), Chain()
    with ebbtide.Budget("60%", spill=tmp_path, machine=machine) as memory:
        for index in range(10):
            found = []
            for program, guard in ((plain, contextlib.nullcontext), (planned, memory.step)):
                with guard():
                    loss = program.model(program.data(index, 256, 64)).square().mean()
                    with torch.inference_mode(index >= since):
                        loss.backward()
                found.append([p.grad.clone() for p in program.model.parameters() if p.grad is not None])
                program.model.zero_grad()
            assert len(found[0]) > 0
            assert all(map(torch.equal, *found)), index
        assert memory.state == "planned"


def test_a_step_that_was_not_entered_cannot_be_left(memory: ebbtide.Budget) -> None:
    context = memory.step()
    with pytest.raises(ebbtide.StepError, match="not under way"):
        context.__exit__(None, None, None)
    with context:
        pass
    with pytest.raises(ebbtide.StepError, match="not under way"):
        context.__exit__(None, None, None)


@pytest.mark.usefixtures("plans_stay")
class TestInterrupts:
    def attempt(self, program: Chain, index: int, guard: Guard) -> bool:
        """Run a step; whether it was interrupted."""
        try:
            program.compute(index, guard)
        except KeyboardInterrupt:
            return True
        finally:
            program.optimizer.zero_grad()
        return False

    def goes_on(self, program: Chain, memory: ebbtide.Budget) -> None:
        assert (hooks_left(), modes_left()) == (0, 0)
        for index in range(12):
            self.attempt(program, index, memory.step)
        assert memory.state == "planned"
        assert (hooks_left(), modes_left()) == (0, 0)

    def test_as_an_observed_step_begins(self, memory: ebbtide.Budget, monkeypatch: pytest.MonkeyPatch) -> None:
        program = Chain()
        once(monkeypatch, gc, "collect")
        assert self.attempt(program, 0, memory.step)
        self.goes_on(program, memory)

    @pytest.mark.parametrize("name", ["place", "keep_local"])
    def test_as_a_rehearsed_step_ends(self, name: str, memory: ebbtide.Budget, monkeypatch: pytest.MonkeyPatch) -> None:
        program = Chain()
        for index in range(12):
            if memory.state == "rehearse":
                break
            self.attempt(program, index, memory.step)
        once(monkeypatch, rehearsed, name)
        assert self.attempt(program, 0, memory.step) == (allocator.arena_probe() is not None)
        self.goes_on(program, memory)

    @pytest.mark.parametrize("name", ["plan_for", "simulate", "write_script"])
    def test_while_a_plan_is_made(self, name: str, memory: ebbtide.Budget, monkeypatch: pytest.MonkeyPatch) -> None:
        program = Chain()
        once(monkeypatch, kinds, name)
        interrupted = [self.attempt(program, index, memory.step) for index in range(2)]
        assert any(interrupted)
        self.goes_on(program, memory)

    def test_a_context_that_is_entered_twice(self, memory: ebbtide.Budget) -> None:
        """The step that is under way goes on."""
        context = memory.step()
        with context, pytest.raises(ebbtide.StepError, match="under way already"), context:
            pass
        self.goes_on(Chain(), memory)

    def test_looks_that_overlap_leave_nothing_behind(self) -> None:
        hook, first, second = sys.unraisablehook, Interrupts(), Interrupts()
        for _ in range(3):
            first.enter()
            second.enter()
            first.leave()
            second.leave()
        assert sys.unraisablehook is hook


@pytest.mark.parametrize("rows", [0, 32])
def test_a_share_is_of_the_larger_of_the_first_steps(rows: int, tmp_path: Path) -> None:
    """The second one may be a short batch, or be skipped."""
    limits = []
    for second in (1024, rows):
        torch.manual_seed(0)
        net = nn.Sequential(*(part for _ in range(6) for part in (nn.Linear(64, 64), nn.Tanh())))
        with ebbtide.Budget("80%", spill=tmp_path, machine=FAST_DISK) as memory:
            for index in range(8):
                with memory.step():
                    count = second if index == 1 else 1024
                    if count:
                        net(torch.randn(count, 64)).square().mean().backward()
                net.zero_grad()
            assert memory.state not in ("observe", "idle")
            limits.append(memory.limit_bytes)
    assert limits[0] == limits[1]


def test_steps_in_which_nothing_happens_fix_no_share(tmp_path: Path) -> None:
    net = nn.Sequential(nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 64))
    with ebbtide.Budget("90%", spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(3):
            with memory.step():
                pass
        limit = memory.limit_bytes
        assert limit is None
        for _ in range(6):
            with memory.step():
                net(torch.randn(1024, 64)).square().mean().backward()
            net.zero_grad()
        assert memory.limit_bytes is not None
        assert memory.limit_bytes > 0


@pytest.mark.parametrize("fails", [False, True])
def test_an_observed_step_keeps_no_graph(fails: bool, tmp_path: Path) -> None:
    """Its last op is one that a recorder follows to its node."""
    first, second = nn.Linear(64, 512), nn.Linear(512, 64)
    x, mask, seen = torch.randn(64, 64), torch.rand(64, 64) < 0.1, []

    def step(guard: Guard) -> None:
        with guard():
            h = torch.tanh(first(x))
            seen.append(weakref.ref(h.untyped_storage()))
            scores = second(h).masked_fill(mask, torch.tensor(-1e9))
            if fails:
                raise ValueError(scores.shape)

    with ebbtide.Budget("1GiB", spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(4):
            with contextlib.suppress(ValueError):
                step(memory.step)
    gc.collect()
    assert [reference() for reference in seen] == [None] * 4


class TestHooks:
    """Where nothing binds, a step's hooks come off as the first tensor is saved."""

    def energy(self, points: Tensor, weight: Tensor) -> Tensor:
        return torch.tanh(points @ weight).sum()

    def outside(self, points: Tensor, weight: Tensor, guard: Guard) -> Tensor:
        """The forward pass comes before the step: what the step saves, it saves within a backward pass."""
        energy = self.energy(points, weight)
        with guard():
            (force,) = torch.autograd.grad(energy, points, create_graph=True)
            (product,) = torch.autograd.grad(force, points, grad_outputs=weight[:1].expand_as(force))
        return product

    def checkpointed(self, points: Tensor, weight: Tensor, guard: Guard) -> Tensor:
        with guard():
            energy: Any = checkpoint(self.energy, points, weight, use_reentrant=False)
            (force,) = torch.autograd.grad(energy, points, create_graph=True)
            (found,) = torch.autograd.grad(force.sum(), points)
        return found

    @pytest.mark.parametrize("name", ["outside", "checkpointed"])
    def test_they_stay_off(self, name: str, tmp_path: Path) -> None:
        program: Callable[..., Tensor] = getattr(self, name)
        points, weight = torch.randn(32, 16, requires_grad=True), torch.randn(16, 16)
        expected = program(points, weight, contextlib.nullcontext)
        with ebbtide.Budget("1GiB", spill=tmp_path, machine=FAST_DISK) as memory:
            for _ in range(30):
                assert torch.equal(expected, program(points, weight, memory.step))
                assert hooks_left() == 0
            assert memory.state == "idle"

    @pytest.mark.parametrize("limit", ["60%", "1GiB"])
    def test_those_of_the_user_s_may_stay_on(self, limit: str, tmp_path: Path) -> None:
        """They begin in a step, and end behind it."""
        seen: list[Tensor] = []

        def pack(tensor: Tensor) -> Tensor:
            seen.append(tensor)
            return tensor

        with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as memory:
            program = Chain()
            for index in range(8):
                hooks = saved_tensors_hooks(pack, lambda x: x)
                with memory.step():
                    program.model(program.data(index, 256, 64)).square().mean().backward()
                    hooks.__enter__()
                torch.ones(3, requires_grad=True).sin()
                hooks.__exit__(None, None, None)
                assert hooks_left() == 0
        assert len(seen) == 8

    def test_those_that_were_on_before_are_not_asked(self, tmp_path: Path) -> None:
        """As in a step in which something binds; otherwise gradients would be others from some step on."""
        asked, program, gradients = list[int](), Chain(), list[list[Tensor]]()

        def pack(tensor: Tensor) -> Tensor:
            asked.append(len(gradients))
            return tensor.bfloat16()

        with (
            ebbtide.Budget("150%", spill=tmp_path, machine=FAST_DISK) as memory,
            saved_tensors_hooks(pack, lambda packed: packed.float()),
        ):
            for _ in range(24):
                with memory.step():
                    program.model(program.data(0, 256, 64)).square().mean().backward()
                gradients.append([p.grad.clone() for p in program.model.parameters() if p.grad is not None])
                program.model.zero_grad()
            assert memory.state == "idle"
        assert asked == []
        assert all(all(map(torch.equal, found, gradients[0])) for found in gradients)


def test_a_backward_pass_in_another_thread_is_told_of(tmp_path: Path) -> None:
    weight = nn.Parameter(torch.randn(1000))
    with ThreadPoolExecutor(1) as pool, ebbtide.Budget("1GiB", spill=tmp_path, machine=FAST_DISK) as memory:
        for index in range(4):
            told = pytest.warns(UserWarning, match="ran in another thread") if index < 2 else contextlib.nullcontext()
            with told, memory.step():
                loss = weight.tanh().sum()
                pool.submit(loss.backward).result()
            expected = 1 - weight.detach().tanh().square()
            assert weight.grad is not None
            assert torch.allclose(weight.grad, expected)
            weight.grad = None


def resident() -> int:
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return rss_bytes()


@pytest.mark.skipif(allocator.arena_probe() is None, reason="needs a C++ compiler")
@pytest.mark.parametrize("limit", ["70%", "100%"])
def test_a_closed_budget_keeps_no_pages(limit: str, tmp_path: Path) -> None:
    weight = torch.randn(MIB // 2, requires_grad=True)
    with ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(8):
            with memory.step():
                h = weight
                for _ in range(20):
                    h = torch.sigmoid(torch.tanh(h))
                h.sum().backward()
            weight.grad = None
    closed = resident()
    allocator.trim()
    assert closed - resident() < 8 * MIB
