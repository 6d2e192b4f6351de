"""Kinds of steps that are the same until a backward pass begins: whether that keeps its graph tells them apart."""

from __future__ import annotations

import contextlib
import random
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, cast

import pytest
import torch
from torch import Tensor

import ebbtide
from ebbtide.machine import Machine
from ebbtide.run.meter import PeakMeter
from ebbtide.run.tiers import DiskTier
from tests.run.harness import FAST_DISK, SLOW_DISK, Guard
from tests.run.inside import kinds_of, latest_kind
from tests.run.test_kinds import BATCH, EVERY, WIDTH, Blocks, Seen, gradients, plain_peak

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


Sort = Literal["one", "norm", "part", "kept", "two"]
"""One backward pass; before it one for the norm of a gradient; only that, through the last block; one that keeps its
graph for nothing; and one for each of two losses of the same features."""

ONES: Sequence[Sort] = ["one"] * 28
NORMS_TOO: Sequence[Sort] = ["one", "norm"] * 6


def step(net: Blocks, data: Tensor, sort: Sort) -> Tensor:
    """A step of any sort. Returns the norm, if it is one with such."""
    loss, norm = net(data, EVERY, 0), torch.zeros(())
    weight = net.get_parameter(f"blocks.{EVERY[-1]}.2.weight" if sort == "part" else "blocks.0.0.weight")
    if sort in ("norm", "part"):
        norm = torch.autograd.grad(loss, weight, retain_graph=sort == "norm")[0].norm()
    if sort == "two":
        (2 * loss).backward(retain_graph=True)
        loss = loss.exp()
    if sort != "part":
        loss.backward(retain_graph=sort == "kept")
    return norm


def run(memory: ebbtide.Budget, steps: Sequence[Sort]) -> list[Seen]:
    """Steps under a budget; what they compute is what they do without."""
    plain, model, found = Blocks(), Blocks(), []
    data = torch.randn(BATCH, WIDTH, generator=torch.Generator().manual_seed(1))
    for sort in steps:
        expected, state = step(plain, data, sort), memory.state
        with PeakMeter() as meter, memory.step():
            norm = step(model, data, sort)
        assert torch.equal(norm, expected)
        for one, other in zip(gradients(plain), gradients(model), strict=True):
            assert one is None or (other is not None and torch.equal(one, other))
        found.append(Seen(state, meter.peak_bytes, memory.measured[-1].left, state not in ("observe", "verify")))
    return found


def states(memory: ebbtide.Budget) -> list[str]:
    """What the next step of each kind is for."""
    return [kind.state for kind in kinds_of(memory)]


@pytest.mark.parametrize("stay", [True, False], ids=["plans stay", "plans change"])
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast disk", "slow disk"])
def test_steps_that_save_the_same_and_ask_for_it_otherwise_are_kinds(
    machine: Machine, stay: bool, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """Taken for steps of the larger kind that ended, those with a pass less were run by its plan for good. Where that
    has back in the first pass what it needs in the second, they held more than the limit beside their gradients."""
    if stay:
        request.getfixturevalue("plans_stay")
    with ebbtide.Budget(int(0.6 * plain_peak(EVERY)), spill=tmp_path, machine=machine) as memory:
        found = run(memory, ["norm" if number % 3 == 2 else "one" for number in range(48)])
        assert [seen for seen in found[12:] if seen.left or seen.peak_bytes > (memory.limit_bytes or 0)] == []
        if stay:
            assert memory.state == "planned"
            assert "verify" not in states(memory), "not each of the kinds was followed"


@pytest.mark.usefixtures("plans_stay")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_where_a_pass_more_comes_unexpectedly(machine: Machine, tmp_path: Path) -> None:
    """By a plan for a graph that is let go of, all that is shown would stay."""
    dice = random.Random(0)
    with ebbtide.Budget(int(0.6 * plain_peak(EVERY)), spill=tmp_path, machine=machine) as memory:
        settled: list[Sort] = [*ONES[:6], *NORMS_TOO, *ONES[:3]]
        found = run(memory, [*settled, *("norm" if dice.random() < 0.3 else "one" for _ in range(30))])
        assert "verify" not in states(memory)
        assert [seen for seen in found[len(settled) :] if seen.left] == []
        assert [seen for seen in found[len(settled) :] if seen.peak_bytes > (memory.limit_bytes or 0)] == []


class AskingTwice(torch.autograd.Function):
    """A gate that asks for what it has saved in two lines, each of which asks for all."""

    @staticmethod
    def forward(ctx: Any, data: Tensor) -> Tensor:
        ctx.save_for_backward(data)
        return data * torch.sigmoid(data)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        gate = torch.sigmoid(ctx.saved_tensors[0])
        return grad * gate * (1 + ctx.saved_tensors[0] * (1 - gate))


_ask_twice: Any = AskingTwice.apply


@pytest.mark.usefixtures("plans_stay")
def test_what_a_node_asks_for_twice_tells_nothing_of_graphs(tmp_path: Path) -> None:
    """A pass that kept its graph ran by the plan for one that is let go of, and all that was shown stayed."""
    torch.manual_seed(0)
    model, data = torch.nn.ModuleList(torch.nn.Linear(WIDTH, WIDTH) for _ in range(8)), torch.randn(4 * BATCH, WIDTH)

    def peak(twice: bool, guard: Guard) -> int:
        with PeakMeter() as meter, guard():
            h = data
            for layer in model:
                h = _ask_twice(layer(h))
            loss = h.square().mean()
            if twice:
                loss.backward(retain_graph=True)
            loss.backward()
        model.zero_grad()
        return meter.peak_bytes

    limit_bytes = int(0.6 * peak(True, contextlib.nullcontext))
    order = [False] * 6 + [False, True] * 4 + ([False] * 8 + [True] + [False] * 10 + [True]) * 2
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        peaks = [peak(twice, memory.step) for twice in order]
        assert [measured.left for measured in memory.measured[14:] if measured.left] == []
    assert [size for size in peaks[14:] if size > limit_bytes] == []


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_an_unknown_kind_that_keeps_its_graph(machine: Machine, tmp_path: Path) -> None:
    """The plan is left as the pass begins, and the safe policy moves out what it has shown: another pass may come."""
    plain_bytes = plain_peak(EVERY)
    with ebbtide.Budget(int(0.6 * plain_bytes), spill=tmp_path, machine=machine, verify=False) as memory:
        *_, last = run(memory, [*ONES[:6], "norm"])
        assert "keeps its graph" in last.left
        assert last.peak_bytes <= 0.9 * plain_bytes


@pytest.mark.usefixtures("plans_stay")
@pytest.mark.parametrize(
    "sorts",
    [("part", "kept"), ("one", "kept"), ("kept", "two", "norm"), ("two", "norm"), ("one", "part", "norm")],
    ids="-".join,
)
def test_known_kinds_in_no_order_are_gone_over_to(sorts: Sequence[Sort], tmp_path: Path) -> None:
    """None is left for what another one is known to do, though it shows late, or is not what the plan could run. Once
    they are known to come in no order, each is begun by a plan that has room for all."""
    dice = random.Random(0)
    with ebbtide.Budget(int(0.8 * plain_peak(EVERY)), spill=tmp_path, machine=FAST_DISK) as memory:
        settled = [sort for sort in sorts for _ in range(2)] + [*sorts] * 6
        found = run(memory, [*settled, *(dice.choice(sorts) for _ in range(36))])
        assert [seen.left for seen in found[len(settled) :] if seen.left] == []
        assert [seen for seen in found[-20:] if seen.peak_bytes > (memory.limit_bytes or 0)] == []


def test_graphs_that_are_kept_in_each_step_are_no_reason_to_leave(tmp_path: Path) -> None:
    """For nothing, as by habit, or for the loss that comes next."""
    model, data = Blocks(), torch.randn(BATCH, WIDTH)
    with ebbtide.Budget(int(0.7 * plain_peak(EVERY)), spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(10):
            with memory.step():
                model(data, EVERY, 0).backward(retain_graph=True)
        assert (memory.state, [each.left for each in memory.measured if each.left]) == ("planned", [])
    with ebbtide.Budget(int(0.7 * plain_peak(EVERY)), spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(10):
            with memory.step():
                h = torch.nn.Sequential(*model.blocks)(data)
                h.abs().mean().backward(retain_graph=True)
                h.square().mean().backward()
        assert (memory.state, [each.left for each in memory.measured if each.left]) == ("planned", [])


class Inner(torch.autograd.Function):
    """Goes through a graph of its own in its backward pass, and keeps that."""

    @staticmethod
    def forward(ctx: Any, data: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(data, weight)
        return torch.tanh(data @ weight)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, ...]:
        data, weight = (tensor.detach().requires_grad_() for tensor in ctx.saved_tensors)
        with torch.enable_grad():
            result = torch.tanh(data @ weight)
        return torch.autograd.grad(result, (data, weight), grad, retain_graph=True)


_inner: Any = Inner.apply


def test_graphs_that_are_kept_within_a_backward_pass_are_none_of_its_own(tmp_path: Path) -> None:
    """Observed as one that keeps its graph, each planned step was taken for one of an unknown kind."""
    first, data = torch.nn.Linear(WIDTH, WIDTH), torch.randn(4 * BATCH, WIDTH)
    weights = [torch.randn(WIDTH, WIDTH, requires_grad=True) for _ in range(8)]
    with ebbtide.Budget("70%", spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(10):
            with memory.step():
                h = torch.tanh(first(data))
                for weight in weights:
                    h = _inner(h, weight)
                h.square().mean().backward()
                del h
            for parameter in (*weights, *first.parameters()):
                parameter.grad = None
        assert [kind.keeps_graphs for kind in kinds_of(memory)] == [False]
        assert {(each.state, each.left) for each in memory.measured[-4:]} == {("planned", "")}
        assert {each.kind for each in memory.measured[-4:]} == set(memory._loop.kinds)
        assert memory.report().measured.seconds is not None


@pytest.mark.usefixtures("plans_stay")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
def test_an_unknown_part_is_evidence_enough(machine: Machine, tmp_path: Path) -> None:
    """Where steps with both passes do not come again, those with one are what the plan is verified and counted by."""
    with ebbtide.Budget(int(0.6 * plain_peak(EVERY)), spill=tmp_path, machine=machine) as memory:
        found = run(memory, ["norm", "norm", *ONES])
        assert [seen for seen in found if seen.left] == []
        assert memory.state == "rehearse"  # where the rest has its blocks, a whole step only can tell
        assert [seen for seen in found[-8:] if seen.peak_bytes > (memory.limit_bytes or 0)] == []


def test_steps_without_a_backward_pass_are_no_evidence(tmp_path: Path) -> None:
    """As where a model is tried on other data: of what a plan does in the backward pass they tell nothing."""
    model, data = Blocks(), torch.randn(BATCH, WIDTH)
    with ebbtide.Budget(int(0.7 * plain_peak(EVERY)), spill=tmp_path, machine=FAST_DISK, verify=False) as memory:
        for number in range(12):
            with memory.step():
                loss = model(data, EVERY, 0)
                if number < 2:
                    loss.backward()
        assert (memory.state, [each.left for each in memory.measured if each.left]) == ("audit", [])


@pytest.mark.usefixtures("plans_stay")
def test_what_a_graph_lets_go_of_is_not_moved_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By a plan for a graph that is kept, it would leave behind the pass, and a copy under way keep it for a while."""
    with PeakMeter() as meter:
        step(Blocks(), torch.randn(BATCH, WIDTH), "kept")
    with ebbtide.Budget(int(0.55 * meter.peak_bytes), spill=tmp_path, machine=FAST_DISK) as memory:
        run(memory, ["kept"] * 9)
        assert memory.state == "planned"
        kind = latest_kind(memory)
        assert kind is not None
        assert kind.script is not None
        assert any(actions is not None and actions.spent for actions in kind.script.actions)
        disk = cast(DiskTier, memory.tiers["disk"])
        real = disk._pwrite

        def slow(fd: int, view: memoryview, offset_bytes: int) -> int:
            time.sleep(0.02)
            return real(fd, view, offset_bytes)

        monkeypatch.setattr(disk, "_pwrite", slow)
        found = run(memory, ["one"] * 6)
        assert [seen.left for seen in found if seen.left] == []
        assert [seen.peak_bytes for seen in found if seen.peak_bytes > (memory.limit_bytes or 0)] == []
