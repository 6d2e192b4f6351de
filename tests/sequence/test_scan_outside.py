"""`scan` of cells that use what they are not given, against the plain loop."""

from __future__ import annotations

import contextlib
import types
import weakref
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize

import ebbtide
from tests.sequence.loops import LSTM, WIDTH, Loop, compare, in_thread, states

pytestmark = pytest.mark.usefixtures("nothing_left")


class Halved(Tensor):
    """Products with it are half as large."""

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **(kwargs or {}))
            return found.as_subclass(Tensor) * 0.5 if func is torch.mul else found


class TestPutOutUnseen:
    """Tensors that reach the loss other than through what the cell returns as tensors."""

    @pytest.mark.parametrize("way", ["object", "distribution", "list"])
    @pytest.mark.parametrize("n", [1, 2, 9])
    def test_gradients_are_refused(self, way: str, n: int) -> None:
        weight, start = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)
        kept: list[Tensor] = []

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
            h = torch.tanh(h @ weight + x)
            kept.append(h)
            normal = torch.distributions.Normal(h, 1.0)
            return h, {"object": types.SimpleNamespace(h=h), "distribution": normal, "list": None}[way]

        _, ys = ebbtide.scan(cell, start, torch.randn(n, 3, 4))
        seen: Tensor = kept[-1] if way == "list" else getattr(ys[-1], {"object": "h", "distribution": "mean"}[way])
        with pytest.raises(ebbtide.SequenceError, match="return it as a part of the state or of y"):
            seen.sum().backward()

    def test_what_is_only_looked_at_is_fine(self) -> None:
        """And so are gradients that the cell asks for, and hooks of its own."""
        norms: list[Tensor] = []

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, start = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Any]:
                energy = (torch.tanh(h @ weight) * x).sum()
                (slope,) = torch.autograd.grad(energy, h, create_graph=True)
                slope.register_hook(lambda grad: grad * 0.5)
                norms.append(slope.norm())
                return h - slope, types.SimpleNamespace(energy=energy.item())

            final, _ = loop(cell, start, torch.randn(7, 3, 4))
            final.square().sum().backward()
            return final, [weight, start]

        compare(program, memory="20KiB")


class TestOutside:
    """What the cell uses without being given it."""

    def test_results_of_other_ops(self) -> None:
        """Keys are computed from values, both are closed over, and both come from parameters that the cell uses too."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
            source = torch.randn(5, WIDTH, requires_grad=True)
            values = (source @ weight).tanh()
            keys, gate = (values @ weight.t()).chunk(2, dim=1)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                h = torch.tanh(h @ weight / 5 + x)
                attended = torch.softmax(h[:, : WIDTH // 2] @ keys.t(), -1) @ values
                return h + attended * torch.sigmoid(h[:, :5] @ gate).repeat(1, 2), attended

            xs = torch.randn(14, 3, WIDTH)
            final, ys = loop(cell, torch.zeros(3, WIDTH), xs)
            (final.sum() + torch.stack(ys).square().sum()).backward()
            return (final, ys), [weight, source]

        compare(program, memory=states(3, torch.zeros(3, WIDTH)))

    def test_tensors_with_code_of_their_own(self) -> None:
        """It runs in both passes, that of inputs, too, though PyTorch runs the backward pass of such a loss without."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, WIDTH, requires_grad=True)
            scale = torch.rand(WIDTH).as_subclass(Halved)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                return torch.tanh(torch.mul(h @ weight, scale) + torch.mul(h + 1, x)), None

            xs = [torch.randn(3, WIDTH).as_subclass(Halved) for _ in range(14)]
            final, _ = loop(cell, torch.zeros(3, WIDTH), xs)
            final.sum().as_subclass(Halved).backward()
            return (final, []), [weight]

        compare(program, memory=states(3, torch.zeros(3, WIDTH)))

    @pytest.mark.parametrize("spills", [False, True])
    def test_a_default_device(self, spills: bool, tmp_path: Path) -> None:
        """Steps find it in both passes, though PyTorch runs backward passes without; ours find it in none."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                return torch.tanh(h @ weight * (2.0 if torch.empty(0).is_meta else 3.0) + x), None

            start, xs = torch.zeros(3, WIDTH), torch.randn(40, 3, WIDTH)
            with torch.device("meta"):
                final, _ = loop(cell, start, xs)
                final.sum().backward()
            return (final, []), [weight]

        compare(program, memory=states(3, torch.zeros(3, WIDTH)), spill=tmp_path if spills else None)

    @pytest.mark.parametrize("before", [60, 100, 1000], ids=lambda before: f"{before} nodes before")
    def test_results_of_other_threads(self, before: int) -> None:
        """Each thread numbers nodes from 0: some steps' are numbered as those that are used from outside, or later."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, WIDTH, requires_grad=True)

            def made() -> tuple[Tensor, ...]:
                for _ in range(before):
                    weight.sin()
                return (weight * 2).tanh().chunk(2)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                h = torch.tanh(h @ left.t() @ left / 5 + x).sin()
                return h, h.cos() @ right.t() if x > 0 else h * 2

            left, right = in_thread(made)
            start = torch.randn(3, WIDTH, requires_grad=True)
            final, ys = in_thread(lambda: loop(cell, start, torch.arange(20)))
            (final.sum() + sum(y.square().sum() for y in ys)).backward()
            return (final, ys), [weight, start]

        compare(program, memory=states(3, torch.zeros(3, WIDTH)))

    @pytest.mark.parametrize("put_out", [False, True])
    def test_leaves_of_the_steps_themselves(self, put_out: bool) -> None:
        """They are not held from one step to the next: each is as large as a state."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
            scales = [torch.rand(WIDTH, requires_grad=True) for _ in range(12)]

            def cell(x: Tensor, k: Tensor) -> tuple[Tensor, tuple[Tensor, Tensor | None]]:
                place = x.detach().requires_grad_()
                loss = energy(scales[int(k)] * place * scales[-1 - int(k)]).sum()
                (force,) = torch.autograd.grad(loss, place, create_graph=True)
                made.append(weakref.ref(place))
                return x - 0.1 * force, (loss, place if put_out else None)

            made: list[weakref.ref[Tensor]] = []
            start = torch.randn(3, WIDTH, requires_grad=True)
            final, ys = loop(cell, start, torch.arange(12))
            held.append([leaf() is not None for leaf in made].count(True))
            edges.append(len(final.grad_fn.next_functions))
            total = final.square().sum() + torch.stack([loss for loss, _ in ys]).sum()
            (total + sum(place.square().sum() for _, place in ys if place is not None)).backward()
            return (final, ys), [start, *energy.parameters(), *scales]

        held: list[int] = []
        edges: list[int] = []
        compare(program, memory=states(3, torch.zeros(3, WIDTH)))
        assert held == [12, 0]
        assert edges[1] <= 4 + 12 + 3  # parameters, scales, start, places of what is gone

    def test_a_leaf_of_a_step_that_is_put_out(self) -> None:
        """What its gradient is comes to nobody else that is found later."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            scales = [torch.rand(WIDTH, requires_grad=True) for _ in range(6)]

            def cell(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
                if k % 2 == 0:
                    place = x.detach().requires_grad_()
                    return x.sin() + place, place
                return (x * scales[int(k)]).sin(), x.sum()

            start = torch.randn(3, WIDTH, requires_grad=True)
            final, ys = loop(cell, start, torch.arange(6))
            (final.sum() + sum(y.square().sum() for y in ys)).backward()
            return (final, ys), [start, *scales]

        compare(program, memory=states(3, torch.zeros(3, WIDTH)))

    @pytest.mark.parametrize("cached", ["scan", "scan and backward", "backward", "cell"])
    @pytest.mark.parametrize("n", [1, 2, 9])
    def test_parametrized_weights(self, n: int, cached: str) -> None:
        """`cached` may have ended before the backward pass: there steps use what it had then, not new ones."""

        class Symmetric(nn.Module):
            def forward(self, weight: Tensor) -> Tensor:
                return weight.triu() + weight.triu(1).T

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            torch.manual_seed(1)
            layer = nn.Sequential(parametrizations.weight_norm(nn.Linear(4, 4)), nn.Dropout(0.1), nn.Linear(4, 4))
            parametrize.register_parametrization(layer[2], "weight", Symmetric())
            start, xs = torch.randn(3, 4, requires_grad=True), torch.randn(n, 3, 4)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                with parametrize.cached() if cached == "cell" else contextlib.nullcontext():
                    h = torch.tanh(layer(h) + layer(x))
                return h, h.square().mean()

            with parametrize.cached() if cached.startswith("scan") else contextlib.nullcontext():
                h, ys = loop(cell, start, xs, memory=states(3, start))
                loss = h.sum() + sum(ys)
                if cached == "scan and backward":
                    loss.backward()
            with parametrize.cached() if cached == "backward" else contextlib.nullcontext():
                if cached != "scan and backward":
                    loss.backward()
            assert not parametrize._cache
            return [h, *ys], [start, *layer.parameters()]

        compare(program)

    def test_two_scans_and_layers_around_them(self) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            embedding, head = nn.Embedding(11, WIDTH), nn.Linear(WIDTH, 11)
            below, above = LSTM(), LSTM()
            tokens = torch.randint(11, (20, 3))
            start = (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
            middle, ys = loop(below, start, embedding(tokens))
            final, ys = loop(above, middle, ys)
            loss = nn.functional.cross_entropy(head(torch.stack(ys)).flatten(0, 1), tokens.flatten())
            loss.backward()
            return (final, ys), [p for m in (embedding, head, below, above) for p in m.parameters()]

        compare(program, memory="40KiB")

    def test_other_parameters_in_each_step(self) -> None:
        """A scan over the layers of a deep network; one is used twice, and some need no gradient."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            blocks = [nn.Linear(WIDTH, WIDTH) for _ in range(12)]
            blocks[3].requires_grad_(False)
            blocks[7] = blocks[2]
            x = torch.randn(4, WIDTH)
            final, ys = loop(lambda h, block: (h + torch.relu(block(h)), None), x, nn.ModuleList(blocks))
            final.square().sum().backward()
            assert ys == [None] * 12
            return final, [p for block in blocks for p in block.parameters()]

        compare(program, memory=states(3, torch.zeros(4, WIDTH)))

    @pytest.mark.parametrize("leaf", [False, True])
    def test_state_0_and_inputs_closed_over(self, leaf: bool) -> None:
        """And put out as they were. A plain loop adds up all that arrives for each of them in one place."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            leaves = [torch.randn(3, WIDTH, requires_grad=True) for _ in range(8)]
            anchor, *xs = leaves if leaf else [(source * 2).sin() for source in leaves]

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
                return torch.tanh(h * x + anchor * 0.7 - xs[4].cos() * anchor), (h * 3, x, xs[4])

            final, ys = loop(cell, anchor, xs)
            (final.sum() + ys[0][1].exp().sum() + ys[5][2].sin().sum() + sum(y[0].sin().sum() for y in ys)).backward()
            return (final, ys), leaves

        compare(program, memory=states(3, torch.zeros(3, WIDTH)))

    def test_the_same_input_each_time(self) -> None:
        """Also as something that the cell closes over."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            x = torch.randn(3, WIDTH, requires_grad=True)
            y = torch.randn(3, WIDTH, requires_grad=True)

            def cell(h: Tensor, given: tuple[Tensor, Tensor, int]) -> tuple[Tensor, Tensor]:
                return torch.tanh(h + given[0] * y).sin() * given[0] - given[1] * given[2], h

            final, ys = loop(cell, torch.randn(3, WIDTH), [(x, x, k) for k in range(9)])
            (final.sum() + ys[4].exp().sum()).backward()
            return (final, ys), [x, y]

        compare(program, memory=states(3, torch.zeros(3, WIDTH)))

    def test_hooks_see_the_whole_gradient_once(self) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            cell = LSTM()
            scale = torch.randn(WIDTH, WIDTH, requires_grad=True)
            scaled = scale.sin()
            scaled.retain_grad()
            seen: list[Tensor] = []
            scaled.register_hook(seen.append)
            cell.mix.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
            state = (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
            _, ys = loop(lambda s, x: cell(s, x @ scaled), state, torch.randn(9, 3, WIDTH))
            torch.stack(ys).sum().backward()
            assert scaled.grad is not None
            return (seen, scaled.grad), [scale, *cell.parameters()]

        compare(program, memory="40KiB")

    @pytest.mark.parametrize("when", ["each step", "once", "later steps"])
    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("leaf", [True, False], ids=["a leaf", "a result"])
    def test_hooks_that_the_cell_puts_on_it(self, leaf: bool, passes: int, when: str) -> None:
        """Steps that run more than once put them on once, and so does a cell that puts one on in its first run."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, seen, put = torch.randn(WIDTH, requires_grad=True), list[Tensor](), list[Any]()
            used, unused = (weight if leaf else weight * 2), weight + 1

            def see(grad: Tensor) -> Tensor:
                seen.append(grad.clone())
                return grad * 0.9

            def cell(h: Tensor, item: tuple[Tensor, int]) -> tuple[Tensor, None]:
                x, step = item
                if when == "each step" or (when == "later steps" and step > 5) or (when == "once" and not put):
                    put[:] = [tensor.register_hook(see) for tensor in (used, unused)]
                    if leaf:
                        weight.register_post_accumulate_grad_hook(see_whole)
                inner = h * used
                inner.register_hook(lambda grad: grad * 0.5)
                return torch.tanh(inner + x), None

            def see_whole(tensor: Tensor) -> None:
                assert tensor.grad is not None
                seen.append(tensor.grad.clone())

            final, _ = loop(
                cell, torch.zeros(3, WIDTH), [(x, step) for step, x in enumerate(torch.randn(12, 3, WIDTH))]
            )
            loss = final.square().sum() + unused.sum()
            for number in range(passes):
                loss.backward(retain_graph=number + 1 < passes)
            loop(lambda h, x: (h * weight + x, None), torch.zeros(WIDTH), torch.randn(3, WIDTH))[0].sum().backward()
            return (final, seen, sum(len(tensor._backward_hooks or ()) for tensor in (used, unused))), [weight]

        compare(program, memory=states(3, torch.zeros(3, WIDTH)))
        with parametrize.cached():
            compare(program, memory=states(3, torch.zeros(3, WIDTH)))

    def test_tensor_that_leaks_from_step_to_step(self) -> None:
        kept: list[Tensor] = []
        weight = torch.randn(WIDTH, requires_grad=True)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            kept.append(h * weight)
            return torch.tanh(kept[-1] + sum(kept)), None

        with pytest.raises(ebbtide.SequenceError, match="step 1 uses a tensor that an earlier step made"):
            ebbtide.scan(cell, torch.zeros(WIDTH), torch.zeros(4, WIDTH))

    def test_result_of_another_thread_that_cannot_be_told_from_a_step(self) -> None:
        weight = torch.randn(WIDTH, requires_grad=True)
        scale = in_thread(lambda: [weight.sin() * 2 for _ in range(3)][-1])  # numbered as what step 0 makes at last

        def program() -> object:
            return ebbtide.scan(lambda h, x: ((h * scale).tanh() + x, None), torch.zeros(WIDTH), torch.zeros(4, WIDTH))

        with pytest.raises(ebbtide.SequenceError, match=r"another thread did; .* in the thread that calls scan"):
            in_thread(program)
