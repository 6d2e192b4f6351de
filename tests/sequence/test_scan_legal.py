"""Cells that do what a plain loop allows: stale views, generators of their own, other kernels; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.data import IterableDataset

import ebbtide
from tests.sequence.loops import WIDTH, Loop, compare, plain

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPE = 3, WIDTH


def weights(columns: int = WIDTH) -> Tensor:
    return torch.randn(WIDTH, columns).div_(WIDTH**0.5).requires_grad_()


class TestStaleViews:
    """A view whose base is altered in place gets its node when it is next asked for, which may be after the step."""

    def of_halves(self, alter: Callable[[Tensor, Tensor], object], n: int = 12) -> Callable[[Loop], Any]:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, start = weights(2 * WIDTH), torch.randn(SHAPE, requires_grad=True)

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                both = h @ weight + x
                first, second = both[:, :WIDTH], both[:, WIDTH:]
                alter(both, second)
                return first, second

            final, ys = loop(cell, start, torch.randn(n, 3, 2 * WIDTH))
            (final.sin().sum() + torch.stack(ys).square().sum()).backward()
            return (final, ys), [weight, start]

        return program

    @pytest.mark.parametrize("n", [1, 2, 12])
    def test_the_other_half_in_place(self, n: int) -> None:
        compare(self.of_halves(lambda _, second: second.clamp_(-1, 1), n), memory="30KiB")

    def test_the_whole_in_place(self) -> None:
        compare(self.of_halves(lambda both, _: both.mul_(0.5)), memory="30KiB")

    def test_rows_of_a_buffer(self) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, start = weights(), torch.randn(SHAPE, requires_grad=True)

            def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
                rows = torch.zeros(2, *SHAPE)
                first, second = rows[0], rows[1]
                rows[0] = torch.tanh(state[1] @ weight + x)
                rows[1] = state[0] + x
                return (first, second), None

            final, _ = loop(cell, (start, torch.zeros(SHAPE)), torch.randn(12, *SHAPE))
            torch.stack(final).sin().sum().backward()
            return final, [weight, start]

        compare(program, memory="30KiB")


class Product(torch.autograd.Function):
    """A sum of products whose gradients are the factors themselves, not copies."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, h: Tensor) -> Tensor:
        ctx.save_for_backward(x, h)
        return (x * h).sum()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, h = ctx.saved_tensors
        return (h, x) if grad == 1 else (grad * h, grad * x)


def test_gradients_that_are_saved_states() -> None:
    """They lie in memory that serves again for other states."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight, start, xs = weights(), torch.randn(SHAPE), torch.randn(30, *SHAPE, requires_grad=True)

        def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
            h, loss = state
            return (torch.tanh(h @ weight), loss + Product.apply(x, h)), None  # type: ignore[no-untyped-call]

        (_, loss), _ = loop(cell, (start, torch.zeros(())), xs)
        loss.backward()
        return loss, [weight, xs]

    compare(program, memory="24KiB")


@pytest.mark.parametrize("cached", [False, True])
@pytest.mark.parametrize("passes", [1, 2])
def test_generators_of_the_cell_s_own(passes: int, cached: bool) -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        generator, weight = torch.Generator().manual_seed(7), weights()

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            mask = torch.rand(SHAPE, generator=generator) < 0.7
            return torch.tanh((h * mask * torch.rand(())) @ weight + x), None

        with nn.utils.parametrize.cached() if cached else torch.enable_grad():
            final, _ = loop(cell, torch.randn(SHAPE), torch.randn(20, *SHAPE))
        states = [generator.get_state()]
        for number in range(passes):
            final.square().sum().backward(retain_graph=number + 1 < passes)
            states.append(generator.get_state())
        return (final, states), [weight]

    compare(program, memory="60KiB")


class Seeded:
    """Inputs, each with a generator that is made anew."""

    def __init__(self, xs: Tensor) -> None:
        self.xs = xs

    def __len__(self) -> int:
        return len(self.xs)

    def __getitem__(self, step: int) -> tuple[Tensor, torch.Generator]:
        return self.xs[step], torch.Generator().manual_seed(step)


@pytest.mark.parametrize("who", ["the cell", "the cell, which keeps it", "the input"])
def test_generators_that_are_made_in_each_step(who: str) -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight, last = weights(), list[torch.Generator]()

        def cell(h: Tensor, item: tuple[Tensor, torch.Generator]) -> tuple[Tensor, None]:
            x, generator = item
            if who != "the input":
                generator = torch.Generator().manual_seed(3)
            if who == "the cell, which keeps it":
                last[:] = [generator]
            mask = torch.rand(SHAPE, generator=generator) < 0.7
            return torch.tanh((h * mask) @ weight + x), None

        final, _ = loop(cell, torch.randn(SHAPE), Seeded(torch.randn(20, *SHAPE)))
        final.square().sum().backward()
        return final, [weight]

    compare(program, memory="40KiB")


def test_attention_s_kernels_are_those_of_the_forward_pass() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight, start = weights(), torch.randn(2, 2, 40, WIDTH)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            query = h @ weight
            return torch.tanh(nn.functional.scaled_dot_product_attention(query, h, h + x) + 0.5 * h), None

        with sdpa_kernel(SDPBackend.MATH):
            final, _ = loop(cell, start, torch.randn(14, 2, 2, 40, WIDTH))
        final.square().sum().backward()
        return final, [weight]

    compare(program, memory="200KiB")


def test_the_default_type_is_that_of_the_forward_pass() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = weights()

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return (h @ weight.double() + x + torch.ones(()) / 3).tanh(), None

        torch.set_default_dtype(torch.float64)
        try:
            final, _ = loop(cell, torch.randn(SHAPE), torch.randn(14, *SHAPE))
        finally:
            torch.set_default_dtype(torch.float32)
        final.square().sum().backward()
        assert torch.get_default_dtype() is torch.float32
        return final, [weight]

    compare(program, memory="60KiB")


class Halves(nn.Module):
    """A scan inside of a module, as `torch.func.functional_call` runs it with other weights."""

    def __init__(self, uses: int) -> None:
        super().__init__()
        self.inner, self.uses = nn.Linear(WIDTH, WIDTH), uses

    def forward(self, start: Tensor, xs: Tensor, loop: Loop) -> Tensor:
        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            for _ in range(self.uses):
                h = torch.tanh(self.inner(h) + x)
            return h, None

        return loop(cell, start, xs, memory="60KiB")[0]


class TestFunctionalCall:
    def run(self, loop: Loop, *, uses: int, inside: bool) -> list[Tensor | None]:
        torch.manual_seed(0)
        model = Halves(uses)
        fast = {name: (0.5 * part.detach() + 0.1).requires_grad_() for name, part in model.named_parameters()}
        arguments = torch.randn(SHAPE), torch.randn(14, *SHAPE), loop
        if inside:
            whole = nn.ModuleDict({"model": model})
            whole.forward = lambda *given: model(*given).square().sum().backward()
            torch.func.functional_call(whole, {f"model.{name}": part for name, part in fast.items()}, arguments)
        else:
            torch.func.functional_call(model, fast, arguments).square().sum().backward()
        return [part.grad for part in (*fast.values(), *model.parameters())]

    @pytest.mark.parametrize("uses", [1, 2])
    def test_around_the_backward_pass_too(self, uses: int) -> None:
        found = zip(
            self.run(plain, uses=uses, inside=True), self.run(ebbtide.scan, uses=uses, inside=True), strict=True
        )
        assert all(b is None if a is None else b is not None and torch.equal(a, b) for a, b in found)

    @pytest.mark.parametrize("uses", [1, 2])
    def test_that_ends_before_is_refused(self, uses: int) -> None:
        with pytest.raises(ebbtide.SequenceError, match=r"must be the same until that has ended .*functional_call"):
            self.run(ebbtide.scan, uses=uses, inside=False)

    def test_weights_without_a_gradient_are_no_fault(self) -> None:
        """One that only outputs use to which no gradient comes."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, head = weights(), weights()

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                h = torch.tanh(h @ weight + x)
                return h, h @ head

            final, _ = loop(cell, torch.randn(SHAPE), torch.randn(14, *SHAPE))
            final.square().sum().backward()
            return final, [weight, head]

        compare(program, memory="60KiB")


class Average(nn.Module):
    """A running mean that the first call makes."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.mean: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros(WIDTH)
        self.mean.mul_(0.9).add_(0.1 * x.detach().mean(0))
        return torch.tanh(self.linear(x - self.mean))


class Table(nn.Module):
    """A table that the first call fills, and that is only read from then on."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.table: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        if self.table is None:
            self.table = torch.zeros(WIDTH)
            self.table[::2] = torch.arange(WIDTH // 2).sin()
        return torch.tanh(self.linear(x + self.table))


class TestMadeInTheFirstStep:
    def program(self, model: nn.Module, *, called: bool) -> Callable[[Loop], tuple[Any, list[Tensor]]]:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            if called:
                model(torch.randn(SHAPE))
            final, _ = loop(lambda h, x: (model(h + x), None), torch.zeros(SHAPE), torch.randn(20, *SHAPE))
            final.square().sum().backward()
            return final, list(model.parameters())

        return program

    @pytest.mark.parametrize("make", [lambda: nn.Sequential(nn.LazyLinear(WIDTH), nn.Tanh()), Average])
    def test_is_refused_where_steps_would_differ(self, make: Callable[[], nn.Module]) -> None:
        with pytest.raises(ebbtide.SequenceError, match=r"the cell makes .* in its first step.*(the cell|it) once"):
            self.program(make(), called=False)(ebbtide.scan)
        state = torch.get_rng_state()
        self.program(make(), called=True)(ebbtide.scan)  # and that is what to do
        torch.set_rng_state(state)

    def test_a_table_is_fine(self) -> None:
        grads = []
        for loop in (plain, ebbtide.scan):
            torch.manual_seed(0)
            final, parameters = self.program(Table(), called=False)(loop)
            grads.append([final, *(part.grad for part in parameters)])
        assert all(map(torch.equal, *grads))

    def test_a_buffer_that_is_written_over_is_fine(self) -> None:
        last: list[Tensor] = []

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = weights()

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                h = torch.tanh(h @ weight + x)
                last[:] = [h.detach().clone().mul_(2)]
                return h, None

            final, _ = loop(cell, torch.randn(SHAPE), torch.randn(20, *SHAPE))
            final.square().sum().backward()
            return final, [weight]

        compare(program, memory="60KiB")


class Batches(IterableDataset[Tensor]):
    """Has a length; what it inherits to be indexed by only raises."""

    def __init__(self, xs: Tensor) -> None:
        self.xs = xs

    def __len__(self) -> int:
        return len(self.xs)

    def __iter__(self) -> Any:
        return iter(self.xs)


def test_inputs_of_an_iterable_dataset() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = weights()
        batches = Batches(torch.randn(20, *SHAPE))
        final, _ = loop(lambda h, x: (torch.tanh(h @ weight + x), None), torch.zeros(SHAPE), batches)
        final.square().sum().backward()
        return final, [weight]

    compare(program, memory="60KiB")


def test_keys_of_a_state_in_another_order() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = weights()

        def cell(state: Any, x: Tensor) -> tuple[Any, None]:
            h, rest = state["h"], state["rest"]
            return {"rest": [{"d": rest[0]["c"], "c": rest[0]["d"] + h}], "h": torch.tanh(h @ weight + x)}, None

        rest = [{"c": torch.zeros(SHAPE), "d": torch.ones(SHAPE)}]
        final, _ = loop(cell, {"h": torch.zeros(SHAPE), "rest": rest}, torch.randn(20, *SHAPE))
        (final["rest"][0]["c"] + final["rest"][0]["d"]).square().sum().backward()
        return [final["h"], final["rest"][0]["c"], final["rest"][0]["d"]], [weight]

    compare(program, memory="60KiB")


def test_a_norm_without_statistics_of_its_own() -> None:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = weights()

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            return nn.functional.batch_norm(h @ weight + x, None, None, training=True), None

        final, _ = loop(cell, torch.randn(SHAPE), torch.randn(20, *SHAPE))
        final.square().sum().backward()
        return final, [weight]

    compare(program, memory="60KiB")
