"""Saved tensors that wrap another one, which is held in their place. See NOTE [Wrapped tensors] in
`ebbtide.observe.wrapped`."""

from __future__ import annotations

from collections.abc import Callable

import torch

from ebbtide.observe.wrapped import wrapped_name
from ebbtide.run.holdings import Kept, View, changed_error, keep, nothing

_NOTHING = nothing(torch.device("cpu"))


class Wrapped:
    """A saved tensor whose inner one is a view of a holding.

    It has a wrapper like the saved one, around nothing, that counts its versions with it: what is written through any
    other wrapper of the same tensor is seen, and no memory is kept.

    Args:
        wrapper: the saved tensor.
        view: of what it wraps.
    """

    __slots__ = ("_name", "_shell", "_version", "view")

    def __init__(self, wrapper: torch.Tensor, view: View) -> None:
        name = wrapped_name(wrapper)
        assert name is not None
        self.view = view
        self._name = name
        self._version = wrapper._version
        self._shell = wrapper.detach()
        setattr(self._shell, name, _NOTHING)

    @property
    def number(self) -> int:
        """Of the saved tensor in its step."""
        return self.view.number

    def show(self) -> torch.Tensor:
        """The saved tensor. Raises `RuntimeError` if it was changed in place, as PyTorch would."""
        return self.around(self.view.show)

    def around(self, show: Callable[[], torch.Tensor]) -> torch.Tensor:
        """The same, with its inner tensor from elsewhere."""
        shell = self._shell
        if shell._version != self._version:
            raise changed_error(shell, shell._version, self._version)
        setattr(shell, self._name, show())
        try:
            return shell.detach()
        finally:
            setattr(shell, self._name, _NOTHING)


Handle = Kept | View | Wrapped
"""What autograd is given."""


def wrap_like(tensor: torch.Tensor, inner: torch.Tensor, handle: Kept | View) -> Handle:
    """What stands for the saved ``tensor`` where ``handle`` stands for ``inner``, which it wraps, or is itself."""
    if inner is tensor:
        return handle
    return Wrapped(tensor, handle) if isinstance(handle, View) else keep(tensor, handle.number)
