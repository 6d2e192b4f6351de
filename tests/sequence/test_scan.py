"""`scan` against the plain loop, bit for bit."""

from __future__ import annotations

import collections
import errno
import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ebbtide
from ebbtide.run.tiers import DiskTier
from ebbtide.sequence import choose
from ebbtide.sequence.tensors import TensorLayout

pytestmark = pytest.mark.usefixtures("nothing_left")
WIDTH = 24
Loop = Callable[..., tuple[Any, list[Any]]]


def plain(cell: Any, state: Any, inputs: Iterable[Any], truncate: int | None = None, **_: Any) -> tuple[Any, list[Any]]:
    """What `scan` must equal."""
    ys = []
    for step, x in enumerate(inputs):
        if truncate is not None and step > 0 and step % truncate == 0:
            state = torch.utils._pytree.tree_map(lambda part: part.detach(), state)
        state, y = cell(state, x)
        ys.append(y)
    return state, ys


def states(count: int, *like: Tensor) -> int:
    """Bytes of memory for so many states."""
    return count * TensorLayout(list(like)).size_bytes


def in_thread(work: Callable[[], Any]) -> Any:
    """What ``work`` gives in a thread of its own."""
    with ThreadPoolExecutor(1) as pool:
        return pool.submit(work).result()


def same(a: Any, b: Any) -> bool:
    """Whether two results are equal, bit for bit."""
    if isinstance(a, Tensor):
        return torch.equal(a, b) and a.dtype == b.dtype and a.requires_grad == b.requires_grad
    if isinstance(a, (tuple, list)):
        return len(a) == len(b) and all(map(same, a, b))
    return bool(a == b)


def compare(program: Callable[[Loop], tuple[Any, list[Tensor]]], **options: Any) -> None:
    """Run ``program`` with either loop from the same seed; it returns results, and what must have equal gradients."""
    found = []
    for loop in (plain, ebbtide.scan):
        torch.manual_seed(0)
        results, watched = program(lambda *arguments, loop=loop, **more: loop(*arguments, **{**options, **more}))
        found.append((results, [part.grad for part in watched], torch.get_rng_state()))
    (results, grads, generator), (other_results, other_grads, other_generator) = found
    assert same(results, other_results)
    for number, (grad, other) in enumerate(zip(grads, other_grads, strict=True)):
        assert (grad is None) == (other is None), number
        assert grad is None or (other is not None and torch.equal(grad, other)), number
    assert torch.equal(generator, other_generator)


class LSTM(nn.Module):
    """Weights are used several times in each step, so that the order of additions shows; the output is the state."""

    def __init__(self, width: int = WIDTH, dropout: float = 0.0) -> None:
        super().__init__()
        self.inner = nn.LSTMCell(width, width)
        self.mix = nn.Parameter(torch.randn(width, width) / width**0.5)
        self.dropout = dropout

    def forward(self, state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], Tensor]:
        h, c = state
        h = torch.tanh(h @ self.mix) + (x @ self.mix) * torch.sin(h @ self.mix.t())
        h, c = self.inner(nn.functional.dropout(x, self.dropout), (h, c))
        return (h, c), h


def lstm_program(n: int, pick: Callable[[Any, list[Any]], Tensor], dropout: float = 0.0) -> Any:
    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        cell = LSTM(dropout=dropout)
        xs = torch.randn(n, 3, WIDTH, requires_grad=True)
        state = (torch.randn(3, WIDTH, requires_grad=True), torch.randn(3, WIDTH, requires_grad=True))
        final, ys = loop(cell, state, xs)
        pick(final, ys).backward()
        return (final, ys), [*cell.parameters(), xs, *state]

    return program


PICKS: dict[str, Callable[[Any, list[Any]], Tensor]] = {
    "all outputs": lambda final, ys: torch.stack(ys).square().sum(),
    "a loss per output": lambda final, ys: sum((y.sin().sum() for y in ys), start=torch.zeros(())),
    "last output": lambda final, ys: ys[-1].square().sum(),
    "final state": lambda final, ys: (final[0].sin() * final[1]).sum(),
    "state and output": lambda final, ys: (final[0].sin() + ys[-1].cos()).sum() + ys[0].sum(),
    "some outputs": lambda final, ys: sum((y.square().sum() for y in ys[1::3]), start=final[1].sum()),
    "first output": lambda final, ys: ys[0].square().sum(),
}


@pytest.mark.parametrize("pick", PICKS)
@pytest.mark.parametrize(("n", "count"), [(1, 2), (2, 2), (17, 3), (17, 40)])
def test_lstm(pick: str, n: int, count: int) -> None:
    state = torch.zeros(3, WIDTH)
    compare(lstm_program(n, PICKS[pick]), memory=states(count, state, state), check=True)


@pytest.mark.parametrize("truncate", [1, 4, 17, 50])
@pytest.mark.parametrize("pick", ["all outputs", "final state", "state and output"])
def test_truncated(truncate: int, pick: str) -> None:
    compare(lstm_program(17, PICKS[pick]), memory="40KiB", truncate=truncate)


@pytest.mark.parametrize("spilled", [False, True])
def test_dropout_and_spill(spilled: bool, tmp_path: Path) -> None:
    state = torch.zeros(3, WIDTH)
    options = {"spill": tmp_path} if spilled else {}
    program = lstm_program(60, PICKS["a loss per output"], dropout=0.4)
    compare(program, memory=states(4, state, state), check=True, **options)
    assert list(tmp_path.iterdir()) == []


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

    @pytest.mark.parametrize("before", [30, 100, 1000], ids=lambda before: f"{before} nodes before")
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

    def test_leaves_of_the_steps_themselves(self) -> None:
        """They are not held from one step to the next: each is as large as a state."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            energy = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, 1))
            scales = [torch.rand(WIDTH, requires_grad=True) for _ in range(12)]

            def cell(x: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
                place = x.detach().requires_grad_()
                loss = energy(place * scales[int(k)]).sum()
                (force,) = torch.autograd.grad(loss, place, create_graph=True)
                made.append(weakref.ref(place))
                return x - 0.1 * force, loss

            made: list[weakref.ref[Tensor]] = []
            start = torch.randn(3, WIDTH, requires_grad=True)
            final, ys = loop(cell, start, torch.arange(12))
            held.append([leaf() is not None for leaf in made].count(True))
            edges.append(len(final.grad_fn.next_functions))
            (final.square().sum() + torch.stack(ys).sum()).backward()
            return (final, ys), [start, *energy.parameters(), *scales]

        held: list[int] = []
        edges: list[int] = []
        compare(program, memory=states(3, torch.zeros(3, WIDTH)))
        assert held == [12, 0]
        assert edges[1] <= 4 + 12 + 3  # parameters, scales, start, places of what is gone

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
        scale = in_thread(lambda: weight.sin() * 2)

        def program() -> object:
            return ebbtide.scan(lambda h, x: ((h * scale).tanh() + x, None), torch.zeros(WIDTH), torch.zeros(4, WIDTH))

        with pytest.raises(ebbtide.SequenceError, match=r"another thread did; .* in the thread that calls scan"):
            in_thread(program)


class TestGraph:
    def test_state_with_gaps_counters_and_passed_on_parts(self) -> None:
        """Chunks of a larger tensor, an expanded one, the last state but one, and a step counter."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight = torch.randn(WIDTH, 2 * WIDTH, requires_grad=True)
            start = torch.randn(1, WIDTH, requires_grad=True)

            def cell(state: dict[str, Any], x: Tensor) -> tuple[dict[str, Any], tuple[Tensor, Any]]:
                now, before = state["u"]
                following, y = ((now - 0.1 * before) @ weight / 5 + x + state["k"]).tanh().chunk(2, dim=1)
                return {"u": (following, now), "k": state["k"] + 1}, (y[:, 1:], {"sum": now.sum(), "k": state["k"]})

            u = start.expand(3, WIDTH)
            final, ys = loop(cell, {"u": (u, u * 2), "k": torch.tensor(0)}, [torch.ones(3, 1)] * 13)
            (final["u"][0].sum() + sum(y[0].square().sum() + y[1]["sum"] for y in ys)).backward()
            return (final["u"], final["k"], [y[0] for y in ys], [y[1]["k"] for y in ys]), [weight, start]

        compare(program, memory=states(3, torch.zeros(3, WIDTH), torch.zeros(3, WIDTH), torch.tensor(0)))

    def test_loss_in_the_state(self) -> None:
        """A loss that is a sum over steps needs no outputs kept."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            inner = LSTM()

            def cell(state: Any, x: Tensor) -> tuple[Any, None]:
                loss, (hidden_next, y) = state[1], inner(state[0], x)
                return (hidden_next, loss + (y - x).square().mean()), None

            hidden = (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
            (_, loss), _ = loop(cell, (hidden, torch.zeros(())), torch.randn(20, 3, WIDTH))
            loss.backward()
            return loss, list(inner.parameters())

        compare(program, memory="40KiB")

    def test_retained_graph(self, tmp_path: Path) -> None:
        """A second backward pass runs the chain anew; without `retain_graph` there is PyTorch's own error."""

        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            cell = LSTM(dropout=0.3)
            state = (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
            final, ys = loop(cell, state, torch.randn(30, 3, WIDTH))
            (first,) = torch.autograd.grad(ys[-1].sum(), [cell.mix], retain_graph=True)
            torch.stack(ys).sum().backward(retain_graph=True)
            final[1].sum().backward()
            with pytest.raises(RuntimeError, match="backward through the graph a second time"):
                final[1].sum().backward()
            return first, list(cell.parameters())

        compare(program, memory="40KiB", spill=tmp_path)

    def test_parameters_altered_before_the_backward_pass(self) -> None:
        cell = LSTM()
        state = (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
        (h, _), _ = ebbtide.scan(cell, state, torch.randn(5, 3, WIDTH))
        with torch.no_grad():
            cell.mix.add_(1)
        with pytest.raises(RuntimeError, match="modified by an inplace operation"):
            h.sum().backward()

    def test_double_backward_is_refused(self) -> None:
        weight = torch.randn(3, requires_grad=True)
        h, _ = ebbtide.scan(lambda h, x: (h * weight, None), torch.ones(3), range(4))
        with pytest.raises(ebbtide.SequenceError, match="cannot be differentiated twice"):
            torch.autograd.grad(h.sum(), weight, create_graph=True)

    def test_without_gradients(self) -> None:
        cell, state = LSTM(), (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
        calls = collections.Counter[str]()
        cell.register_forward_hook(lambda *_: calls.update(["call"]))
        xs = torch.randn(6, 3, WIDTH)
        with torch.no_grad():
            assert same(ebbtide.scan(cell, state, xs), plain(cell, state, xs))
        assert calls["call"] == 12
        final, ys = ebbtide.scan(lambda s, x: (s + x, s), torch.zeros(()), range(5))
        assert (int(final), [int(y) for y in ys]) == (10, [0, 0, 1, 3, 6])
        assert not final.requires_grad

    def test_autocast(self) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            cell, state = LSTM(), (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH, dtype=torch.bfloat16))
            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                state = cell(state, torch.randn(3, WIDTH))[0]
                _, ys = loop(cell, tuple(s.detach() for s in state), torch.randn(9, 3, WIDTH))
            torch.stack(ys).float().square().sum().backward()
            return ys, list(cell.parameters())

        compare(program, memory="40KiB")

    def test_graph_that_is_dropped_gives_everything_back(self, tmp_path: Path) -> None:
        cell, state = LSTM(), (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
        final, ys = ebbtide.scan(cell, state, torch.randn(30, 3, WIDTH), memory="40KiB", spill=tmp_path)
        node = weakref.ref(final[0].grad_fn)
        del final, ys
        gc.collect()
        assert node() is None

    @pytest.mark.parametrize("n", [0, 1])
    def test_short(self, n: int) -> None:
        state = torch.ones(3, requires_grad=True)
        final, ys = ebbtide.scan(lambda s, x: (s * x, s), state, iter([3.0] * n))
        assert len(ys) == n
        final.sum().backward()
        assert state.grad is not None
        assert state.grad.tolist() == [3.0**n] * 3

    def test_work_is_as_predicted(self) -> None:
        calls = collections.Counter[int]()
        weight = torch.ones(5, requires_grad=True)

        def cell(h: Tensor, step: int) -> tuple[Tensor, None]:
            calls[step] += 1
            return torch.tanh(h * weight), None

        n, memory = 300, states(8, torch.ones(5))
        h, _ = ebbtide.scan(cell, torch.ones(5), range(n), memory=memory)
        h.sum().backward()
        choice = choose(n, states(1, torch.ones(5)), 0.0, 0.0, memory)
        assert sum(calls.values()) == choice.forward_steps + 1 + n


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_random_cells(data: st.DataObject) -> None:
    """Ops, what feeds them, what is in the state, put out, watched, truncated: all at random.

    Cells may close over a part of state 0 and an input. Left out are states with a tensor that was there before the
    step, or twice: to the plain loop it is one tensor, here it is several, so that three or more gradients of it add up
    in another order.
    """
    draw = data.draw
    seed, n, count = draw(st.integers(0, 999)), draw(st.integers(1, 12)), draw(st.integers(2, 6))
    parts, length = draw(st.integers(1, 3)), draw(st.integers(3, 8))
    sources = [[draw(st.integers(0, parts + 5 + k)) for _ in range(2)] for k in range(length)]
    known: list[Callable[..., Tensor]] = [torch.mul, torch.matmul, torch.atan2, torch.add]
    ops = [draw(st.sampled_from(known)) for _ in range(length)]
    results = st.integers(parts + 6, parts + 5 + length)
    picked = draw(st.lists(results, min_size=parts, max_size=parts, unique=True))
    put_out = draw(st.lists(results | st.integers(0, parts - 1), max_size=3))
    watched = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    needs = draw(st.lists(st.booleans(), min_size=parts + 2, max_size=parts + 2))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    closed_over = draw(st.integers(0, n - 1))

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(seed)
        weight = torch.randn(4, 4, dtype=dtype, requires_grad=True)
        made = (weight * 2).tanh()
        start = [torch.randn(4, 4, dtype=dtype, requires_grad=need) for need in needs[:parts]]
        xs = [torch.randn(4, 4, dtype=dtype, requires_grad=needs[-1]) for _ in range(n)]

        def cell(state: list[Tensor], x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            values = [*state, x, weight, made, torch.rand(4, 4, dtype=dtype), start[0], xs[closed_over]]
            for op, (left, right) in zip(ops, sources, strict=True):
                values.append(op(values[left], values[right]).sin())
            return [values[k] for k in picked], [values[k] for k in put_out]

        final, ys = loop(cell, start, xs)
        watch = [y for y, flag in zip(ys, watched, strict=True) if flag]
        loss = sum((part.square().sum() for part in tree_leaves((watch, final))), start=torch.zeros((), dtype=dtype))
        if loss.requires_grad:
            loss.backward()
        return (final, ys), [weight, *start, *xs]

    truncate = draw(st.one_of(st.none(), st.integers(1, 5)))
    compare(program, memory=states(count, *[torch.zeros(4, 4, dtype=dtype)] * parts), truncate=truncate, check=True)


class TestBadInput:
    def attempt(self, cell: Any, state: Any = None, inputs: Any = range(20), **options: Any) -> None:
        weight = torch.ones(300, requires_grad=True)
        state = torch.zeros(300) if state is None else state
        final, _ = ebbtide.scan(lambda s, x: cell(s, x, weight), state, inputs, **{"memory": "40KiB", **options})
        final.sum().backward()

    @pytest.mark.parametrize(
        ("cell", "options", "complaint"),
        [
            (lambda s, x, w: (s * w, None), {"memory": 7000}, "give at least"),
            (lambda s, x, w: (s * w, None), {"truncate": 0}, "truncate=0"),
            (lambda s, x, w: (s * w, None), {"state": (torch.zeros(3), 1)}, r"has int at \[1\]"),
            (lambda s, x, w: (s * w, None), {"state": []}, "no tensors"),
            (lambda s, x, w: s * w, {}, "must return"),
            (lambda s, x, w: (s.new_zeros(300 - (x == 7)), None), {}, r"state 8 is not like state 0: .*300.*299"),
            (lambda s, x, w: ((s * w).double(), None), {}, "float64"),
            (lambda s, x, w: ((s * w, w), None), {}, "state 1 is not like state 0"),
            (lambda s, x, w: ((s * w).tolist(), None), {}, "got"),
            (lambda s, x, w: (s.add_(1), None), {}, "altered its state in place in step 0"),
        ],
    )
    def test_one_clear_error(self, cell: Any, options: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ebbtide.SequenceError, match=complaint):
            self.attempt(cell, **options)

    def test_cell_that_differs_when_run_again(self, tmp_path: Path) -> None:
        calls = itertools.count()
        with pytest.raises(ebbtide.SequenceError, match="another state when it was run again: the cell"):
            self.attempt(lambda s, x, w: (s * w + next(calls), None), check=True, spill=tmp_path)
        calls = itertools.count()
        with pytest.raises(ebbtide.SequenceError, match="another graph when it was run again"):
            self.attempt(lambda s, x, w: (s * w if next(calls) < 24 else s.detach(), None))

    @pytest.mark.usefixtures("queued_copies")
    @pytest.mark.parametrize("allowed", [4, 20])
    def test_spill_directory_full(self, allowed: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = itertools.count()
        real = DiskTier._pwrite

        def fail(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
            if next(calls) >= allowed:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(self, fd, view, offset_bytes)

        def slow(s: Tensor, x: Any, w: Tensor) -> tuple[Tensor, None]:
            time.sleep(1e-3)
            return s * w, None

        monkeypatch.setattr(DiskTier, "_pwrite", fail)
        with pytest.raises(ebbtide.SpillError, match="is full"):
            self.attempt(slow, inputs=range(300), memory="20KiB", spill=tmp_path)
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("when", [5, 24])
    def test_errors_of_the_user_pass(self, when: int, tmp_path: Path) -> None:
        """In the forward and in the backward pass; nothing is left, though the traceback lives."""
        calls = itertools.count()

        def cell(s: Tensor, x: int, w: Tensor) -> tuple[Tensor, None]:
            if next(calls) == when:
                raise KeyboardInterrupt
            return s * w, None

        with pytest.raises(KeyboardInterrupt):
            self.attempt(cell, spill=tmp_path if when == 5 else None)
        assert list(tmp_path.iterdir()) == []
