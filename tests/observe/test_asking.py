"""Gradients of which PyTorch has two formulas are computed by the one that it takes without a mode."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from ebbtide.observe.recorder import Recorder
from ebbtide.run.meter import PeakMeter
from tests.observe.test_mode import User
from tests.run.harness import identical
from tests.sequence.loops import in_thread

PROGRAMS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "prod": lambda x, _: x.prod(-1),
    "masked_fill": lambda x, level: x.masked_fill(x < 1, level),
    "max": lambda x, _: -x.max(),
    "min": lambda x, _: -x.min(),
    "median": lambda x, _: -x.median(),
    "nanmedian": lambda x, _: -x.nanmedian(),
    "masked_fill_": lambda x, level: (x * 2).masked_fill_(x < 1, level),
}


def leaves() -> tuple[Tensor, Tensor]:
    dice = torch.Generator().manual_seed(0)
    return (torch.rand(64, 96, generator=dice) + 0.5).requires_grad_(), torch.tensor(0.3, requires_grad=True)


def gradients(name: str, *, create_graph: bool = False) -> list[Tensor]:
    x, level = leaves()
    made = PROGRAMS[name](x, level).sin().sum()
    found = torch.autograd.grad(made, [x, level], allow_unused=True, create_graph=create_graph)
    return [gradient for gradient in found if gradient is not None]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(identical, some, others))


@pytest.mark.parametrize("name", PROGRAMS)
def test_a_recorded_node_computes_as_ever(name: str) -> None:
    plain = gradients(name)
    with User():
        assert not same(gradients(name), plain)
    with PeakMeter(), Recorder() as recorder:
        assert same(gradients(name), plain)
    step = recorder.finish()
    (node,) = [op for op in step.ops if "Backward" in op.name]
    assert node.phase == "backward"
    assert node.replay == "opaque"
    assert max(step.values[value].size_bytes for value in node.outputs) == 64 * 96 * 4


def test_a_mode_of_the_users_sees_what_it_would_see() -> None:
    with User():
        expected = gradients("prod")
    with Recorder() as recorder, User():
        assert same(gradients("prod"), expected)
    assert not any("Backward" in op.name for op in recorder.finish().ops)


def test_what_a_pass_saves_is_seen() -> None:
    with Recorder() as recorder:
        gradients("prod", create_graph=True)
    assert not any("Backward" in op.name for op in recorder.finish().ops)


def test_the_gradient_of_a_fill_value_is_as_ever_where_a_pass_makes_a_graph() -> None:
    def found() -> list[Tensor]:
        x, level = leaves()
        (slope,) = torch.autograd.grad(PROGRAMS["masked_fill"](x, level).sin().sum(), level, create_graph=True)
        return [slope.detach(), *torch.autograd.grad(slope.square(), [x, level])]

    def saved() -> list[torch.Size]:
        shapes: list[torch.Size] = []

        def pack(tensor: Tensor) -> Tensor:
            shapes.append(tensor.shape)
            return tensor

        with saved_tensors_hooks(pack, lambda tensor: tensor):
            found()
        return shapes

    plain, shapes = found(), saved()
    with PeakMeter(), Recorder():
        assert same(found(), plain)
        assert saved() == shapes


def test_a_pass_that_begins_with_such_a_node() -> None:
    gradient = torch.rand(64, 96, generator=torch.Generator().manual_seed(1)) - 0.5

    def found() -> list[Tensor]:
        x, level = leaves()
        return list(torch.autograd.grad(PROGRAMS["masked_fill"](x, level), [x, level], gradient))

    plain = found()
    with Recorder() as recorder:
        recorded = found()
    assert same(recorded, plain)
    assert recorder.finish().ops[-1].name.startswith("MaskedFillBackward")


def test_a_checkpoint_that_is_computed_again_for_such_a_node_is_seen() -> None:
    """Its region ends in one, which is so the first to ask for anything in it."""

    def seen(fill: Tensor | float) -> tuple[list[str], int]:
        x, _ = leaves()
        with Recorder() as recorder:
            made: Tensor = checkpoint(lambda x: (x.sin() * 2).cos().masked_fill(x < 1, fill), x, use_reentrant=False)
            made.sum().backward()
        assert x.grad is not None
        step = recorder.finish()
        return [op.name for op in step.ops if "sin" in op.name or "cos" in op.name], step.resting_bytes

    names, resting_bytes = seen(0.3)
    again, more_bytes = seen(leaves()[1])
    assert again == names
    assert more_bytes == resting_bytes + 4


def test_a_node_that_fails_leaves_modes_as_they_were() -> None:
    def fail(*_: object) -> None:
        raise ValueError("no")

    x, _ = leaves()
    with Recorder() as recorder:
        made = x.prod(-1)
        later = made.sum()
        assert made.grad_fn is not None
        made.grad_fn.register_prehook(fail)
        caught = ""
        try:
            later.backward()
        except ValueError as error:
            caught = str(error)
        x.detach().exp()
    assert caught == "no"
    assert recorder.finish().ops[-1].name == "aten.exp.default"


def test_a_graph_that_outlives_the_step_needs_it_no_more() -> None:
    x, _ = leaves()
    recorder = Recorder()
    with recorder:
        made = x.prod(-1).sin().sum()
    found = [torch.autograd.grad(made, x, retain_graph=True)]
    del recorder
    found.append(torch.autograd.grad(made, x))
    expected = gradients("prod")
    assert all(same(list(gradient), expected) for gradient in found)


def test_a_pass_that_begins_with_such_a_node_after_another_thread_has_made_one() -> None:
    """As autograd's thread of a device does in a pass that makes a graph: there no pass begins."""

    def found(elsewhere: Callable[[], None]) -> list[Tensor]:
        x, level = leaves()
        elsewhere()
        return list(torch.autograd.grad(PROGRAMS["masked_fill"](x, level), [x, level], gradient))

    gradient = torch.rand(64, 96, generator=torch.Generator().manual_seed(1)) - 0.5
    value, recorder = torch.rand(8, requires_grad=True), Recorder()
    plain = found(lambda: None)
    with recorder:
        recorded = found(lambda: in_thread(lambda: recorder._asking.made(torch.ops.aten.max.default, value.max())))
    assert same(recorded, plain)
    assert recorder.finish().ops[-1].name.startswith("MaskedFillBackward")
