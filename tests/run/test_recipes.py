"""A recipe gives back what the captured calls made, whatever view of a value they read."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from ebbtide.run.holdings import Holding
from ebbtide.run.recipes import KnownOp, Recipe, capture

VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "itself": lambda x: x,
    "transposed": lambda x: x.t(),
    "part": lambda x: x[1:, ::2],
    "conjugated": torch.conj,
    "conjugated and transposed": lambda x: x.mH,
    "negated": lambda x: x.conj().imag,
    "both": lambda x: torch._neg_view(x.conj()),
    "real": torch.view_as_real,
}


@pytest.mark.parametrize("view", VIEWS)
def test_a_view_of_a_value_is_read_again_as_it_was(view: str) -> None:
    value = torch.randn(6, 5, dtype=torch.complex64)
    read = VIEWS[view](value)
    known = KnownOp("aten.mul.Tensor", (0,), (1,), (), frozenset(), batch_norm=False)
    call = capture(torch.ops.aten.mul.Tensor, (read, 2.0), {}, known)
    expected = read * 2.0
    leaf = Holding()
    leaf.fill(value)
    again = Recipe(1, [call], {0: leaf}, (0,)).replay()
    assert torch.equal(again, expected)
    assert again.stride() == expected.stride()
