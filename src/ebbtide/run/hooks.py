"""Saved-tensor hooks on autograd's stack, and what is left of them where a budget does not bind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide.run.holdings import Kept, keep
from ebbtide.step import Saved


def push_hooks(pack: Callable[[torch.Tensor], Any], unpack: Callable[[Any], torch.Tensor]) -> None:
    """From now on autograd saves through these hooks."""
    torch._C._autograd._push_saved_tensors_default_hooks(pack, unpack)


def pop_hooks() -> None:
    """Undo the latest `push_hooks`."""
    torch._C._autograd._pop_saved_tensors_default_hooks()


class LightWatch:
    """Watches a step whose budget does not bind: looks at the first saved tensor, then takes its hooks out.

    Args:
        first: what was saved first when such a step was observed; None if nothing was.

    Attributes:
        watching: whether its hooks are still on the stack.
        left: why the step is of another kind, or an empty string.
    """

    def __init__(self, first: Saved | None) -> None:
        self.watching = True
        self.left = ""
        self._first = first

    def pack(self, tensor: torch.Tensor) -> Kept:
        """The pack hook."""
        self.watching = False
        pop_hooks()
        first = self._first
        if first is None or tensor.dim() != len(first.shape) or tensor.numel() > torch.Size(first.shape).numel():
            self.left = f"the first saved tensor is {list(tensor.shape)}, expected {first.shape if first else 'none'}"
        return keep(tensor, -1)

    def unpack(self, handle: Kept) -> torch.Tensor:
        """The unpack hook."""
        return handle.show()


def forget_failed_backward() -> None:
    """Let go of what was ready to run when a backward pass failed: autograd keeps it until this thread's next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).clone().backward()
