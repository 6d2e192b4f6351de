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
