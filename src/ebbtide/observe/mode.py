"""A typed base for our dispatch modes: PyTorch's own has no annotations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

from torch.utils._python_dispatch import TorchDispatchMode


class DispatchMode(TorchDispatchMode):
    """Sees every ATen op, below autograd, between `enter` and `leave` or over a ``with`` block."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """To PyTorch: compile as if this mode were not there. See NOTE [Compiled graphs] in `inductor.py`."""
        return True

    def run_graph(self, run: Callable[[], Any], inputs: Sequence[Any], written: Collection[int]) -> Any:
        """A compiled graph is to run in place of ops: run it, once, and return what it returns.

        Args:
            run: runs it.
            inputs: its arguments. A list is emptied meanwhile, so that they can die as soon as they are not needed.
            written: places of those that it writes in place.
        """
        del inputs, written
        return run()

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
