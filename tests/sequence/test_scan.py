"""`scan` against the plain loop, bit for bit."""

from __future__ import annotations

import collections
import errno
import gc
import itertools
import os
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

import ebbtide
from ebbtide.run.tiers import DiskTier
from ebbtide.sequence import choose
from tests.sequence.loops import LSTM, WIDTH, Loop, compare, lstm_program, plain, same, states

pytestmark = pytest.mark.usefixtures("nothing_left")


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

    def test_inputs_go_without_the_garbage_collector(self, tmp_path: Path) -> None:
        cell, state = LSTM(), (torch.zeros(3, WIDTH), torch.zeros(3, WIDTH))
        gc.disable()
        try:
            inputs = torch.randn(30, 3, WIDTH)
            final, _ = ebbtide.scan(cell, state, inputs, memory="40KiB", spill=tmp_path)
            final[0].sum().backward()
            gone = weakref.ref(inputs)
            del final, inputs, _
            assert gone() is None
        finally:
            gc.enable()

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
        # Once more, step 0 has shown what it writes to.
        assert sum(calls.values()) == 1 + choice.forward_steps + 1 + n


@hypothesis.settings(max_examples=25)
@hypothesis.given(st.data())
def test_random_cells(data: st.DataObject) -> None:
    """Ops, what feeds them, what is in the state, put out, watched, truncated: all at random.

    Cells may close over a part of state 0 and an input, and write to a tensor that they read; states may hold a tensor
    twice. Left out are states with a
    tensor that was there before the step: to the plain loop it is one tensor, here it is several, so that three or more
    gradients of it add up in another order.
    """
    draw = data.draw
    seed, n, count = draw(st.integers(0, 999)), draw(st.integers(1, 12)), draw(st.integers(2, 6))
    parts, length = draw(st.integers(1, 3)), draw(st.integers(3, 8))
    sources = [[draw(st.integers(0, parts + 5 + k)) for _ in range(2)] for k in range(length)]
    known: list[Callable[..., Tensor]] = [torch.mul, torch.matmul, torch.atan2, torch.add]
    ops = [draw(st.sampled_from(known)) for _ in range(length)]
    results = st.integers(parts + 6, parts + 5 + length)
    picked = draw(st.lists(results, min_size=parts, max_size=parts))
    put_out = draw(st.lists(results | st.integers(0, parts - 1), max_size=3))
    watched = draw(st.lists(st.booleans(), min_size=n, max_size=n))
    needs = draw(st.lists(st.booleans(), min_size=parts + 2, max_size=parts + 2))
    dtype = draw(st.sampled_from([torch.float32, torch.float64]))
    closed_over = draw(st.integers(0, n - 1))
    writes = draw(st.booleans())
    starts = draw(st.lists(st.integers(0, parts - 1), min_size=parts, max_size=parts))

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        torch.manual_seed(seed)
        weight = torch.randn(4, 4, dtype=dtype, requires_grad=True)
        made = (weight * 2).tanh()
        made_first = [torch.randn(4, 4, dtype=dtype, requires_grad=need) for need in needs[:parts]]
        start = [made_first[k] for k in starts]
        xs = [torch.randn(4, 4, dtype=dtype, requires_grad=needs[-1]) for _ in range(n)]
        mean = torch.zeros(4, 4, dtype=dtype)

        def cell(state: list[Tensor], x: Tensor) -> tuple[list[Tensor], list[Tensor]]:
            values = [*state, x, weight, made, torch.rand(4, 4, dtype=dtype), start[0], xs[closed_over]]
            if writes:
                values[parts + 3] = mean.lerp_(x.detach(), 0.3).clone()
            for op, (left, right) in zip(ops, sources, strict=True):
                values.append(op(values[left], values[right]).sin())
            return [values[k] for k in picked], [values[k] for k in put_out]

        final, ys = loop(cell, start, xs)
        watch = [y for y, flag in zip(ys, watched, strict=True) if flag]
        loss = sum((part.square().sum() for part in tree_leaves((watch, final))), start=torch.zeros((), dtype=dtype))
        if loss.requires_grad:
            loss.backward()
        return (final, ys, mean), [weight, *start, *xs]

    truncate = draw(st.one_of(st.none(), st.integers(1, 5)))
    compare(program, memory=states(count, *[torch.zeros(4, 4, dtype=dtype)] * parts), truncate=truncate, check=True)


def test_inputs_made_anew_each_time_may_be_altered() -> None:
    class Frames:
        """As read from a file, into memory that serves again."""

        def __init__(self) -> None:
            self.frame = torch.zeros(WIDTH)

        def __len__(self) -> int:
            return 20

        def __getitem__(self, step: int) -> Tensor:
            if step == 20:
                raise IndexError
            return self.frame.fill_(step)

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight = torch.randn(WIDTH, requires_grad=True)
        final, _ = loop(lambda s, x: ((s * weight + x.sin_()).cos(), None), torch.zeros(WIDTH), Frames())
        final.sum().backward()
        return final, [weight]

    compare(program, memory="20KiB")


@pytest.mark.parametrize("spilled", [False, True])
def test_states_that_hold_a_tensor_twice(spilled: bool, tmp_path: Path) -> None:
    """All gradients of it add up in one, in the plain loop's order."""

    def program(loop: Loop) -> tuple[Any, list[Tensor]]:
        weight, start = torch.randn(4, 4, requires_grad=True), torch.randn(3, 4, requires_grad=True)

        def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], None]:
            a, b = state
            following = torch.tanh(a @ weight + x * a * b - b.sin()) + b.cos() * a
            return (following, following), None

        (a, b), _ = loop(cell, (start, start), torch.randn(60, 3, 4))
        (a.sin() + b * a + b.square()).sum().backward()
        return (a, b), [weight, start]

    compare(program, memory=states(4, *[torch.zeros(3, 4)] * 2), check=True, **({"spill": tmp_path} if spilled else {}))


@pytest.mark.parametrize("n", [2, 3, 20])
def test_outputs_altered_before_the_backward_pass(n: int) -> None:
    """They may lie in the memory of a state."""
    weight = torch.randn(WIDTH, requires_grad=True)

    def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        h = (h * weight + x).sin()
        return h, h.detach()

    found: list[Tensor] = []
    for value in (None, 0.0):
        final, ys = ebbtide.scan(cell, torch.ones(WIDTH), torch.ones(n, WIDTH), memory="20KiB")
        for y in ys if value is not None else ():
            y.fill_(value)
        found += torch.autograd.grad(final.sum(), weight)
    assert torch.equal(*found)


class Named(Tensor):
    """Has a class of its own."""


def named(tensor: Tensor) -> Named:
    """``tensor`` as one."""
    return tensor.as_subclass(Named)


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
            (lambda s, x, w: (s * w, None), {"state": (torch.zeros(3), 1)}, r"has int at \[1\]"),
            (lambda s, x, w: (s * w, None), {"state": []}, "no tensors"),
            (lambda s, x, w: s * w, {}, "must return"),
            (lambda s, x, w: (s.new_zeros(300 - (x == 7)), None), {}, r"state 8 is not like state 0: .*300.*299"),
            (lambda s, x, w: ((s * w).double(), None), {}, "float64"),
            (lambda s, x, w: ((s * w, w), None), {}, "state 1 is not like state 0"),
            (lambda s, x, w: ((s * w).tolist(), None), {}, "got"),
            (lambda s, x, w: (s * w, None), {"state": named(torch.zeros(3))}, "state has, at its root, .* class Named"),
            (lambda s, x, w: (named(s * w), None), {}, "state 1 has a tensor of the class Named"),
            (
                lambda s, x, w: (s * x * w, None),
                {"inputs": [named(torch.ones(300)).requires_grad_()]},
                "input 0, .* class",
            ),
            (lambda s, x, w: (s.add_(1), None), {}, "altered its state in place in step 0"),
            (
                lambda s, x, w: (s * x.mul_(2) * w, None),
                {"inputs": torch.ones(5, 300)},
                "altered its input in place in step 0",
            ),
        ],
    )
    def test_one_clear_error(self, cell: Any, options: dict[str, Any], complaint: str) -> None:
        with pytest.raises(ebbtide.SequenceError, match=complaint):
            self.attempt(cell, **options)

    def test_input_that_is_altered_before_the_backward_pass(self) -> None:
        xs, weight = torch.ones(5, 300), torch.ones(300, requires_grad=True)
        final, _ = ebbtide.scan(lambda s, x: ((s * weight + x).sin(), None), torch.zeros(300), list(xs))
        xs[2].zero_()
        with pytest.raises(ebbtide.SequenceError, match="input 4 was altered in place after step 4 ran"):
            final.sum().backward()

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
