"""Cells that use what somebody else has made: weights, states, inputs and ops of other sorts."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.utils import _pytree

import ebbtide
from ebbtide.errors import SequenceError
from ebbtide.sequence import fence
from ebbtide.sequence.blocks import SPARE_BYTES, blocks_within
from ebbtide.sequence.tensors import TensorLayout
from tests.sequence.loops import WIDTH, Loop, compare, in_thread, plain

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPE = 3, WIDTH


def weights() -> Tensor:
    return torch.randn(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_()


class Penalty(torch.autograd.Function):
    """Changes nothing, but adds the gradient of a penalty, as losses that balance experts do."""

    passes = 0

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        Penalty.passes += 1
        return grad + 0.1 * ctx.saved_tensors[0]


def test_a_function_outside_is_gone_back_through_once() -> None:
    """Though the cell uses what it has made, and what that was made of."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        Penalty.passes = 0
        weight, source = weights(), torch.randn(3, WIDTH, requires_grad=True)
        kept: Tensor = Penalty.apply(source @ weight)  # type: ignore[no-untyped-call]
        final, _ = loop(
            lambda h, x: (torch.tanh(h @ weight + kept + x), None), torch.zeros(SHAPE), torch.randn(16, *SHAPE)
        )
        final.square().sum().backward()
        return (final, Penalty.passes), [weight, source]

    compare(program, memory="40KiB")


def test_a_state_of_inference_mode() -> None:
    """No op of the cell saves it, and so PyTorch does not mind."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = weights()
        with torch.inference_mode():
            start = torch.randn(SHAPE)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = 0.9 * h + torch.tanh(x @ weight)
            return h, torch.sigmoid(h).mean()

        final, ys = loop(cell, start, torch.randn(12, *SHAPE))
        (final.square().sum() + torch.stack(ys).sum()).backward()
        return [final, *ys], [weight]

    compare(program, memory="60KiB")


@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # PyTorch's own
@pytest.mark.parametrize("dual", ["state", "inputs", "weight"])
def test_tangents_are_refused(dual: str) -> None:
    """They would be lost. Without gradients a scan is the plain loop, and has them."""
    weight, start, xs = weights().detach(), torch.randn(SHAPE), torch.randn(12, *SHAPE)
    with forward_ad.dual_level():
        tangent = torch.ones_like
        weight = forward_ad.make_dual(weight, tangent(weight)) if dual == "weight" else weight
        start = forward_ad.make_dual(start, tangent(start)) if dual == "state" else start
        xs = forward_ad.make_dual(xs, tangent(xs)) if dual == "inputs" else xs

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(h @ weight + x), None

        with pytest.raises(SequenceError, match="forward-mode"):
            ebbtide.scan(cell, start, xs, memory="60KiB")
        with torch.no_grad():
            found, expected = (loop(cell, start, xs)[0] for loop in (ebbtide.scan, plain))
        assert forward_ad.unpack_dual(found).tangent is not None
        assert torch.equal(forward_ad.unpack_dual(found).tangent, forward_ad.unpack_dual(expected).tangent)


def test_tangents_of_another_thread_are_no_fault() -> None:
    """PyTorch counts levels for all threads together."""
    entered, done = threading.Event(), threading.Event()

    def derive() -> None:
        with forward_ad.dual_level():
            entered.set()
            done.wait(60)

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight, xs = weights(), torch.randn(12, *SHAPE, requires_grad=True)
        final, _ = loop(lambda h, x: (torch.tanh(h @ weight + x), x.sum()), torch.randn(SHAPE), xs)
        final.square().sum().backward()
        return final, [weight, xs]

    thread = threading.Thread(target=derive)
    thread.start()
    try:
        assert entered.wait(60)
        compare(program, memory="60KiB")
    finally:
        done.set()
        thread.join()


def test_transforms_are_refused() -> None:
    def loss(weight: Tensor) -> Tensor:
        final, _ = ebbtide.scan(lambda h, x: (torch.tanh(h @ weight + x), None), torch.zeros(SHAPE), torch.ones(12, 1))
        return torch.as_tensor(final).square().sum()

    with pytest.raises(SequenceError, match=r"torch\.func"):
        torch.func.grad(loss)(weights().detach())


class Noise:
    """Inputs that are drawn where they are indexed."""

    def __init__(self, generator: torch.Generator | None) -> None:
        self.generator = generator

    def __len__(self) -> int:
        return 20

    def __getitem__(self, step: int) -> Tensor:
        if not 0 <= step < len(self):
            raise IndexError
        return torch.randn(SHAPE, generator=self.generator)


@pytest.mark.parametrize("sort", ["default", "own", "shared"])
def test_inputs_that_are_drawn(sort: str) -> None:
    """From PyTorch's generator, from one that nobody else draws from, and from one that the cell draws from, too."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        generator, weight = torch.Generator().manual_seed(7), weights()
        cells = generator if sort == "shared" else None

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh((h + torch.rand(SHAPE, generator=cells)) @ weight + x), None

        final, _ = loop(cell, torch.randn(SHAPE), Noise(None if sort == "default" else generator))
        state = generator.get_state()
        final.square().sum().backward()
        return (final, state, generator.get_state()), [weight]

    compare(program, memory="40KiB")


def test_backward_in_another_thread() -> None:
    """It numbers nodes anew, so that some of the forward pass's thread have numbers as a step's own."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        def both() -> tuple[Any, list[Tensor]]:
            weight, head = weights(), weights()
            doubled = head * 2  # among the first nodes of the thread

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                h = torch.tanh(h @ weight + x)
                return h, h @ doubled

            final, _ = loop(cell, torch.zeros(SHAPE), torch.randn(40, *SHAPE))
            loss = final.square().sum()
            in_thread(loss.backward)
            return final, [weight, head]

        found: tuple[Any, list[Tensor]] = in_thread(both)
        return found

    compare(program, memory="60KiB")


def test_a_sparse_weight() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        edges = (torch.randn(16, 16) * (torch.rand(16, 16) < 0.3) * 0.5).to_sparse().requires_grad_()
        dense = torch.randn(16, 4, requires_grad=True)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(torch.sparse.mm(edges, h) + torch.sparse.mm(edges, dense) + x), None

        final, _ = loop(cell, torch.zeros(16, 4), torch.randn(14, 16, 4))
        final.square().sum().backward()
        assert edges.grad is not None
        return (final, edges.grad.to_dense()), [dense]

    compare(program, memory="40KiB")


class Hidden:
    """A state as somebody has registered it, without telling the keys of its parts."""

    def __init__(self, h: Any, c: Any) -> None:
        self.h, self.c = h, c


_pytree.register_pytree_node(Hidden, lambda state: ([state.h, state.c], None), lambda parts, _: Hidden(*parts))


def test_states_of_a_class_whose_keys_nobody_tells() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        inner = nn.LSTMCell(WIDTH, WIDTH)

        def cell(state: Hidden, x: Tensor) -> tuple[Hidden, None]:
            return Hidden(*inner(x, (state.h, state.c))), None

        final, _ = loop(cell, Hidden(torch.zeros(SHAPE), torch.zeros(SHAPE)), torch.randn(14, *SHAPE))
        final.h.square().sum().backward()
        return (final.h, final.c), list(inner.parameters())

    compare(program, memory="60KiB")


def test_what_is_wrong_in_such_a_state_is_said() -> None:
    with pytest.raises(ebbtide.SequenceError, match=r"the state has str at \[1\]"):
        ebbtide.scan(lambda h, x: (h, x), Hidden(torch.zeros(2), "no tensor"), torch.zeros(3, 2), memory="1MiB")


@pytest.mark.parametrize("nested", [False, True])
def test_functions_behind_other_ops_outside(nested: bool) -> None:
    """Nor are those gone back through for each step; with a scan in the cell that uses the same, neither."""
    gradients = []

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        Penalty.passes = 0
        weight, source = weights(), torch.randn(3, WIDTH, requires_grad=True)
        kept: Tensor = Penalty.apply(source @ weight) * 0.5  # type: ignore[no-untyped-call]
        seen = list[int]()
        kept.register_hook(lambda grad: seen.append(1))

        def inner(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(h @ weight + kept + x), None

        def outer(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return loop(inner, h + kept, x.expand(6, *SHAPE))[0], None

        final, _ = loop(outer if nested else inner, torch.zeros(SHAPE), torch.randn(8, *SHAPE))
        final.square().sum().backward()
        gradients.append((weight.grad, source.grad))
        # A scan gives its weights one gradient, and so a scan of scans adds up in another order than two loops.
        return (final, Penalty.passes, len(seen)), [] if nested else [weight, source]

    compare(program, memory="40KiB")
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


def test_what_is_behind_is_looked_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """By the outer one of two scans, however often the inner one is reversed."""
    looked_at = list[int]()

    def nodes_behind(*arguments: Any) -> set[Any]:
        behind = original(*arguments)
        looked_at.append(len(behind))
        return behind

    original = fence._nodes_behind
    monkeypatch.setattr(fence, "_nodes_behind", nodes_behind)
    code = torch.randn(WIDTH, requires_grad=True)
    for _ in range(50):
        code = torch.sin(code)

    def inner(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(h * code + x), None

    def outer(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return ebbtide.scan(inner, h + code, x.expand(3, *SHAPE))[0], None

    final, _ = ebbtide.scan(outer, torch.zeros(SHAPE), torch.randn(6, *SHAPE))
    for _ in range(2):
        looked_at.clear()
        final.sum().backward(retain_graph=True)
        assert looked_at == [51, 0, 0, 0, 0, 0, 0]


def test_small_states_take_no_more_than_they_may(tmp_path: Any) -> None:
    """With what pads them for a disk, and with Python's objects for them; where all fit, none is padded."""
    layout = TensorLayout([torch.zeros(WIDTH)])
    memory_bytes = 64 << 20
    count = memory_bytes // layout.size_bytes
    for n, spills in ((10**6, True), (10**6, False), (1000, True)):
        blocks = blocks_within(memory_bytes, count, layout, n - 1, spills=spills)
        assert (blocks.block_bytes > layout.size_bytes + 64) == (spills and n == 10**6)
        taken = (blocks.count + 1) * (blocks.block_bytes + layout.objects_bytes)
        assert 0.9 * memory_bytes < taken <= memory_bytes + SPARE_BYTES
