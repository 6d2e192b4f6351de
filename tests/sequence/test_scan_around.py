"""What `scan` runs steps and their formulas under: autocast, and modes of the caller's."""

from __future__ import annotations

import contextlib
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.sequence.loops import WIDTH, Loop, compare

pytestmark = pytest.mark.usefixtures("nothing_left")

SHAPE = 3, WIDTH


class TestAutocastOfTheBackwardPass:
    """Formulas run under that of whoever calls the backward pass, as in a plain loop."""

    @pytest.mark.parametrize("backward", ["inside", "outside", "elsewhere"])
    @pytest.mark.parametrize("kind", ["float32 part", "solve"])
    def test_of_cells_that_leave_it(self, kind: str, backward: str) -> None:
        def program(loop: Loop) -> tuple[Any, list[Tensor]]:
            weight, other = (torch.randn(WIDTH, WIDTH).div_(WIDTH).requires_grad_() for _ in range(2))

            def cell(h: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
                x = x @ other
                if kind == "solve":
                    return torch.linalg.solve(torch.eye(WIDTH) + weight, (h + x).T).T, h.mean()
                with torch.autocast("cpu", enabled=False):
                    return torch.tanh(h @ weight + x.float()), h.mean()

            with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
                final, ys = loop(cell, torch.randn(SHAPE), torch.randn(12, *SHAPE))
                loss = final.square().sum() + torch.stack(ys).sum()
                if backward == "inside":
                    loss.backward()
            with torch.autocast("cpu", torch.float16) if backward == "elsewhere" else contextlib.nullcontext():
                if backward != "inside":
                    loss.backward()
            return [final, *ys], [weight, other]

        compare(program, memory="60KiB")
