"""`scan` against the plain loop, bit for bit."""

from __future__ import annotations

import collections
import gc
import itertools
import weakref
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

import ebbtide
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
        assert grad is None or torch.equal(grad, other), number
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
