"""A typed base for our dispatch modes: PyTorch's own has no annotations."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import Any, Self

import torch.utils._python_dispatch as dispatch
from torch.utils._python_dispatch import TorchDispatchMode

_COMPILE_FLAG = "_is_in_any_mode_without_ignore_compile_internals"
_FLAGS = tuple(
    name
    for name in (
        "_is_in_torch_dispatch_mode",
        "_is_in_non_infra_torch_dispatch_mode",
        _COMPILE_FLAG,
    )
    if hasattr(dispatch, name)
)
"""What PyTorch, by version, notes about the modes on its stack, besides the stack itself."""
_set_compile_flag = getattr(dispatch, "set_is_in_mode_without_ignore_compile_internals", None)
"""Tells the copy of it that PyTorch keeps outside of Python."""


def _flags() -> tuple[bool, ...]:
    return tuple(getattr(dispatch, name) for name in _FLAGS)


class DispatchMode(TorchDispatchMode):
    """Sees every ATen op, below autograd, between `enter` and `leave` or over a ``with`` block.

    An interrupt may come while PyTorch puts the mode on its stack or takes it off. Whichever way that leaves it,
    `leave` takes the mode off, if it is on, and puts PyTorch's notes back to what they were.
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._flags = _flags()

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
        self._flags = _flags()
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        try:
            if self._is_on():
                super().__exit__(*exception)  # type: ignore[no-untyped-call]
            else:
                self._put_back()
        except BaseException:
            self._put_back()
            raise

    def _is_on(self) -> bool:
        return any(mode is self for mode in dispatch._get_current_dispatch_mode_stack())

    def _put_back(self) -> None:
        """Undo what PyTorch did of an `enter` or left of a `leave` that was interrupted."""
        if self._is_on():
            dispatch._pop_mode()
        for name, flag in zip(_FLAGS, self._flags, strict=True):
            setattr(dispatch, name, flag)
        if _set_compile_flag is not None:
            _set_compile_flag(getattr(dispatch, _COMPILE_FLAG))

    def enter(self) -> None:
        """Begin to see ops."""
        self.__enter__()

    def leave(self) -> None:
        """See no more of them."""
        self.__exit__(None, None, None)
