"""`scan` beside the plain loop that it must equal, bit for bit, and a cell for both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.sequence.tensors import TensorLayout

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
