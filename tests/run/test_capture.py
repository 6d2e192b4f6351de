"""Where the capture mode may be taken off and put on: at any tensor that autograd saves, in the middle of an op too.
What it sees is counted right from there on."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from ebbtide.observe import ctc_loss, mode
from ebbtide.observe.mode import is_between_ops, modes_on
from ebbtide.observe.schema import operator_info
from ebbtide.run.capture import CaptureMode, is_clear
from ebbtide.run.observing import observe_step
from ebbtide.run.stretches import stretches

pytestmark = pytest.mark.usefixtures("nothing_left")

torch.manual_seed(0)
GIVEN = torch.randn(2, 4, 8)
WEIGHT, SCALE = torch.randn(5, 8, requires_grad=True), torch.rand(8, requires_grad=True)
KERNEL = torch.randn(3, 4, 3, requires_grad=True)
LSTM, GRU = nn.LSTM(8, 3), nn.GRU(8, 3)
ATTENTION = nn.MultiheadAttention(8, 2)


def two_products(x: Tensor) -> Tensor:
    """Two ops of one name, of which but the first saves anything."""
    product = x * SCALE
    with torch.no_grad():
        other = product * 2
    return product + other.neg()


OPS: dict[str, Callable[[Tensor], Tensor]] = {
    "sin": torch.sin,
    "tanh": torch.tanh,
    "product": lambda x: x * SCALE,
    "product in place": lambda x: x.mul_(SCALE),
    "sum of products in place": lambda x: x.addcmul_(x.detach(), SCALE),
    "two products": two_products,
    "linear": lambda x: functional.linear(x, WEIGHT),
    "convolution": lambda x: functional.conv1d(x, KERNEL, torch.ones(3)),
    "layer norm": lambda x: functional.layer_norm(x, (8,), SCALE),
    "group norm": lambda x: functional.group_norm(x, 2),
    "batch norm": lambda x: functional.batch_norm(x, torch.zeros(4), torch.ones(4), training=True),
    "attention": lambda x: functional.scaled_dot_product_attention(x, x, x),
    "attention in several ops": lambda x: functional.scaled_dot_product_attention(x, x, x, dropout_p=0.1),
    "multi-head attention": lambda x: ATTENTION(x, x, x)[0],
    "lstm": lambda x: LSTM(x)[0],
    "gru": lambda x: GRU(x)[0],
    "dropout": functional.dropout,
    "cross entropy": lambda x: functional.cross_entropy(x, torch.ones(2, 8, dtype=torch.int64)),
    "largest": lambda x: x.max(dim=1).values,
    "indices": lambda x: x[x > 0],
    "concatenation": lambda x: torch.cat([x * SCALE, x.exp()]),
    "spectrum": lambda x: torch.fft.rfft(x).abs(),
    "conjugated": lambda x: torch.fft.rfft(x).conj() * SCALE[:5],
    "negated": lambda x: torch.fft.rfft(x).conj().imag.clamp(-1, 1).square(),
    "autocast": lambda x: torch.autocast("cpu")(functional.linear)(x, WEIGHT),
}


def run(op: Callable[[Tensor], Tensor], off_at: int) -> tuple[list[Tensor], int]:
    """The results of ``op`` and its gradients, and how many tensors it saved; under a mode that is taken off at one."""
    torch.manual_seed(1)
    capture, saved = CaptureMode({}, (), lambda _: None, below=0), 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal saved
        if saved == off_at and capture.may_end(tensor):
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


class Names(CaptureMode):
    """Notes which op is seen at which tick."""

    def __init__(self, names: Sequence[str]) -> None:
        super().__init__({}, names, lambda _: None, below=0)
        self.seen: list[tuple[int, str]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(func, types, args, kwargs)
        self.seen.append((self.tick - 1, operator_info(func).name))
        return result


def counted(op: Callable[[Tensor], Tensor], capture: Names, ticks: Sequence[int], on_at: int) -> list[int]:
    """Run ``op`` twice over, under a mode that is put on at one of its saves, or at the beginning.

    Args:
        op: what to run.
        capture: the mode.
        ticks: those of the saves, if they are known.
        on_at: the save; -1 for the beginning.

    Returns:
        The tick of the op that comes next, as far as the mode knows, at each save.
    """
    torch.manual_seed(1)
    found: list[int] = []

    def pack(tensor: Tensor) -> Tensor:
        if len(found) == on_at:
            capture.begin(ticks[on_at], is_between_ops(tensor))
        elif ticks and capture.entered:
            capture.tick = capture.counted_from(ticks[len(found)])
        found.append(capture.tick)
        with torch._C._DisableTorchDispatch():
            return tensor.detach()

    given = GIVEN.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        if on_at < 0:
            capture.begin(0, between_ops=True)
        try:
            op(given + 0)
            op(given - 1)
        finally:
            capture.end()
    return found


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_counts_from_any_save(op: Callable[[Tensor], Tensor]) -> None:
    """A mode that is put on at a save sees the next op at the latest, and knows which it is, if that can be told."""
    whole = Names(())
    ticks = counted(op, whole, (), on_at=-1)
    names = [name for _, name in whole.seen]
    assert [tick for tick, _ in whole.seen] == list(range(len(names)))
    for place, tick in enumerate(ticks):
        late = Names(names)
        known = counted(op, late, ticks, on_at=place)[place] >= 0
        told = [(at, name) for at, name in late.seen if at >= 0]
        assert all(whole.seen[at] == (at, name) for at, name in told)
        if known:
            assert told == whole.seen[tick:]
        elif is_clear(names[tick : tick + 2]):
            assert told in (whole.seen[tick:], whole.seen[tick + 1 :])


@pytest.mark.parametrize("op", OPS.values(), ids=OPS.keys())
def test_stretches_show_any_call(op: Callable[[Tensor], Tensor]) -> None:
    """Whichever two ops are wanted, the mode is on in time for each and counts it right, and goes off behind it."""

    def run() -> None:
        torch.manual_seed(1)
        given = GIVEN.clone().requires_grad_()
        op(given + 0)
        op(given - 1)

    step = observe_step(run)
    names = [op.name for op in step.ops]
    pairs = itertools.chain.from_iterable(
        {(tick, tick), (0, tick), (max(0, tick - 4), tick)} for tick in range(len(names))
    )
    for wanted in pairs:
        *starts, first = stretches(step, wanted)
        capture, events = Names(names), iter(starts)

        def pack(tensor: Tensor, capture: Names = capture, events: Iterator[int] = events) -> Tensor:
            start = next(events)
            if start < 0 and capture.may_end(tensor):
                capture.end()
            elif start >= 0:
                capture.begin(start, is_between_ops(tensor))
            with torch._C._DisableTorchDispatch():
                return tensor.detach()

        with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
            if first >= 0:
                capture.begin(first, between_ops=True)
            run()
        capture.end()
        assert {(tick, names[tick]) for tick in wanted} <= set(capture.seen)
        assert [name == names[tick] for tick, name in capture.seen if tick >= 0].count(False) == 0


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
    capture = CaptureMode({}, (), lambda _: None, below=0)
    assert saves(torch.sin, capture, -1) == [(False, False)]  # its operand
    assert saves(torch.tanh, capture, -1) == [(True, False)]  # its result
    assert saves(lambda x: x.exp().sin(), capture, -1) == [(True, False), (False, False)]


def test_copies_are_made_in_the_middle_of_an_op() -> None:
    """An op that writes over what its backward pass needs saves a copy, which looks like a result."""
    capture = CaptureMode({}, (), lambda _: None, below=0)
    result, operand, copy = (True, False), (False, False), (False, True)
    assert saves(lambda x: x.exp().mul_(SCALE).sin(), capture, 0) == [result, operand, copy, operand]


def on_and_off(capture: CaptureMode) -> None:
    capture.begin(0, between_ops=True)
    capture.end()


def test_an_interrupt_as_the_mode_is_put_on_or_taken_off_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("_push", "_pop"):
        original = vars(mode)[name]

        def interrupted(given: Any, original: Callable[[Any], None] = original) -> None:
            original(given)
            raise KeyboardInterrupt

        capture = CaptureMode({}, (), lambda _: None, below=0)
        with monkeypatch.context() as patch:
            patch.setattr(mode, name, interrupted)
            with pytest.raises(KeyboardInterrupt):
                on_and_off(capture)
        capture.end()
        assert modes_on() == []
        assert torch.ctc_loss is ctc_loss._original
