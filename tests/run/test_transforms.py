"""Transforms of `torch.func`, which refuse saved-tensor hooks, and the hooks of a step."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch.autograd.graph import disable_saved_tensors_hooks, save_on_cpu, saved_tensors_hooks

import ebbtide
from ebbtide.errors import StepError
from ebbtide.observe.fake import record_fake
from tests.conftest import hooks_left
from tests.run.harness import FAST_DISK
from tests.run.programs import SAID_BY_PYTORCH, mlp

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]

STEPS = 8
REFUSAL = "don't yet support saved tensor hooks"


def steps(spill: Path, inside: Callable[[Tensor], None]) -> list[str]:
    """Run steps that call ``inside`` between two layers; the state of each."""
    torch.manual_seed(0)
    model, data = mlp(64, 128, 128, 128, 128, 16), torch.randn(256, 64)
    with ebbtide.Budget("80%", spill=spill, machine=FAST_DISK) as memory:
        for _ in range(STEPS):
            with memory.step():
                h = model[:3](data)
                inside(h)
                model[3:](h).square().mean().backward()
        return [str(measured.state) for measured in memory._loop.measured if not measured.left]


def test_a_transform_that_fails_leaves_the_hooks_on(tmp_path: Path) -> None:
    def fail(_: Tensor) -> Tensor:
        raise ValueError("of the user's")

    def inside(h: Tensor) -> None:
        with pytest.raises(ValueError, match="of the user's"):
            torch.func.grad(fail)(h.detach())

    assert steps(tmp_path, inside)[-1] == "planned"


def test_hooks_of_the_user_are_refused_as_ever(tmp_path: Path) -> None:
    def inside(h: Tensor) -> None:
        with save_on_cpu(), pytest.raises(RuntimeError, match=REFUSAL):
            torch.func.grad(torch.sum)(h.detach())

    assert steps(tmp_path, inside)[-1] == "planned"


def test_hooks_stay_disabled_within(tmp_path: Path) -> None:
    def inside(_: Tensor) -> None:
        with disable_saved_tensors_hooks("outer"), disable_saved_tensors_hooks("inner"):
            with pytest.raises(RuntimeError, match="inner"), saved_tensors_hooks(lambda t: t, lambda t: t):
                pass
            assert not hooks_left()

    assert steps(tmp_path, inside)[-1] == "planned"


def test_what_is_not_saved_through_hooks_is_no_event(tmp_path: Path) -> None:
    def inside(h: Tensor) -> None:
        with disable_saved_tensors_hooks("the user's reason"):
            h.sin().exp().mean().backward(retain_graph=True)

    assert steps(tmp_path, inside)[-1] == "planned"


def test_a_step_inside_a_transform(tmp_path: Path) -> None:
    def loss(x: Tensor) -> Tensor:
        with memory.step():
            return x.sum()

    with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as memory:
        with pytest.raises(StepError, match="put it around the transform"):
            torch.func.grad(loss)(torch.ones(4))
        with memory.step():
            torch.func.grad(torch.sum)(torch.ones(4))


def _with_a_transform() -> Callable[[], None]:
    model, data = mlp(8, 16, 8), torch.randn(4, 8)

    def run() -> None:
        h = model(data)
        slope = torch.func.grad(lambda v: v.sin().sum())(h.detach())
        (h * slope).square().mean().backward()
        model.zero_grad()

    return run


def test_a_step_that_is_only_observed_has_transforms() -> None:
    step = ebbtide.observe_step(_with_a_transform())
    assert hooks_left() == 0
    faked, _ = record_fake(_with_a_transform)
    assert hooks_left() == 0
    assert [saved.shape for saved in faked.saved] == [saved.shape for saved in step.saved] != []
