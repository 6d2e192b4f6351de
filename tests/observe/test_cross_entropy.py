"""`cross_entropy` with weights and smoothed labels gives the same numbers, and saves the same, while a mode is on."""

from __future__ import annotations

import contextlib
import itertools
import warnings
from contextlib import AbstractContextManager
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

import ebbtide.observe.cross_entropy
from ebbtide.observe.cross_entropy import stand_in_for_cross_entropy
from tests.observe.test_mode import Nothing, User
from tests.run.harness import identical

SEEDS = 16
"""With some of which some losses differ by the two sums; with which, depends on the processor."""
SHAPES = {"rows": (256, 100), "pixels": (8, 100, 4, 8), "long": (16, 100, 16), "one": (100,)}


def scores(shape: tuple[int, ...], kind: torch.dtype, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """What a model might say, what is right, some of which is to be ignored, and what each class counts."""
    dice = torch.Generator().manual_seed(seed)
    given = torch.randn(shape, generator=dice).to(kind).requires_grad_()
    right = torch.randint(100, (*shape[:1], *shape[2:]) if len(shape) > 1 else (), generator=dice)
    return given, right.masked_fill(right < 25, 255 if len(shape) > 1 else 7), torch.rand(100, generator=dice).to(kind)


def found(
    shape: tuple[int, ...], kind: torch.dtype, under: AbstractContextManager[object], seed: int = 0
) -> list[Tensor]:
    """The loss, its gradient, and what autograd saves."""
    given, right, weights = scores(shape, kind, seed)
    saved: list[Tensor] = []

    def pack(tensor: Tensor) -> Tensor:
        saved.append(tensor.detach().clone())
        return tensor

    with saved_tensors_hooks(pack, lambda tensor: tensor), under:
        loss = F.cross_entropy(given, right, weights, label_smoothing=0.1, ignore_index=255)
        loss.backward()
    assert given.grad is not None
    return [loss.detach(), given.grad, *saved]


def same(some: list[Tensor], others: list[Tensor]) -> bool:
    return len(some) == len(others) and all(map(identical, some, others))


@pytest.mark.parametrize("mixed", [False, True])
@pytest.mark.parametrize("kind", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("shape", SHAPES)
def test_a_mode_changes_nothing(shape: str, kind: torch.dtype, mixed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    stand_in_for_cross_entropy()
    with torch.autocast("cpu", torch.bfloat16, enabled=mixed):
        with monkeypatch.context() as pytorch:
            pytorch.setattr(torch._C._nn, "cross_entropy_loss", ebbtide.observe.cross_entropy._original)
            plain = found(SHAPES[shape], kind, contextlib.nullcontext())
            by_pytorch = found(SHAPES[shape], kind, Nothing())
        assert same(found(SHAPES[shape], kind, Nothing()), plain)
        assert same(found(SHAPES[shape], kind, contextlib.nullcontext()), plain)
        assert same(found(SHAPES[shape], kind, User()), by_pytorch)


def test_pytorch_itself_rounds_otherwise_under_a_mode(monkeypatch: pytest.MonkeyPatch) -> None:
    """Or there would be nothing to mend."""
    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", ebbtide.observe.cross_entropy._original)

    def loss(shape: str, seed: int, under: AbstractContextManager[object]) -> Tensor:
        return found(SHAPES[shape], torch.float32, under, seed)[0]

    cases = itertools.product(SHAPES, range(SEEDS))
    assert not all(identical(loss(*case, Nothing()), loss(*case, contextlib.nullcontext())) for case in cases)


def test_other_losses_are_pytorchs_own() -> None:
    stand_in_for_cross_entropy()
    given, right, weights = scores((256, 100), torch.float32)
    right = right.masked_fill(right == 255, 3)
    with Nothing():
        sums = F.cross_entropy(given, right, weights, reduction="sum", label_smoothing=0.1)
        soft = F.cross_entropy(given, given.detach().softmax(1), weights, label_smoothing=0.1)
        with pytest.raises(RuntimeError, match="label_smoothing must be between"):
            F.cross_entropy(given, right, weights, label_smoothing=1.5)
    assert identical(sums, F.cross_entropy(given, right, weights, reduction="sum", label_smoothing=0.1))
    assert identical(soft, F.cross_entropy(given, given.detach().softmax(1), weights, label_smoothing=0.1))


def test_it_can_be_scripted_and_compiled_whole() -> None:
    stand_in_for_cross_entropy()

    def loss(given: Tensor, right: Tensor, weights: Tensor) -> Tensor:
        return F.cross_entropy(given, right, weights, label_smoothing=0.1, ignore_index=255)

    inputs = scores((256, 100), torch.float32)
    expected = loss(*inputs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # scripts are deprecated
        assert identical(torch.jit.script(loss)(*inputs), expected)
    torch.testing.assert_close(torch.compile(loss, backend="aot_eager", fullgraph=True)(*inputs), expected)


def test_a_function_in_its_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def other(*_: object) -> str:
        return "another's"

    monkeypatch.setattr(torch._C._nn, "cross_entropy_loss", other)
    stand_in_for_cross_entropy()
    given, right, weights = scores((256, 100), torch.float32)
    with Nothing():
        assert F.cross_entropy(given, right, weights, label_smoothing=0.1) == "another's"


def test_autocast_looks_at_each_op_where_it_does_not_know_the_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on CUDA, whose autocast has float numbers for `nll_loss`, and for sums that name no type."""
    assert not ebbtide.observe.cross_entropy._is_cast_whole("cuda")
    stand_in_for_cross_entropy()
    seen: list[torch.dtype] = []
    original = torch.log_softmax

    def log_softmax(given: Tensor, *rest: Any, **named: Any) -> Tensor:
        seen.append(given.dtype)
        return original(given, *rest, **named)

    monkeypatch.setattr(torch, "log_softmax", log_softmax)
    for whole in (True, False):
        monkeypatch.setattr(ebbtide.observe.cross_entropy, "_is_cast_whole", lambda _device, whole=whole: whole)
        with torch.autocast("cpu", torch.bfloat16), Nothing():
            found(SHAPES["rows"], torch.bfloat16, contextlib.nullcontext())
    assert seen == [torch.float32, torch.bfloat16]
