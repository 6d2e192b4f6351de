"""A typed base for our dispatch modes: PyTorch's own has no annotations."""

from __future__ import annotations

from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Sees every ATen op, below autograd, between `enter` and `leave` or over a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    def __enter__(self) -> Self:
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def enter(self) -> None:
        """Begin to see ops."""
        self.__enter__()

    def leave(self) -> None:
        """See no more of them."""
        self.__exit__(None, None, None)
