"""Replaces what ops are known to leave partly unwritten by the same from memory filled with other bytes, and counts how
many gradients differ. For a process of its own, since it changes how memory is given out."""

from __future__ import annotations

import ctypes
import json
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from ebbtide.observe.schema import is_partly_written

MMAP_THRESHOLD, PERTURB = -3, -6
"""Parameters of glibc's `mallopt`: from which size on memory is new each time; what it is filled with."""


class Swapped(TorchDispatchMode):
    """Counts the ops that are ``run`` twice, and those of them whose last result then has ``other`` bytes."""

    def __init__(self, libc: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._libc = libc
        self.run = self.other = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if not is_partly_written(func):
            return result
        self._libc.mallopt(PERTURB, 0x5A)
        again = func(*args, **(kwargs or {}))
        self._libc.mallopt(PERTURB, 0)
        self.run += 1
        self.other += not torch.equal(_bytes(result[-1]), _bytes(again[-1]))
        return (*result[:-1], again[-1])


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.contiguous().flatten().view(torch.uint8)


def lstm(seed: int) -> Callable[[], list[Tensor]]:
    """Gradients of an LSTM of two layers."""
    torch.manual_seed(seed)
    model = nn.LSTM(16, 24 + seed, 2, bidirectional=seed % 2 == 0)
    given = torch.randn(12, 9, 16)

    def gradients() -> list[Tensor]:
        shown, (hidden, cell) = model(given)
        loss = shown.square().sum() + hidden.sin().sum() + cell.sum()
        return list(torch.autograd.grad(loss, list(model.parameters())))

    return gradients


def speech(seed: int) -> Callable[[], list[Tensor]]:
    """The gradient of `ctc_loss` on texts and recordings of several lengths."""
    torch.manual_seed(seed)
    said = torch.randn(50, 6, 12, requires_grad=True)
    texts, spoken, heard = torch.randint(1, 12, (6, 10)), torch.randint(0, 11, (6,)), torch.randint(25, 51, (6,))

    def gradients() -> list[Tensor]:
        return list(torch.autograd.grad(F.ctc_loss(said.log_softmax(-1), texts, heard, spoken), [said]))

    return gradients


def main() -> None:
    """Print the counts of all cases."""
    libc = ctypes.CDLL("libc.so.6")
    libc.mallopt(MMAP_THRESHOLD, 1 << 30)
    different, swapped = 0, Swapped(libc)
    for gradients in (make(seed) for seed in range(8) for make in (lstm, speech)):
        expected = gradients()
        with swapped:
            found = gradients()
        different += not all(map(torch.equal, expected, found))
    print(json.dumps({"run": swapped.run, "other": swapped.other, "different": different}))


if __name__ == "__main__":
    main()
