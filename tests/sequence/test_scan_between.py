"""What others do between the first run of a step of a `scan` and its next one, in the backward pass."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from tests.sequence.loops import WIDTH, Loop, compare

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPE = 8, WIDTH
MEMORY = "40KiB"


class Noisy(nn.Module):
    """Drops in a method of its own that is no module's call; its steps can be run by that method, too."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(nn.functional.dropout(self.linear(h), 0.3, self.training) + x), None

    def forward(self, h: Tensor) -> Tensor:
        return self.step(h, h)[0]


class Scaled(Noisy):
    """Draws nothing."""

    def step(self, h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(self.linear(h) * (2 if self.training else 1) + x), None


class Later(nn.Module):
    """Drops in all steps but the first, whose state is zero."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(0.3)

    def forward(self, h: Tensor) -> Tensor:
        return self.drop(self.linear(h)) if h.any() else self.linear(h)


class Holder:
    """Has a model that is found in no attribute of an object."""

    model = Noisy()


def evaluated(model: nn.Module, cell: Any, n: int, passes: int) -> Callable[[Loop], tuple[Any, list[Tensor]]]:
    """A program that evaluates the model before the backward pass."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(1)
        for part in model.modules():
            if isinstance(part, nn.Linear | nn.BatchNorm1d):
                part.reset_parameters()
        model.zero_grad()
        model.train()
        final, _ = loop(cell, torch.zeros(SHAPE), torch.randn(n, *SHAPE))
        for _ in range(passes):
            model.eval()
            final.square().sum().backward(retain_graph=True)
        return (final, [part.training for part in model.modules()]), list(model.parameters())

    return program


class TestModesOfModules:
    """A plain loop does not mind `eval` once it has run."""

    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("n", [1, 12])
    @pytest.mark.parametrize(
        "part", [nn.Dropout(0.3), nn.BatchNorm1d(WIDTH), Noisy()], ids=lambda part: part._get_name()
    )
    def test_are_those_of_the_forward_pass(self, part: nn.Module, n: int, passes: int) -> None:
        model = nn.Sequential(nn.Linear(WIDTH, WIDTH), part, nn.Tanh())
        compare(evaluated(model, lambda h, x: (model(h) + x, None), n, passes), memory=MEMORY)

    def test_also_of_the_one_whose_method_is_the_cell(self) -> None:
        model = Noisy()
        compare(evaluated(model, model.step, 12, 1), memory=MEMORY)

    @pytest.mark.parametrize("part", [Noisy(), Scaled()], ids=lambda part: part._get_name())
    def test_of_one_that_is_not_called(self, part: Any) -> None:
        """Its methods are, of which PyTorch does not tell."""
        compare(evaluated(part, lambda h, x: part.step(h, x), 12, 1), memory=MEMORY)  # noqa: PLW0108

    @pytest.mark.parametrize("call", [Later.__call__, Later.forward], ids=["within one", "by itself"])
    def test_of_one_that_later_steps_call(self, call: Any) -> None:
        """The first one draws nothing, so what steps draw is not compared either."""
        model = Later()
        compare(evaluated(model, lambda h, x: (torch.tanh(call(model, h) + x), None), 12, 1), memory=MEMORY)

    def test_of_those_that_are_inputs(self) -> None:
        layers = nn.ModuleList(Noisy() if number else Scaled() for number in range(12))
        program = evaluated(layers, lambda h, layer: (layer(h), None), 12, 1)
        compare(lambda loop: program(lambda cell, h, _, **more: loop(cell, h, [*layers], **more)), memory=MEMORY)

    def test_others_that_draw_are_refused(self) -> None:
        """Classes are not looked into."""
        program = evaluated(Holder.model, lambda h, x: Holder.model.step(h, x), 12, 1)  # noqa: PLW0108
        with pytest.raises(ebbtide.SequenceError, match="step 11 drew other random numbers"):
            program(ebbtide.scan)


class TestAnotherThreadDraws:
    """From PyTorch's generator, while a step runs for the first time."""

    def program(self, cell: Callable[[Tensor, Tensor], Tensor]) -> Callable[[Loop], tuple[Any, list[Tensor]]]:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, requires_grad=True)
            calls = 0

            def disturbed(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                nonlocal calls
                calls += 1
                h = cell(h, weight)
                if calls == 8:
                    thread = threading.Thread(target=torch.rand, args=(100,))
                    thread.start()
                    thread.join()
                return cell(h, weight) + x, None

            final, _ = loop(disturbed, torch.zeros(SHAPE), torch.randn(12, *SHAPE))
            final.sum().backward()
            return final, [weight]

        return program

    def test_so_that_the_cell_draws_others(self) -> None:
        program = self.program(lambda h, weight: nn.functional.dropout(torch.tanh(h * weight), 0.5))
        with pytest.raises(ebbtide.SequenceError, match=r"drew other random numbers .* no other thread"):
            program(ebbtide.scan)

    def test_which_does_not_matter_to_one_that_draws_none(self) -> None:
        """Attention without dropout is an op that may draw."""

        def attend(h: Tensor, weight: Tensor) -> Tensor:
            rows = torch.tanh(h * weight)[None, None]
            return nn.functional.scaled_dot_product_attention(rows, rows, rows)[0, 0]

        compare(self.program(attend))


class TestAlteredTensors:
    """Those that the cell reads, and that autograd does not save."""

    @pytest.mark.parametrize("passes", [1, 2])
    @pytest.mark.parametrize("n", [1, 12])
    def test_small_ones_are_what_they_were(self, n: int, passes: int) -> None:
        """And afterwards as they have become."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            inner, mean, scale = nn.Linear(WIDTH, WIDTH), torch.zeros(WIDTH), torch.tensor(0.5)
            xs = torch.randn(n, *SHAPE)
            target = nn.Linear(WIDTH, WIDTH).requires_grad_(False)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                return torch.tanh(inner(h + (x - mean) * scale) + target(x).sign()), None

            final, _ = loop(cell, torch.zeros(SHAPE), xs)
            for _ in range(passes):
                mean.lerp_(xs.mean((0, 1)), 0.5)
                scale.mul_(0.9)
                target.weight.neg_()
                final.square().sum().backward(retain_graph=True)
            return (final, mean, scale, target.weight), list(inner.parameters())

        compare(program, memory=MEMORY)

    def test_by_the_cell_of_a_scan_around(self) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, count = torch.randn(WIDTH, requires_grad=True), torch.ones(())

            def inner(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                return torch.tanh(h * weight + x - 1 / count), None

            def outer(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                h, _ = loop(inner, h, x.expand(5, *SHAPE))
                count.add_(1)
                return h, None

            final, _ = loop(outer, torch.zeros(SHAPE), torch.randn(6, *SHAPE))
            (gradient,) = torch.autograd.grad(final.square().sum(), weight)
            gradients.append(gradient)
            return (final, count), []

        gradients = list[Tensor]()
        compare(program, memory=MEMORY)
        torch.testing.assert_close(*gradients)  # a scan of scans adds up in another order than two loops

    @pytest.mark.parametrize("reads", [True, False])
    def test_large_ones_are_refused(self, reads: bool) -> None:
        table, weight = torch.randn(2 << 20), torch.randn(WIDTH, requires_grad=True)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return torch.tanh(h * weight + x + (table[:WIDTH] if reads else 0)), None

        final, _ = ebbtide.scan(cell, torch.zeros(SHAPE), torch.randn(12, *SHAPE), memory=MEMORY)
        table.zero_()
        if reads:
            with pytest.raises(ebbtide.SequenceError, match=r"shape \(2097152,\) that the cell reads was altered"):
                final.sum().backward()
        else:
            final.sum().backward()
