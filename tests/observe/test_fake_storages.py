"""Results of fake ops have storages as large as the real ones' where kernels leave more memory than elements need."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ebbtide.observe.fake import record_fake
from ebbtide.observe.kernel_storages import OPS
from ebbtide.plan.problem import plain_peak_bytes
from tests.observe.test_fake import Build, assert_same, observed

aten: Any = torch.ops.aten
LOSSES = (aten.mse_loss, aten.smooth_l1_loss, aten.binary_cross_entropy, aten.soft_margin_loss)
OPERANDS: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "alike": lambda: (torch.rand(64, 48), torch.rand(64, 48)),
    "slices": lambda: (torch.rand(64, 48)[:, ::2], torch.rand(64, 48)[:, ::2]),
    "transposed": lambda: (torch.rand(48, 64).t(), torch.rand(64, 48)),
    "expanded": lambda: (torch.rand(1, 48).expand(64, 48), torch.rand(64, 48)),
    "float64": lambda: (torch.rand(64, 48).double(), torch.rand(64, 48).double()),
    "bfloat16": lambda: (torch.rand(64, 48).bfloat16(), torch.rand(64, 48).bfloat16()),
    "one": lambda: (torch.rand(()), torch.rand(())),
    "none": lambda: (torch.rand(0, 48), torch.rand(0, 48)),
}
UNEQUAL: dict[str, Callable[[], tuple[Tensor, Tensor]]] = {
    "broadcast": lambda: (torch.rand(64, 1), torch.rand(48)),
    "promoted": lambda: (torch.rand(64, 48).half(), torch.rand(64, 48)),
}
"""Which not every loss takes."""
COLUMNS = {
    "overlapping": ([8, 8], [3, 3], [1, 1], [1, 1], [1, 1]),
    "apart": ([8, 8], [2, 2], [1, 1], [0, 0], [4, 4]),
}


def assert_same_bytes(make: Callable[[], Tensor]) -> None:
    """A step that makes one result has the same records with fake tensors."""

    def build() -> Callable[[], None]:
        return lambda: make().add(1)  # type: ignore[return-value]

    assert_same(observed(build), record_fake(build)[0])


def test_every_op_that_leaves_more_is_tested() -> None:
    assert {*OPS} == {*(loss.default for loss in LOSSES), aten.col2im.default, aten.im2col.default}


@pytest.mark.parametrize("reduction", [0, 1, 2], ids=["none", "mean", "sum"])
@pytest.mark.parametrize("loss", LOSSES, ids=str)
def test_losses(loss: Any, reduction: int) -> None:
    for make in OPERANDS.values():
        assert_same_bytes(lambda make=make: loss(*make(), reduction=reduction))  # type: ignore[misc]
    assert loss(torch.rand(64), torch.rand(64), reduction=reduction).untyped_storage().nbytes() == 64 * 4


@pytest.mark.parametrize("operands", UNEQUAL.values(), ids=UNEQUAL)
@pytest.mark.parametrize("loss", [aten.mse_loss, aten.smooth_l1_loss], ids=str)
def test_losses_of_unequal_operands(loss: Any, operands: Callable[[], tuple[Tensor, Tensor]]) -> None:
    assert_same_bytes(lambda: loss(*operands()))


@pytest.mark.parametrize("geometry", COLUMNS.values(), ids=COLUMNS)
@pytest.mark.parametrize("shape", [(2, 3, 8, 8), (3, 8, 8)], ids=["batch", "one"])
def test_pictures_of_columns(geometry: Any, shape: tuple[int, ...]) -> None:
    size, *rest = geometry
    assert_same_bytes(lambda: aten.col2im(aten.im2col(torch.rand(shape), *rest), size, *rest))


def training(head: nn.Module, loss: Callable[[Tensor], Tensor]) -> Build:
    """A layer and what is put behind it, forth and back."""

    def build() -> Callable[[], None]:
        model, inputs = nn.Sequential(nn.Conv2d(3, 8, 1), head), torch.rand(2, 3, 32, 32)

        def run() -> None:
            model.zero_grad()
            loss(model(inputs)).backward()

        return run

    return build


@pytest.mark.parametrize(
    "build",
    [
        training(nn.Sigmoid(), lambda h: F.binary_cross_entropy(h, torch.ones_like(h))),
        training(nn.Tanh(), lambda h: F.mse_loss(h, torch.ones_like(h), reduction="sum")),
        training(nn.Tanh(), lambda h: F.smooth_l1_loss(h, torch.ones_like(h))),
        training(nn.Tanh(), lambda h: F.soft_margin_loss(h, torch.ones_like(h))),
        training(nn.Unfold(3), lambda h: h.square().mean()),
    ],
    ids=["binary_cross_entropy", "mse_loss", "smooth_l1_loss", "soft_margin_loss", "unfold"],
)
def test_steps(build: Build) -> None:
    real, (fake, _) = observed(build), record_fake(build)
    assert_same(real, fake)
    assert plain_peak_bytes(fake) == plain_peak_bytes(real)
