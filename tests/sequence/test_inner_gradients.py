"""`scan` of cells that take gradients of their own, against the plain loop."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import ebbtide
from tests.sequence.loops import Loop, compare, in_thread

pytestmark = pytest.mark.usefixtures("nothing_left")

N = 7
Program = Callable[[Loop], tuple[Any, list[Tensor]]]


class Doubled(torch.autograd.Function):
    """Twice what it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 2


def total(loop: Loop, cell: Any, inputs: Any) -> Tensor:
    """The last state of a loop that adds up a loss; its backward pass has run."""
    found: Tensor = loop(cell, torch.zeros(()), inputs)[0]
    found.backward()
    return found


def penalty(loop: Loop) -> tuple[Any, list[Tensor]]:
    """On the gradient of a weight that has hooks."""
    net, seen = nn.Linear(3, 3), list[Tensor]()
    net.weight.register_hook(lambda grad: grad * 0.5)
    net.weight.register_hook(lambda grad: seen.append(grad.detach().clone()))

    def cell(sum_: Tensor, x: Tensor) -> tuple[Tensor, None]:
        (slope,) = torch.autograd.grad(net(x).square().sum(), net.weight, create_graph=True)
        return sum_ + slope.square().sum(), None

    return (total(loop, cell, torch.randn(N, 2, 3)), seen[-1]), [net.weight]


def penalty_of_a_result(loop: Loop) -> tuple[Any, list[Tensor]]:
    """The same of a weight that is computed."""
    scale, net = torch.randn(3, 3, requires_grad=True), nn.Linear(3, 3)
    weight = scale.sin() @ net.weight
    weight.register_hook(lambda grad: grad.clamp(-0.5, 0.5))

    def cell(sum_: Tensor, x: Tensor) -> tuple[Tensor, None]:
        slopes = torch.autograd.grad((x @ weight).square().sum() * 0.1, [weight, scale], create_graph=True)
        return sum_ + sum(slope.square().sum() for slope in slopes) + net(x).sum(), None

    return total(loop, cell, torch.randn(N, 2, 3)), [scale, *net.parameters()]


def rows_of_a_jacobian(loop: Loop) -> tuple[Any, list[Tensor]]:
    """Through an encoder that has run before the loop, with a function of the user's own in it."""
    encoder = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, N))
    x = torch.randn(4, 3, requires_grad=True)
    z: Tensor = encoder(Doubled.apply(x))  # type: ignore[no-untyped-call]

    def cell(sum_: Tensor, row: int) -> tuple[Tensor, None]:
        (slope,) = torch.autograd.grad(z[:, row].sum(), x, create_graph=True)
        return sum_ + slope.square().sum(), None

    return total(loop, cell, range(N)), [x, *encoder.parameters()]


def slope_at_a_point(loop: Loop) -> tuple[Any, list[Tensor]]:
    """Of a decoder that sees the point itself, too."""
    encoder, head = nn.Sequential(nn.Linear(3, 8), nn.Tanh()), nn.Linear(11, 1)
    x = torch.randn(4, 3, requires_grad=True)
    z = encoder(x)

    def cell(sum_: Tensor, weigh: int) -> tuple[Tensor, None]:
        y = head(torch.cat([x, z], 1)) * (weigh + 1)
        (slope,) = torch.autograd.grad(y.sin().sum(), x, create_graph=True)
        return sum_ + slope.square().sum(), None

    return total(loop, cell, range(N)), [x, *encoder.parameters(), *head.parameters()]


def adapted_weights(loop: Loop) -> tuple[Any, list[Tensor]]:
    """Each task begins with the same weights, and goes down the slope of its own loss."""
    net = nn.Linear(3, 3)
    net.weight.register_hook(lambda grad: grad.clamp(-1, 1))

    def cell(sum_: Tensor, task: Tensor) -> tuple[Tensor, Tensor]:
        weight: Tensor = net.weight
        bias: Tensor = net.bias
        for x in task[:-1]:
            loss = nn.functional.linear(x, weight, bias).tanh().square().mean()
            slopes = torch.autograd.grad(loss, (weight, bias), create_graph=True)
            weight, bias = weight - 0.1 * slopes[0], bias - 0.1 * slopes[1]
        loss = nn.functional.linear(task[-1], weight, bias).square().mean()
        return sum_ + loss, loss

    return total(loop, cell, torch.randn(N, 3, 4, 3)), list(net.parameters())


def forces(loop: Loop) -> tuple[Any, list[Tensor]]:
    """Particles that follow the slope of an energy, with respect to where they are and to what is made of that."""
    energy = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    start = torch.randn(4, 3, requires_grad=True), torch.zeros(4, 3)

    def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        q, p = state
        at = q if q.requires_grad else q.requires_grad_()
        (pull,) = torch.autograd.grad(energy(at).sum(), at, create_graph=True)
        p = p - 0.1 * pull + x
        moved = q + 0.1 * p
        (push,) = torch.autograd.grad(energy(moved.sin()).sum(), moved, create_graph=True)
        return (moved, p - 0.1 * push), pull.square().sum()

    (q, p), ys = loop(cell, start, 0.1 * torch.randn(N, 4, 3))
    (q.square().sum() + p.sum() + sum(ys)).backward()
    return (q, p, ys), [start[0], *energy.parameters()]


def hooked_inputs(loop: Loop) -> tuple[Any, list[Tensor]]:
    """With respect to which the cell takes gradients, and puts hooks on them itself; others come later."""
    net = nn.Linear(3, 3)
    sources = [torch.randn(2, 3, requires_grad=True) for _ in range(N)]
    xs = [source.sin() if step % 2 else source for step, source in enumerate(sources)]

    def cell(h: Tensor, item: tuple[int, Tensor]) -> tuple[Tensor, None]:
        step, x = item
        if step > 3 or step == 0:
            x.register_hook(lambda grad: grad + 0.1)
        (slope,) = torch.autograd.grad(net(h.detach() + x).sin().sum(), x, create_graph=True)
        return (net(h) + x - 0.1 * slope).tanh(), None

    final, _ = loop(cell, torch.zeros(2, 3), list(enumerate(xs)))
    for x in xs:
        x.register_hook(lambda grad: grad * 0.5)
    final.square().sum().backward()
    return (final, [len(x._backward_hooks or ()) for x in xs]), [*net.parameters(), *sources]


def hooked_states(loop: Loop) -> tuple[Any, list[Tensor]]:
    """On which the cell that returns them puts hooks, and takes gradients with respect to others."""
    net = nn.Linear(3, 3)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        h = net(h)
        (slope,) = torch.autograd.grad(net(h + x).sin().sum(), h, create_graph=True)
        h = (h + x - 0.1 * slope).tanh()
        h.register_hook(lambda grad: grad.clamp(-0.1, 0.1))
        return h, None

    final, _ = loop(cell, torch.randn(2, 3, requires_grad=True), torch.randn(N, 2, 3))
    final.square().sum().backward()
    return final, list(net.parameters())


PROGRAMS: list[Program] = [
    penalty,
    penalty_of_a_result,
    rows_of_a_jacobian,
    slope_at_a_point,
    adapted_weights,
    forces,
    hooked_inputs,
    hooked_states,
]


@pytest.mark.parametrize("memory", ["12KiB", "64KiB"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda program: program.__name__)
def test_as_in_a_plain_loop(program: Program, memory: str) -> None:
    compare(program, memory=memory, check=True)


def test_in_another_thread() -> None:
    """That of the backward pass is not that of the forward pass."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        return penalty_of_a_result(lambda *arguments, **options: in_thread(lambda: loop(*arguments, **options)))

    compare(program, memory="12KiB")


def test_a_scan_within() -> None:
    """The inner one is reversed while the outer one is, and its cell takes gradients meanwhile."""
    gradients = []

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        net, source = nn.Linear(3, 3), torch.randn(2, 3, requires_grad=True)
        kept: Tensor = Doubled.apply(source.sin())  # type: ignore[no-untyped-call]
        for part in (net.weight, kept):
            part.register_hook(lambda grad: grad * 0.5)

        def inner(sum_: Tensor, x: Tensor) -> tuple[Tensor, None]:
            loss = (net(x + kept).square() * kept).sum()
            slopes = torch.autograd.grad(loss, [net.weight, kept, source], create_graph=True)
            return sum_ + sum(slope.square().sum() for slope in slopes), None

        def outer(sum_: Tensor, x: Tensor) -> tuple[Tensor, None]:
            sum_, _ = loop(inner, sum_, x)
            (slope,) = torch.autograd.grad((kept * net.weight.sum(0)).sum(), kept, create_graph=True)
            return 0.1 * (sum_ + slope.square().sum()), None

        found = total(loop, outer, 0.1 * torch.randn(4, 3, 2, 3))
        gradients.append((net.weight.grad, net.bias.grad, source.grad))
        return found, []  # a scan of scans adds gradients up in another order

    compare(program, memory="12KiB")
    for one, other in zip(*gradients, strict=True):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("fault", [RuntimeError, KeyboardInterrupt])
@pytest.mark.parametrize("where", ["cell", "formula"])
def test_a_fault_in_the_backward_pass_leaves_hooks_and_functions(where: str, fault: type[BaseException]) -> None:
    class Failing(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x.clone()

        @staticmethod
        def backward(ctx: Any, grad: Tensor) -> Tensor:
            if failing == ["formula"]:
                raise fault
            return grad

    source, failing = torch.randn(3, requires_grad=True), list[str]()
    kept: Tensor = Doubled.apply(source)  # type: ignore[no-untyped-call]
    kept.register_hook(lambda grad: grad * 3)
    hook = kept.register_hook(lambda grad: grad + 1)
    before = list((kept._backward_hooks or {}).items())

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
        if failing == ["cell"]:
            raise fault
        return Failing.apply((h * kept).tanh() + x), None  # type: ignore[no-untyped-call]

    final, _ = ebbtide.scan(cell, torch.zeros(3), torch.randn(N, 3), memory="12KiB")
    failing.append(where)
    with pytest.raises(fault):
        final.sum().backward(retain_graph=True)
    assert list((kept._backward_hooks or {}).items()) == before
    assert not vars(kept.grad_fn)
    (whole,) = torch.autograd.grad(kept.sum(), source, retain_graph=True)
    assert torch.equal(whole, torch.full((3,), 8.0))
    hook.remove()
    (whole,) = torch.autograd.grad(kept.sum(), source)
    assert torch.equal(whole, torch.full((3,), 6.0))


class TestRefused:
    """Gradients that would not be those of a plain loop."""

    def test_with_respect_to_an_input_that_has_hooks(self) -> None:
        xs = [torch.randn(3, requires_grad=True) for _ in range(N)]
        xs[4].register_hook(lambda grad: grad * 2)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            (slope,) = torch.autograd.grad(x.sin().sum(), x, create_graph=True)
            return h - slope, None

        with pytest.raises(ebbtide.SequenceError, match=r"step 4 takes a gradient .* on which there are hooks"):
            ebbtide.scan(cell, torch.zeros(3), xs, memory="12KiB")

    @pytest.mark.parametrize("who", ["the user", "the cell"])
    def test_with_respect_to_a_state_that_has_hooks(self, who: str) -> None:
        start = torch.randn(3, requires_grad=True)
        if who == "the user":
            start.register_hook(lambda grad: grad * 2)

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            (slope,) = torch.autograd.grad(h.sin().sum(), h, create_graph=True)
            following = h - slope + x
            if who == "the cell":
                following.register_hook(lambda grad: grad * 2)
            return following, None

        step = 0 if who == "the user" else 1
        with pytest.raises(ebbtide.SequenceError, match=f"step {step} takes a gradient .* on which there are hooks"):
            ebbtide.scan(cell, start, torch.randn(N, 3), memory="12KiB")

    @pytest.mark.parametrize("to", ["state", "input"])
    def test_that_are_added_to_what_the_step_is_given(self, to: str) -> None:
        start, x = torch.randn(3, requires_grad=to == "state"), torch.randn(3, requires_grad=to == "input")

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            (h.sin() * x).sum().backward()
            return h.detach() + x, None

        with pytest.raises(ebbtide.SequenceError, match=r"step 0 adds to .grad of its input, or of state 0"):
            ebbtide.scan(cell, start, [x] * N, memory="12KiB")


class TestGrad:
    """What a backward pass of the cell's own leaves in `.grad` of tensors outside."""

    @pytest.mark.parametrize("between", ["nothing", "none", "zero"])
    @pytest.mark.parametrize("before", ["none", "some"])
    @pytest.mark.parametrize("n", [1, N])
    def test_it_is_added_up_once(self, n: int, before: str, between: str) -> None:
        """Also what goes on to what was computed before the scan, and whatever is done to it between the passes."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            net, probe, encoder = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 3)
            if before == "some":
                (probe(torch.randn(2, 3)).sum() + encoder(torch.randn(2, 3)).sum()).backward()
            z = encoder(torch.randn(2, 3))

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                h = (net(h) + x).tanh()
                for _ in range(2):
                    (probe(h.detach()).square().mean() + (z * x).sum()).backward(retain_graph=True)
                assert probe.bias.grad is not None
                return h, probe.bias.grad.clone()

            final, ys = loop(cell, torch.zeros(2, 3), torch.randn(n, 2, 3))
            left = [part.grad.clone() for part in (*probe.parameters(), *encoder.parameters()) if part.grad is not None]
            if between != "nothing":
                probe.zero_grad(set_to_none=between == "none")
            final.sum().backward()
            return (final, ys, left), [*net.parameters(), *probe.parameters(), *encoder.parameters()]

        compare(program, memory="12KiB", check=True)

    @pytest.mark.parametrize("before", ["none", "some"])
    def test_it_may_be_cleared_in_each_step(self, before: str) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            net, probe = nn.Linear(3, 3), nn.Linear(3, 3)
            if before == "some":
                probe(torch.randn(2, 3)).sum().backward()

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
                probe.zero_grad()
                probe(h.detach() + x).square().mean().backward()
                return (net(h) @ probe.weight.grad + x).tanh(), None

            final, _ = loop(cell, torch.zeros(2, 3), torch.randn(N, 2, 3))
            final.sum().backward()
            return final, [*net.parameters(), *probe.parameters()]

        compare(program, memory="12KiB", check=True)

    @pytest.mark.filterwarnings("ignore:Using backward")
    @pytest.mark.parametrize("way", ["a graph of it", "sparse", "retained", "once"])
    def test_another_sum_is_refused(self, way: str) -> None:
        """And `.grad` is what it was."""
        table, ran = nn.Embedding(4, 3, sparse=way == "sparse"), list[int]()
        used = table.weight * 1 if way == "retained" else table.weight
        if way == "retained":
            used.retain_grad()

        def cell(h: Tensor, x: Tensor) -> tuple[Tensor, None]:
            if way != "once" or not ran:
                loss = nn.functional.embedding(torch.tensor([1, 2]), used, sparse=way == "sparse").square().sum()
                loss.backward(create_graph=way == "a graph of it", retain_graph=True)
                ran.append(1)
            return h + x, None

        with pytest.raises(ebbtide.SequenceError, match=r"leaves in .grad of a tensor outside of shape \(4, 3\)"):
            ebbtide.scan(cell, torch.zeros(3), torch.randn(N, 3), memory="12KiB")
        assert used.grad is None
        assert table.weight.grad is None
