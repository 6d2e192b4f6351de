"""`ctc_loss` is the same function to autograd while a mode of ours is on."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from tests.observe.test_mode import Nothing

LENGTHS = torch.tensor([12, 9, 7]), torch.tensor([4, 3, 2])


def loss(said: Tensor, heard: Any, spoken: Any) -> Tensor:
    """Of three texts of up to four letters."""
    return F.ctc_loss(said.log_softmax(-1), torch.arange(1, 13).view(3, 4), heard, spoken, zero_infinity=True)


def said() -> Tensor:
    """What a model might say of three recordings of twelve moments, in an alphabet of twelve letters."""
    return torch.randn(12, 3, 13, generator=torch.Generator().manual_seed(0)).requires_grad_()


def saved(lengths: tuple[Any, Any], *, mode: bool) -> tuple[list[torch.Size], Tensor, Tensor]:
    """The shapes that autograd saves, the loss, its gradient."""
    found: list[torch.Size] = []

    def pack(tensor: Tensor) -> Tensor:
        found.append(tensor.shape)
        return tensor

    given = said()
    with saved_tensors_hooks(pack, lambda tensor: tensor), Nothing() if mode else contextlib.nullcontext():
        result = loss(given, *lengths)
        result.backward()
    assert given.grad is not None
    return found, result.detach(), given.grad


@pytest.mark.parametrize("kind", [torch.int64, torch.int32])
def test_a_mode_does_not_change_what_is_saved(kind: torch.dtype) -> None:
    lengths = LENGTHS[0].to(kind), LENGTHS[1].to(kind)
    shapes, result, gradient = saved(lengths, mode=False)
    others, other, same = saved(lengths, mode=True)
    assert others == shapes
    assert torch.equal(other, result)
    assert torch.equal(same, gradient)


def test_numbers_stay_numbers() -> None:
    numbers = LENGTHS[0].tolist(), LENGTHS[1].tolist()
    assert saved(numbers, mode=True)[0] == saved(LENGTHS, mode=True)[0] == saved(numbers, mode=False)[0]


def test_wrong_lengths_are_refused_as_ever() -> None:
    with Nothing(), pytest.raises(RuntimeError, match="must be integral"):
        loss(said(), LENGTHS[0].double(), LENGTHS[1])


def test_it_is_pytorchs_own_where_no_mode_is_on() -> None:
    original = torch.ctc_loss
    with Nothing():
        with Nothing():
            replaced = torch.ctc_loss
        assert torch.ctc_loss is replaced is not original
    assert torch.ctc_loss is original


def test_a_function_in_its_place_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    original = torch.ctc_loss
    given: list[type] = []

    def other(*args: Any) -> Tensor:
        given.append(type(args[2]))
        return original(*args)

    monkeypatch.setattr(torch, "ctc_loss", other)
    with Nothing():
        assert torch.ctc_loss is other
        loss(said(), *LENGTHS)
    assert torch.ctc_loss is other
    assert given == [Tensor]


def test_one_that_comes_while_a_mode_is_on_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch, "ctc_loss", torch.ctc_loss)
    shapes, result, _ = saved(LENGTHS, mode=False)
    with Nothing():
        below = torch.ctc_loss
        monkeypatch.setattr(torch, "ctc_loss", other := lambda *args: below(*args) * 2)
    assert torch.ctc_loss is other
    others, twice, _ = saved(LENGTHS, mode=True)
    assert torch.equal(twice, 2 * result)
    assert others[: len(shapes)] == shapes
