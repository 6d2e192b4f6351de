"""Random programs as cells of `scan`, bit for bit as in a plain loop; see `tests.run.test_random_programs` for them."""

from __future__ import annotations

import functools
import random
import tempfile
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import strategies as st
from torch import Tensor
from torch.utils._pytree import tree_leaves

from tests.run.programs import SAID_BY_PYTORCH
from tests.run.test_random_programs import EVERY_PIECE, NAME, Choice, Pieces, write
from tests.sequence.loops import Loop, compare, plain, states

pytestmark = [pytest.mark.usefixtures("nothing_left"), *SAID_BY_PYTORCH]

SHAPE = 128, 96
LEFT_OUT = ("register_hook", "backward(", "create_graph")
"""What cells do not do: put hooks on their own tensors, run backward passes of their own."""
CELL_PIECES = [place for place, piece in enumerate(EVERY_PIECE) if not any(part in piece for part in LEFT_OUT)]


class Written:
    """Source text as a cell, and a loop over it.

    Args:
        source: computes ``loss`` from ``x``.
        n: steps.
        put_out: which of what the source names the cell puts out, by place.
        needs: whether state 0 wants a gradient, and whether the inputs do.
        weighs: whether a step's outputs are in the loss, by step.
    """

    def __init__(
        self, source: str, n: int, put_out: Sequence[int], needs: Sequence[bool], weighs: random.Random
    ) -> None:
        body, _, sums = source.partition("\nloss = ")
        self.code = compile(body, "<random cell>", "exec")
        self.names = NAME.findall(sums)
        self.put_out = [self.names[place % len(self.names)] for place in put_out]
        self.n, self.needs = n, needs
        self.weighs = [weighs.random() < 0.7 for _ in range(n)]

    def __call__(self, loop: Loop) -> tuple[Any, list[Tensor]]:
        model = Pieces()
        fixed = model.names()

        def cell(state: tuple[Tensor, Tensor], x: Tensor) -> tuple[tuple[Tensor, Tensor], list[Tensor]]:
            main, count = state
            names = {**fixed, "index": 1, "x": x * 0.5 + main * 0.3}
            exec(self.code, names)
            found = [names[name].float() for name in self.names]
            total = sum((each.square().mean() + each.tanh().mean() for each in found), start=torch.zeros(()))
            following = (main * 0.5 + x * 0.1 + total * 0.1).tanh(), count + 1
            return following, [total, *(names[name] for name in self.put_out)]

        start = torch.randn(SHAPE, requires_grad=self.needs[0]), torch.zeros(())
        xs = [torch.randn(SHAPE, requires_grad=self.needs[1]) for _ in range(self.n)]
        final, ys = loop(cell, start, xs)
        weighed = [
            part for y, weighs in zip(ys, self.weighs, strict=True) if weighs for part in y if part.requires_grad
        ]
        loss = sum((part.float().mean() for part in weighed), start=final[0].square().sum())
        loss.backward()
        buffers = [buffer.clone() for buffer in model.buffers()]
        return (final, ys, buffers), [*model.parameters(), start[0], *xs]


def is_plain(program: Written, truncate: int | None) -> bool:
    """Whether plain PyTorch gets through it, twice alike, and to numbers."""
    runs = []
    for _ in range(2):
        torch.manual_seed(0)
        try:
            results, watched = program(functools.partial(plain, truncate=truncate))
        except (AssertionError, RuntimeError, IndexError, ValueError, TypeError):
            return False
        runs.append([part for part in tree_leaves((results, [each.grad for each in watched])) if part is not None])
    return all(torch.equal(one, other) and bool(one.isfinite().all()) for one, other in zip(*runs, strict=True))


@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 2)
@hypothesis.given(
    choices=st.lists(
        st.tuples(st.sampled_from(CELL_PIECES), st.integers(0, 9), st.integers(0, 9)), min_size=3, max_size=13
    ),
    n=st.sampled_from([1, 2, 3, 5, 9, 14]),
    put_out=st.lists(st.integers(0, 19), max_size=2),
    needs=st.tuples(st.booleans(), st.booleans()),
    seed=st.integers(0, 999),
    count=st.sampled_from([2, 3, 4, 6]),
    truncate=st.sampled_from([None, None, None, 1, 3]),
    spills=st.booleans(),
    check=st.booleans(),
)
def test_random_programs_as_cells(
    choices: list[Choice], n: int, put_out: list[int], needs: tuple[bool, bool], seed: int, count: int,
    truncate: int | None, spills: bool, check: bool,
) -> None:  # fmt: skip
    source = write(choices)
    hypothesis.note(source)
    program = Written(source, n, put_out, needs, random.Random(seed))
    hypothesis.assume(is_plain(program, truncate))
    memory = count * (states(1, torch.zeros(SHAPE), torch.zeros(())) + 1024)  # batch norm's statistics are stored, too
    with tempfile.TemporaryDirectory() as spill:
        compare(program, memory=memory, truncate=truncate, check=check, spill=spill if spills else None)
