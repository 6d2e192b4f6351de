"""What steps of a kind show of it: times and workspaces, and what the plan may compute again."""

from __future__ import annotations

import contextlib
import dataclasses
import random
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.decisions import Recompute
from ebbtide.run.holdings import Holding
from ebbtide.run.kinds import VERIFIES, VERIFIES_OF_PARTS, Kind
from ebbtide.run.recipes import Recipe
from ebbtide.run.tiers import SlowTier
from ebbtide.run.verify import Truth
from tests.plan.limits import limit_at
from tests.plan.random_steps import disk_machine, network_step
from tests.run.harness import SLOW_DISK, Guard
from tests.run.inside import kinds_of
from tests.run.test_kinds import BLOCKS, EVERY, Dropped, gradients, plain_peak, run
from tests.run.test_left import BATCH, WIDTH, Odd

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


def test_of_two_looks_each_op_has_the_shorter_time_and_the_larger_workspace() -> None:
    """The first one measured no workspace, and had page faults in it."""
    second = network_step(4)
    ops = tuple(
        dataclasses.replace(op, duration_seconds=(0.5 + tick % 2) * op.duration_seconds, workspace_bytes=0)
        for tick, op in enumerate(second.ops)
    )
    kind = Kind(dataclasses.replace(second, ops=ops))
    kind.observed_again(second)
    for tick, (found, op) in enumerate(zip(kind.step.ops, second.ops, strict=True)):
        assert found.workspace_bytes == op.workspace_bytes
        assert found.duration_seconds == pytest.approx(min(0.5 + tick % 2, 1.0) * op.duration_seconds)
    assert any(op.workspace_bytes for op in second.ops)


@pytest.mark.parametrize(("whole", "steps"), [(False, VERIFIES_OF_PARTS), (True, VERIFIES)], ids=["parts", "whole"])
def test_what_never_came_while_steps_were_compared_moves_out_from_then_on(whole: bool, steps: int) -> None:
    """Of steps that left out nothing, too, which made it by other calls."""
    step = network_step(24)
    kind = Kind(step)
    kind.make_plan(disk_machine(1e6, 1e6), limit_at(step, 0.5))
    assert kind.script is not None
    remade = {save.value for save in kind.script.saves if save.remakes}
    came = set(sorted(remade)[::2])
    assert len(came) < len(remade)
    for _ in range(steps):
        assert kind.state == "verify"
        kind.note_verification({(value, 0) for value in came}, whole=whole)
    assert kind.state == "audit"
    assert {save.value for save in kind.script.saves if save.remakes} == came
    assert not any(save.remakes for save in kind.script.holds if save is not None and save.value not in came)


def test_what_leaves_out_some_is_compared_until_all_was(tmp_path: Path) -> None:
    limit_bytes = int(0.6 * plain_peak(EVERY))
    dice, dropped = random.Random(0), list[tuple[Sequence[int], int]]()
    while len(dropped) < 28:
        left_out = (BLOCKS - 1, *(block for block in EVERY if dice.random() < 0.2))
        dropped.append((tuple(block for block in EVERY if block not in left_out), 0))
    found = run([*[(EVERY, 0)] * 2, *dropped], limit_bytes, SLOW_DISK, tmp_path, build=Dropped)
    assert [seen.state for seen in found].count("verify") == VERIFIES_OF_PARTS, "one block never came"


def test_what_a_plan_makes_that_a_step_goes_over_to_is_compared_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing has verified that plan yet, though another one was expected, which is verified."""
    watched, watch = list[int](), Truth.watch

    def noting(truth: Truth, holding: Holding, recipe: Recipe, tier: SlowTier, *, later: int) -> None:
        watched.append(recipe.target)
        watch(truth, holding, recipe, tier, later=later)

    monkeypatch.setattr(Truth, "watch", noting)
    model, data = Odd(), torch.randn(BATCH, WIDTH)
    with ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:

        def step(odd: int) -> None:
            with memory.step():
                model(data, odd).backward()
            model.zero_grad()

        for odd in (*[4] * 6, 0, 4, 4, 0, 4, 4):
            step(odd)
        states = {kind.state for kind in kinds_of(memory)}
        assert (memory.state, states) == ("planned", {"planned", "verify"})
        watched.clear()
        step(0)
        assert memory.measured[-1].left == ""
    assert watched


class Branching:
    """Masks that NumPy fills before they are saved, made like another tensor of the same shape in one step."""

    def __init__(self, other_at: int) -> None:
        torch.manual_seed(0)
        self.model = torch.nn.Sequential(*(torch.nn.Linear(256, 256) for _ in range(5)))
        self.other_at = other_at

    def step(self, index: int, guard: Guard) -> list[torch.Tensor | None]:
        with guard():
            h = torch.randn(1024, 256, generator=torch.Generator().manual_seed(index))
            for layer in self.model:
                g = layer(h)
                h = torch.tanh(g)
                mask = torch.zeros_like(g if index == self.other_at else h)
                mask.numpy()[...] = (h.detach().numpy() > 0) * 1.7
                h = h * mask
            h.square().mean().backward()
            del g, h, mask
        return gradients(self.model)


@pytest.mark.parametrize("other_at", [-1, 2])
def test_what_was_made_by_other_calls_as_it_was_compared(other_at: int, tmp_path: Path) -> None:
    """Later calls lead to it again, and nobody has seen whether they make the same."""
    plain, loop = Branching(other_at), Branching(other_at)
    with ebbtide.Budget("80%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(12):
            expected, found = plain.step(index, contextlib.nullcontext), loop.step(index, memory.step)
            for one, other in zip(expected, found, strict=True):
                assert one is not None
                assert other is not None
                assert torch.equal(one, other), index
        assert memory.plan is not None
        assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)


class WrittenBetween:
    """Two passes through one graph, or the first of them. Behind that NumPy writes to what values are made from, which
    nobody is told of: those that the second pass asks for cannot be made again."""

    def __init__(self) -> None:
        torch.manual_seed(0)
        self.data, self.scale = torch.randn(512, 256), torch.rand(512, 256)
        self.numbers = self.scale.numpy()
        self.weights = [torch.randn(256, 8, requires_grad=True) for _ in range(8)]

    def step(self, both: bool, guard: Guard) -> list[torch.Tensor]:
        """Its gradients."""
        with guard():
            made = torch.zeros(())
            for number, weight in enumerate(self.weights):
                made = made + torch.cos(self.data * self.scale * (number + 1)) @ weight
            loss = made.square().mean()
            loss.backward(retain_graph=True)
            self.numbers[:] = 0.999 * self.numbers + 0.001
            if both:
                loss.backward()
        found = [weight.grad for weight in self.weights if weight.grad is not None]
        for weight in self.weights:
            weight.grad = None
        return found


def test_each_time_that_a_value_is_computed_again_is_compared(tmp_path: Path) -> None:
    """Steps that end after their first pass tell nothing of the calls that make it in the second one."""
    plain, loop, made = WrittenBetween(), WrittenBetween(), list[int]()
    with ebbtide.Budget("50%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for number, both in enumerate([True] * 2 + [False] * (VERIFIES_OF_PARTS + 1) + [True] * 3):
            expected, found = plain.step(both, contextlib.nullcontext), loop.step(both, memory.step)
            assert all(map(torch.equal, expected, found)), number
            if number == 2:
                assert memory.plan is not None
                assert memory.observed is not None
                pairs = zip(memory.observed.absences, memory.plan.decisions, strict=True)
                made = [absence.value for absence, decision in pairs if isinstance(decision, Recompute)]
        assert len(made) > len(set(made)), "values are made again in both passes"
