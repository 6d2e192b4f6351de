"""What `scan` runs steps and their formulas under: autocast, and modes of the caller's."""

from __future__ import annotations

import contextlib
import weakref
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import ebbtide
from tests.sequence.loops import WIDTH, Loop, compare

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPE = 3, WIDTH


class TestAutocastOfTheBackwardPass:
    """Formulas run under that of whoever calls the backward pass, as in a plain loop."""

    @pytest.mark.parametrize("backward", ["inside", "outside", "elsewhere"])
    @pytest.mark.parametrize("kind", ["float32 part", "solve"])
    def test_of_cells_that_leave_it(self, kind: str, backward: str) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, other = (torch.randn(WIDTH, WIDTH).div_(WIDTH).requires_grad_() for _ in range(2))

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                x = x @ other
                if kind == "solve":
                    return torch.linalg.solve(torch.eye(WIDTH) + weight, (h + x).T).T, h.mean()
                with torch.autocast("cpu", enabled=False):
                    return torch.tanh(h @ weight + x.float()), h.mean()

            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                final, ys = loop(cell, torch.randn(SHAPE), torch.randn(12, *SHAPE))
                loss = final.square().sum() + torch.stack(ys).sum()
                if backward == "inside":
                    loss.backward()
            with torch.autocast("cpu", torch.float16) if backward == "elsewhere" else contextlib.nullcontext():
                if backward != "inside":
                    loss.backward()
            return [final, *ys], [weight, other]

        compare(program, memory="60KiB")


class Halving(TorchFunctionMode):
    """Products are half as large."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        found = func(*args, **(kwargs or {}))
        return found * 0.5 if func is torch.mul else found


@pytest.mark.parametrize("backward", ["inside", "outside", "elsewhere"])
@pytest.mark.parametrize("device", ["", "cpu", "meta"])
def test_function_modes_of_the_forward_pass(backward: str, device: str) -> None:
    """They are on in the backward pass, too, which PyTorch runs without the one that sees it called."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight, mode = torch.randn(WIDTH, requires_grad=True), Halving()

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(torch.mul(h, weight) + x * (2 if torch.empty(0).is_meta else 3)), None

        start, xs = torch.zeros(SHAPE), torch.randn(12, *SHAPE)
        with Halving(), mode:
            with torch.device(device) if device else contextlib.nullcontext():
                final, _ = loop(cell, start, xs)
            if backward == "inside":
                final.sum().backward()
        with torch.device("cpu") if backward == "elsewhere" else contextlib.nullcontext():
            if backward != "inside":
                final.sum().backward()
        assert not torch.overrides._get_current_function_mode_stack()
        return final, [weight]

    compare(program, memory="30KiB")


class TestHooksOnTheGivenState:
    def cell(self, h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        following = torch.tanh(h + x)
        return following, following.sin()

    @pytest.mark.parametrize("n", [1, 12])
    def test_are_refused(self, n: int) -> None:
        """In a plain loop they see the whole gradient, with what comes from the outputs of the step before."""
        final, _ = ebbtide.scan(self.cell, torch.zeros(SHAPE, requires_grad=True), torch.randn(n, *SHAPE))
        with pytest.raises(ebbtide.SequenceError, match=r"step \d+ has put a hook on the state .* the cell returns"):
            final.sum().backward()

    def test_that_are_gone_again_are_fine(self) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            start = torch.randn(SHAPE, requires_grad=True)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                h.register_hook(lambda grad: grad * 2).remove()
                return torch.tanh(h + x), None

            final, _ = loop(cell, start, torch.randn(12, *SHAPE))
            final.sum().backward()
            return final, [start]

        compare(program, memory="30KiB")

    def test_of_a_counter(self) -> None:
        model = torch.nn.Linear(WIDTH, WIDTH)
        with FlopCounterMode(display=False):
            final, _ = ebbtide.scan(lambda h, x: (model(h) + x, None), torch.zeros(SHAPE), torch.randn(12, *SHAPE))
            with pytest.raises(ebbtide.SequenceError, match="let the cell call them with a result of an op"):
                final.sum().backward()


def test_batched_gradients_are_refused() -> None:
    start = torch.zeros(4, requires_grad=True)
    final, _ = ebbtide.scan(lambda h, x: (torch.tanh(h + x), None), start, torch.randn(5, 4))
    with pytest.raises(ebbtide.SequenceError, match="cannot be batched: ask for them one after another"):
        torch.autograd.grad(final, start, torch.eye(4), is_grads_batched=True)


class TestResultsInOneMemory:
    """Autograd of a plain loop knows views; a scan's results are told apart."""

    def run(self, alter: Any, put_out: Any) -> None:
        weight = torch.randn(WIDTH, requires_grad=True)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
            h = torch.tanh(h * weight + x) + 0.1
            return h, put_out(h)

        final, ys = ebbtide.scan(cell, torch.zeros(SHAPE), torch.randn(12, *SHAPE))
        alter(final, ys)
        (final.sum() + sum(part.sum() for y in ys for part in y)).backward()

    @pytest.mark.parametrize(
        ("alter", "put_out"),
        [
            (lambda _, ys: ys[-1][0].mul_(2), lambda h: (h.view(-1),)),
            (lambda final, _: final.mul_(2), lambda h: (h[1:],)),
            (lambda _, ys: ys[3][1].mul_(2), lambda h: (h, h[:, 1:])),
        ],
        ids=["view of the last state", "the last state", "view of an output"],
    )
    def test_that_are_altered_are_refused(self, alter: Any, put_out: Any) -> None:
        with pytest.raises(ebbtide.SequenceError, match=r"a result of the scan was altered in place .* clone"):
            self.run(alter, put_out)

    def test_others_may_be_altered(self) -> None:
        self.run(lambda _, ys: ys[3][0].mul_(2), lambda h: (h * 2, h[1:]))
        self.run(lambda _, ys: ys[3][1].mul_(2), lambda h: ((both := h * 2)[:1], both[1:]))

    def test_their_memory_is_not_held(self) -> None:
        final, ys = ebbtide.scan(
            lambda h, x: (h + x, (h[0] * 2, h[1:])), torch.zeros(3, requires_grad=True), torch.ones(4)
        )
        gone = weakref.ref(ys[1][1].untyped_storage())
        del ys
        assert gone() is None
        final.sum().backward()
