"""Gradients of the tensors outside a cell, as they add up from step to step."""

from __future__ import annotations

from torch import Tensor


class Sums:
    """What has arrived so far, by number of the tensor.

    Attributes:
        held: the sums; None where nothing has arrived.
    """

    def __init__(self, count: int = 0) -> None:
        self.held: list[Tensor | None] = [None] * count
        self._own: set[int] = set()  # those that nobody else can see

    def put(self, number: int, total: Tensor | None) -> None:
        """``total`` is the sum from now on."""
        self.held[number] = total
        self._own.discard(number)

    def add(self, number: int, grad: Tensor | None) -> None:
        """Add to a sum, in place if nobody else can hold it."""
        held = self.held[number]
        if grad is None:
            return
        if held is None:
            self.put(number, grad)
        elif number in self._own:
            held.add_(grad)
        else:
            self.held[number] = held + grad
            self._own.add(number)
