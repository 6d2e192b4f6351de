"""Where the capture mode may be taken off and put on: at any tensor that autograd saves, in the middle of an op too."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbtide.observe.mode import modes_on
from ebbtide.run.capture import CaptureMode, is_between_ops

pytestmark = pytest.mark.usefixtures("nothing_left")

torch.manual_seed(0)
GIVEN = torch.randn(2, 4, 8)
WEIGHT, SCALE = torch.randn(5, 8, requires_grad=True), torch.rand(8, requires_grad=True)
KERNEL = torch.randn(3, 4, 3, requires_grad=True)
LSTM, GRU = nn.LSTM(8, 3), nn.GRU(8, 3)
ATTENTION = nn.MultiheadAttention(8, 2)


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "product": lambda x: x * SCALE,
    "product in place": lambda x: x.mul_(SCALE),
    "sum of products in place": lambda x: x.addcmul_(x.detach(), SCALE),
    "linear": lambda x: functional.linear(x, WEIGHT),
    "convolution": lambda x: functional.conv1d(x, KERNEL, torch.ones(3)),
    "layer norm": lambda x: functional.layer_norm(x, (8,), SCALE),
    "group norm": lambda x: functional.group_norm(x, 2),
    "batch norm": lambda x: functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "multi-head attention": lambda x: ATTENTION(x, x, x)[0],
    "lstm": lambda x: LSTM(x)[0],
    "gru": lambda x: GRU(x)[0],
    "dropout": functional.dropout,
    "cross entropy": lambda x: functional.cross_entropy(x, torch.ones(2, 8, dtype=torch.int64)),
    "largest": lambda x: x.max(dim=1).values,
    "indices": lambda x: x[x > 0],
    "concatenation": lambda x: torch.cat([x * SCALE, x.exp()]),
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "autocast": lambda x: torch.autocast("cpu")(functional.linear)(x, WEIGHT),
}


def run(op: Callable[[Tensor], Tensor], off_at: int) -> tuple[list[Tensor], int]:
    """The results of ``op`` and its gradients, and how many tensors it saved; under a mode that is taken off at one."""
    torch.manual_seed(1)
    capture, saved = CaptureMode({}, lambda _: None, place=0), 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        if saved == off_at:
            capture.end()
            assert modes_on() == []
        saved += 1
        with torch._C._DisableTorchDispatch():
            return tensor.detach()

    given = GIVEN.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        capture.begin(0, between_ops=True)
        try:
            result = op(given + 0)
        finally:
            capture.end()
    assert modes_on() == []
    (gradient,) = torch.autograd.grad(result.abs().sum(), given)
    return [result.detach(), gradient], saved


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_taken_off_at_any_save(op: Callable[[Tensor], Tensor]) -> None:
    expected, count = run(op, off_at=-1)
    assert count > 0
    for place in range(count):
        found, _ = run(op, off_at=place)
        assert all(map(torch.equal, found, expected)), place


def saves(op: Callable[[Tensor], Tensor], capture: CaptureMode, on_at: int) -> list[tuple[bool, bool]]:
    """What is known at each save: whether no op was under way, and whether the mode saw a copy last."""
    found: list[tuple[bool, bool]] = []

    def pack(tensor: Tensor) -> Tensor:
        between = is_between_ops(tensor)
        if len(found) == on_at:
            capture.begin(0, between)
        found.append((between, capture.copied))
        with torch._C._DisableTorchDispatch():
            return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        op(GIVEN.clone().requires_grad_().neg())
    capture.end()
    return found


def test_between_ops() -> None:
    capture = CaptureMode({}, lambda _: None, place=0)
    assert saves(torch.sin, capture, -1) == [(False, False)]  # its operand
    assert saves(torch.tanh, capture, -1) == [(True, False)]  # its result
    assert saves(lambda x: x.exp().sin(), capture, -1) == [(True, False), (False, False)]


def test_copies_are_made_in_the_middle_of_an_op() -> None:
    """An op that writes over what its backward pass needs saves a copy, which looks like a result."""
    capture = CaptureMode({}, lambda _: None, place=0)
    result, operand, copy = (True, False), (False, False), (False, True)
    assert saves(lambda x: x.exp().mul_(SCALE).sin(), capture, 0) == [result, operand, copy, operand]
