"""Steps whose ops are not those that were recorded though autograd saves the same: nothing is computed from others."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.checkpoint import checkpoint

import ebbtide
from ebbtide.decisions import Decision, Keep, Offload, Plan, Recompute
from ebbtide.machine import Machine
from ebbtide.plan.judged import to_plan
from ebbtide.plan.problem import Problem
from ebbtide.plan.profile import first_slots
from ebbtide.run import solving
from ebbtide.step import Step
from tests.run.harness import FAST_DISK, SLOW_DISK

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")

STEPS, CHANGED = 16, (9, 12, 13)
DENSE = torch.ones(1024, 64)
SPARSE = DENSE.to_sparse()
with torch.inference_mode():
    INFERRED = torch.ones(1024, 64)
Piece = Callable[[Tensor, bool], Tensor]


def one_more(h: Tensor, changed: bool) -> Tensor:
    """An op of the same name comes first, for somebody's statistics."""
    if changed:
        h * 3.0
    return (h * 2.0).square()


def other_order(h: Tensor, changed: bool) -> Tensor:
    """The same ops, but the one that counts comes second; where the first one's result was, its own may be."""
    if changed:
        h * 3.0
    doubled = h * 2.0
    if not changed:
        h * 3.0
    return doubled.square()


def other_branch(h: Tensor, changed: bool) -> Tensor:
    """Both are computed, and either of them is used."""
    both = h * 2.0, h * 3.0
    return both[changed].square()


def other_leaf(h: Tensor, changed: bool) -> Tensor:
    """What is computed starts from another tensor that is saved as well."""
    leaves = torch.tanh(h), torch.tanh(h + 1.0)
    return (leaves[changed] * 2.0).square() + leaves[0] * leaves[1]


def written_again(h: Tensor, changed: bool) -> Tensor:
    """What an op made is written in place before it is saved."""
    doubled = h * 2.0
    if changed:
        doubled.add_(0.5)
    return doubled.square()


def written_twice(h: Tensor, changed: bool) -> Tensor:
    """What an op wrote in place is written once more before it is saved."""
    doubled = (h * 2.0).add_(1.0)
    if changed:
        doubled.add_(0.5)
    return doubled.square()


def leaf_written(h: Tensor, changed: bool) -> Tensor:
    """What an op reads is written in place between that op and its save."""
    shifted = h + 1.0
    doubled = shifted * 2.0
    if changed:
        shifted.add_(0.5)
    return doubled.square() + shifted.square()


def other_saved(h: Tensor, changed: bool) -> Tensor:
    """A tensor is saved where one that was saved before had been saved again."""
    first = h * 2.0
    squared = first.square()
    return squared + (h * 3.0 if changed else first).square()


def other_saved_result(h: Tensor, changed: bool) -> Tensor:
    """The same after an op that saves its result."""
    first = torch.sigmoid(h)
    return (first * 3.0 if changed else first).square()


def other_kind(h: Tensor, changed: bool) -> Tensor:
    """The same op, with a sparse tensor."""
    return (h + (SPARSE if changed else DENSE)).square()


def other_mode(h: Tensor, changed: bool) -> Tensor:
    """The same op, on a tensor that nobody counts the versions of."""
    return (h + (INFERRED if changed else DENSE)).square()


def other_mode_inside(h: Tensor, changed: bool) -> Tensor:
    """The same op, whose result is such a tensor."""
    with torch.inference_mode(changed):
        detached = h.detach() * 2.0
    return (h * 2.0 + detached).square()


def filled_later(h: Tensor, changed: bool) -> Tensor:
    """What is saved in its place is there to take numbers that the op draws only then."""
    doubled = h * 2.0
    torch.manual_seed(1)
    return (nn.functional.rrelu(doubled, training=True) if changed else doubled.tanh()) * h.square()


PIECES: tuple[Piece, ...] = (
    one_more,
    other_order,
    other_branch,
    other_leaf,
    written_again,
    written_twice,
    leaf_written,
    other_saved,
    other_saved_result,
    other_kind,
    other_mode,
    other_mode_inside,
    filled_later,
)


@pytest.mark.parametrize("limit", ["50%", "80%"])
@pytest.mark.parametrize("kind", [Offload, Recompute])
@pytest.mark.parametrize("piece", PIECES, ids=lambda piece: piece.__name__)
def test_gradients_are_those_of_what_ran(piece: Piece, kind: type[Decision], limit: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.ModuleList(nn.Linear(64, 64) for _ in range(6))
    data = torch.randn(1024, 64)

    def gradients(changed: bool) -> list[Tensor]:
        h = data
        for layer in model:
            h = piece(torch.tanh(layer(h)), changed)
        h.mean().backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return found

    with ebbtide.Budget(limit, spill=tmp_path, machine=SLOW_DISK if kind is Recompute else FAST_DISK) as memory:
        for index in range(STEPS):
            if index == CHANGED[0]:
                assert memory.plan is not None
                assert any(isinstance(decision, kind) for decision in memory.plan.decisions)
            with memory.step():
                found = gradients(index in CHANGED)
            for one, other in zip(found, gradients(index in CHANGED), strict=True):
                assert torch.equal(one, other), f"step {index}"


def test_more_ops_before_a_save_do_no_harm(tmp_path: Path) -> None:
    """As where processes exchange buffers before every second micro-batch: calls after that save are captured."""
    torch.manual_seed(0)
    blocks = (nn.Sequential(nn.Conv2d(8, 8, 3, padding=1), nn.GroupNorm(2, 8), nn.ReLU()) for _ in range(4))
    model, buffer = nn.Sequential(*blocks), torch.zeros(64)

    def run(index: int) -> list[Tensor]:
        batch = torch.full((8, 8, 32, 32), 1.0 + index)
        if index % 2 == 0:  # the second step, which is planned for, has no such ops
            for _ in range(4):
                buffer.add_(1.0)
        model(batch).square().mean().backward()
        found = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        model.zero_grad()
        return found

    with ebbtide.Budget("50%", spill=tmp_path, machine=SLOW_DISK) as memory:
        for index in range(STEPS):
            with memory.step():
                found = run(index)
            assert all(map(torch.equal, found, run(index)))
        assert memory.plan is not None
        assert any(isinstance(decision, Recompute) for decision in memory.plan.decisions)
        assert [step.left for step in memory.measured] == [""] * STEPS
    assert [step.state for step in memory.measured].count("observe") == 2


def test_what_its_op_may_fill_yet_goes_when_that_is_over(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A batch made in the step is to go as the next tensor is saved: by `checkpoint`, for which no node is counted."""

    def at_once(step: Step, machine: Machine, limit_bytes: int, **_: object) -> Plan:
        problem = Problem.of(step, machine)
        outs, releases, fit = first_slots(problem, range(len(step.absences)))
        decisions: list[Decision] = [Keep()] * len(step.absences)
        batch = next(k for k, each in enumerate(step.absences) if step.values[each.value].size_bytes == size_bytes)
        assert fit[batch]
        load = max(slot for slot in problem.facts.slots if slot < step.absences[batch].closes)
        tick = {slot: tick for tick, slot in problem.facts.slot_of_tick.items()}
        decisions[batch] = Offload("disk", tick[outs[batch]], tick[releases[batch]], tick[load])
        return to_plan(problem, limit_bytes, decisions, "at once")

    monkeypatch.setattr(solving, "solve", at_once)
    torch.manual_seed(0)
    wide = nn.Sequential(nn.Linear(32, 256), nn.Tanh(), nn.Linear(256, 32))
    model = nn.ModuleList([nn.Linear(64, 32), nn.Tanh(), wide])
    size_bytes = 1024 * 64 * 4
    gone = []
    with ebbtide.Budget("95%", spill=tmp_path, machine=FAST_DISK) as memory:
        for _ in range(6):
            with memory.step():
                batch = torch.randn(1024, 64)
                storage = StorageWeakRef(batch.untyped_storage())
                h = model[0](batch)
                del batch
                for layer in model[1:]:
                    h = checkpoint(layer, h, use_reentrant=False)
                gone.append((memory.state, storage.expired()))
                h.square().mean().backward()
        assert memory.plan is not None
        assert [type(decision) for decision in memory.plan.decisions].count(Offload) == 1
    assert ("audit", True) in gone
    assert ("planned", True) in gone
