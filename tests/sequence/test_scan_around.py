"""What `scan` runs steps and their formulas under: autocast, and modes of the caller's."""

from __future__ import annotations

import contextlib
import itertools
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.utils import parametrize
from torch.overrides import TorchFunctionMode
from torch.utils.flop_counter import FlopCounterMode

import ebbtide
from tests.sequence.loops import WIDTH, Loop, compare, in_thread

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


HALF = torch.autocast("cpu", torch.bfloat16)
"""Made outside of cells, as scripts do once: it keeps what is converted within it."""


class TestAutocastOfTheCellsOwn:
    """Steps convert what they use anew each, as in a plain loop, whoever made the context."""

    @pytest.mark.parametrize("around", [False, True], ids=["alone", "within the caller's"])
    @pytest.mark.parametrize("uses", ["once", "twice", "as input", "decorated"])
    def test_a_context_that_is_entered_in_each_step(self, uses: str, around: bool) -> None:
        is_plain = itertools.chain([True], itertools.repeat(False))

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            clears = around and next(is_plain)  # within another one, a plain loop's steps share what is converted
            weight, other = (torch.randn(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_() for _ in range(2))
            start, xs = torch.randn(SHAPE, requires_grad=True), torch.randn(12, *SHAPE, requires_grad=True)

            def inner(h: Tensor, x: Tensor) -> Tensor:
                found = h @ weight
                if uses == "twice":
                    found = found + torch.sin(h @ other)
                if uses == "as input":
                    found = found + torch.sin(x @ other) + x @ weight
                return found

            product = HALF(inner) if uses == "decorated" else inner

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                with HALF if uses != "decorated" else contextlib.nullcontext():
                    found = product(h, x)
                if clears:
                    torch.clear_autocast_cache()
                return torch.tanh(found.float() + x), None

            outer = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
            with outer if around else contextlib.nullcontext():
                final, _ = loop(cell, start, xs)
            final.float().square().sum().backward()
            return [final], [weight, start, xs, *([other] if uses in ("twice", "as input") else [])]

        compare(program, memory="60KiB")
        assert torch.is_autocast_cache_enabled()

    @pytest.mark.parametrize("backward", ["outside", "inside"])
    @pytest.mark.parametrize("uses", ["twice", "as input"])
    def test_a_context_that_each_step_makes(self, uses: str, backward: str) -> None:
        """It keeps weights, and state 0 and inputs that are leaves, but no later state, as in a plain loop."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, other = (torch.randn(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_() for _ in range(2))
            start, leaf = torch.randn(SHAPE, requires_grad=True), torch.randn(SHAPE, requires_grad=True)
            rest = torch.randn(11, *SHAPE, requires_grad=True)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                with torch.autocast("cpu", torch.bfloat16):
                    found = h @ weight + torch.sin(h @ other)
                    if uses == "as input":
                        found = h @ weight + torch.sin(x @ other) + x @ weight
                return torch.tanh(found.float() + x), None

            final, _ = loop(cell, start, [leaf, *(rest * 1.0)])
            outer = torch.autocast("cpu", torch.bfloat16, cache_enabled=False)
            with outer if backward == "inside" else contextlib.nullcontext():
                final.square().sum().backward()
            return [final], [weight, other, start, leaf, rest]

        compare(program, memory="60KiB")
        assert torch.is_autocast_cache_enabled()


def test_what_the_callers_contexts_keep_stays() -> None:
    """A layer before and after a scan is converted once."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        head, weight = (torch.randn(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_() for _ in range(2))

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):  # as in the steps of a scan
                return torch.tanh(h @ weight + x), None

        with torch.autocast("cpu", torch.bfloat16):
            before = torch.randn(8, WIDTH) @ head
            final, _ = loop(cell, torch.randn(SHAPE), torch.randn(12, *SHAPE))
            after = torch.randn(8, WIDTH) @ head
        (before.float().sin().sum() + after.float().cos().sum() + final.float().square().sum()).backward()
        return [before, final, after], [head, weight]

    compare(program, memory="60KiB")


def test_a_backward_pass_in_inference_mode() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = torch.randn(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_()
        start, xs = torch.randn(SHAPE, requires_grad=True), torch.randn(12, *SHAPE, requires_grad=True)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
            h = torch.tanh(h @ weight + x)
            return h, h.mean()

        final, ys = loop(cell, start, xs)
        loss = final.square().sum() + torch.stack(ys).sum()
        with torch.inference_mode():
            loss.backward()
        return [final, *ys], [weight, start, xs]

    compare(program, memory="30KiB")


class Noisy(torch.autograd.Function):
    """Changes nothing, but adds noise to gradients."""

    @staticmethod
    def forward(ctx: Any, h: Tensor, generator: torch.Generator | None) -> Tensor:
        ctx.generator = generator
        return h.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad + 0.1 * torch.randn(grad.shape, generator=ctx.generator), None


@pytest.mark.parametrize("own", [False, True], ids=["PyTorch's generator", "its own"])
@pytest.mark.parametrize("passes", [1, 2])
def test_formulas_draw_on(passes: int, own: bool) -> None:
    """From step to step, and so does what comes after the backward pass; steps draw again what they drew."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = torch.randn(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_()
        generator = torch.Generator().manual_seed(7) if own else None

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            h = torch.tanh(h @ weight + x * torch.rand(SHAPE, generator=generator))
            return Noisy.apply(h, generator), None  # type: ignore[no-untyped-call]

        final, _ = loop(cell, torch.zeros(SHAPE), torch.randn(12, *SHAPE))
        for number in range(passes):
            final.square().sum().backward(retain_graph=number + 1 < passes)
        return (final, torch.rand(4, generator=generator)), [weight]

    compare(program, memory="40KiB")


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


class TestHooksOnGivenInputs:
    """They see the whole gradient, wherever the input is used, as in a plain loop."""

    def program(
        self, used: str, *, leaf: bool, removed: bool = False, passes: int = 1
    ) -> Callable[[Loop], tuple[Any, list[Tensor]]]:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, WIDTH).div_(WIDTH**0.5).requires_grad_()
            sources = [torch.randn(SHAPE, requires_grad=True) for _ in range(12)]
            xs = sources if leaf else [source * 2 for source in sources]
            last, seen, handles = xs[0 if used == "in all steps" else -1], list[Tensor](), list[Any]()
            last.register_hook(lambda grad: grad * 0.5)  # one that is there before

            def clip(grad: Tensor) -> Tensor:
                seen.append(grad.clone())
                return grad.clamp(-0.05, 0.05)

            def cell(h: Tensor, item: tuple[Tensor, int]) -> tuple[Tensor, None]:
                x, step = item
                if step == 11:
                    handles.append(x.register_hook(clip))
                    x.register_hook(lambda grad: grad * 3)
                h = h + last.sin() if used == "closed over" else h
                return torch.tanh(h @ weight + x), None

            given = [(last if used == "in all steps" else x, step) for step, x in enumerate(xs)]
            final, _ = loop(cell, torch.zeros(SHAPE), given)
            loss = final.square().sum() + (sum(x.square().sum() for x in xs) if used == "elsewhere" else 0)
            for handle in handles if removed else ():
                handle.remove()
            for number in range(passes):
                loss.backward(retain_graph=number + 1 < passes)
            return (final, seen), [weight, *sources]

        return program

    @pytest.mark.parametrize("leaf", [True, False], ids=["a leaf", "a result"])
    @pytest.mark.parametrize("used", ["once", "elsewhere", "in all steps", "closed over"])
    def test_run_once(self, used: str, leaf: bool) -> None:
        compare(self.program(used, leaf=leaf), memory="30KiB")
        compare(self.program(used, leaf=leaf, passes=2), memory="30KiB")

    @pytest.mark.parametrize("leaf", [True, False], ids=["a leaf", "a result"])
    def test_may_be_removed(self, leaf: bool) -> None:
        compare(self.program("elsewhere", leaf=leaf, removed=True), memory="30KiB")

    @pytest.mark.parametrize("leaf", [True, False], ids=["a leaf", "a result"])
    def test_that_are_removed_leave_nothing(self, leaf: bool) -> None:
        source, handles = torch.randn(SHAPE, requires_grad=True), list[Any]()
        xs = [source if leaf else source * 2]

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            handles.append(x.register_hook(lambda grad: grad * 2))
            return torch.tanh(h + x), None

        final, _ = ebbtide.scan(cell, torch.zeros(SHAPE), xs)
        assert len(xs[0]._backward_hooks or ()) == 1
        final.sum().backward()
        for handle in handles:
            handle.remove()
        assert not xs[0]._backward_hooks

    def test_where_weights_are_cached(self) -> None:
        """The cell runs once more then, with what it is given itself."""
        with parametrize.cached():
            compare(self.program("elsewhere", leaf=True), memory="30KiB")

    def test_of_a_counter(self) -> None:
        """It waits for the node of what a step was given, which nobody goes through."""
        model, xs = torch.nn.Linear(WIDTH, WIDTH), torch.randn(12, *SHAPE, requires_grad=True)
        with FlopCounterMode(display=False) as counter:
            final, _ = ebbtide.scan(lambda h, x: (torch.tanh(h) + model(x), None), torch.zeros(SHAPE), xs)
            forward = counter.get_total_flops()
            final.sum().backward()
        assert counter.get_total_flops() > forward > 0


def test_batched_gradients_are_refused() -> None:
    start = torch.zeros(4, requires_grad=True)
    final, _ = ebbtide.scan(lambda h, x: (torch.tanh(h + x), None), start, torch.randn(5, 4))
    with pytest.raises(ebbtide.SequenceError, match="cannot be batched: ask for them one after another"):
        torch.autograd.grad(final, start, torch.eye(4), is_grads_batched=True)


class TestResultsInOneMemory:
    """Autograd of a plain loop knows views; a scan's results are told apart."""

    def program(self, loop: Loop, alter: Any, put_out: Any) -> tuple[Any, list[Tensor]]:
        weight = torch.randn(WIDTH, requires_grad=True)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
            h = torch.tanh(h * weight + x) + 0.1
            return h, put_out(h)

        final, ys = loop(cell, torch.zeros(SHAPE), torch.randn(12, *SHAPE))
        alter(final, ys)
        (final.sum() + sum(part.sum() for y in ys for part in y)).backward()
        return [final, *ys], [weight]

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
            self.program(ebbtide.scan, alter, put_out)

    @pytest.mark.parametrize(
        ("alter", "put_out"),
        [
            (lambda _, ys: ys[3][0].mul_(2), lambda h: (h * 2, h[1:])),
            (lambda _, ys: ys[3][1].mul_(2), lambda h: ((both := h * 2)[:1], both[1:])),
        ],
        ids=["an output of its own", "one part of an output"],
    )
    def test_others_may_be_altered(self, alter: Any, put_out: Any) -> None:
        compare(lambda loop: self.program(loop, alter, put_out))

    def test_their_memory_is_not_held(self) -> None:
        final, ys = ebbtide.scan(
            lambda h, x: (h + x, (h[0] * 2, h[1:])), torch.zeros(3, requires_grad=True), torch.ones(4)
        )
        gone = weakref.ref(ys[1][1].untyped_storage())
        del ys
        assert gone() is None
        final.sum().backward()


class CurrentDevice(threading.local):
    """CUDA's, of which each thread has one, as `torch.cuda.device` makes it."""

    index = 0

    def context(self, index: int) -> contextlib.AbstractContextManager[None]:
        @contextlib.contextmanager
        def made() -> Iterator[None]:
            before, self.index = self.index, index
            yield
            self.index = before

        return made()


def test_the_current_cuda_device_is_that_of_the_forward_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """It is what "cuda" means to a cell. Autograd runs the backward pass in a thread of the outputs' device."""
    current, seen = CurrentDevice(), list[int]()
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: current.index)
    monkeypatch.setattr(torch.cuda, "device", current.context)
    weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        seen.append(torch.cuda.current_device())
        return torch.tanh(h @ weight + x), None

    def backward() -> int:
        current.index = 1
        loss.backward()
        return current.index

    final, _ = ebbtide.scan(cell, torch.zeros(SHAPE), torch.randn(12, *SHAPE), memory="30KiB")
    loss, forward = final.square().sum(), len(seen)
    assert in_thread(backward) == 1
    assert len(seen) > forward
    assert set(seen) == {0}
