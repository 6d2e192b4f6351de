"""Saved tensors that wrap another one, which is held in their place, or have a class of their own. See NOTE [Wrapped
tensors] and NOTE [Subclasses] in `ebbtide.observe.wrapped`."""

from __future__ import annotations

import abc
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.observe.wrapped import dressed, is_subclass, wrapped_name
from ebbtide.run.holdings import Kept, View, keep
from ebbtide.run.versions import changed_error, nothing

_NOTHING = nothing(torch.device("cpu"))


class Outer(abc.ABC):
    """A saved tensor around another one, or with a class of its own.

    Args:
        view: what stands for what is inside it.
    """

    __slots__ = ("view",)

    def __init__(self, view: Kept | View) -> None:
        self.view = view

    @property
    def number(self) -> int:
        """The saved tensor's number in its step."""
        return self.view.number

    def show(self) -> torch.Tensor:
        """The saved tensor. Raises `RuntimeError` if it was changed in place, as PyTorch would."""
        return self.around(self.view.show)

    @abc.abstractmethod
    def around(self, show: Callable[[], torch.Tensor]) -> torch.Tensor:
        """This handle around an inner tensor from elsewhere."""


class Wrapped(Outer):
    """A saved tensor whose inner one is a view of a holding.

    It has a wrapper like the saved one, around nothing, that counts its versions with it: what is written through any
    other wrapper of the same tensor is seen, and no memory is kept.

    Args:
        wrapper: the saved tensor.
        view: a view of what it wraps.
    """

    __slots__ = ("_name", "_shell", "_version")

    def __init__(self, wrapper: torch.Tensor, view: View) -> None:
        name = wrapped_name(wrapper)
        assert name is not None
        super().__init__(view)
        self._name = name
        self._version = wrapper._version
        self._shell = wrapper.detach()
        setattr(self._shell, name, _NOTHING)

    def around(self, show: Callable[[], torch.Tensor]) -> torch.Tensor:
        """This handle around an inner tensor from elsewhere."""
        shell = self._shell
        if shell._version != self._version:
            raise changed_error(shell, shell._version, self._version)
        setattr(shell, self._name, show())
        try:
            return shell.detach()
        finally:
            setattr(shell, self._name, _NOTHING)


class Subclassed(Outer):
    """A saved tensor with a class of its own, which is shown with that class and its attributes.

    Args:
        tensor: the saved tensor.
        view: what stands for it as an ordinary tensor.
    """

    __slots__ = ("_attributes", "_kind")

    def __init__(self, tensor: torch.Tensor, view: Kept | View) -> None:
        super().__init__(view)
        self._kind = type(tensor)
        self._attributes = vars(tensor)

    def around(self, show: Callable[[], torch.Tensor]) -> torch.Tensor:
        """This handle with the tensor's memory from elsewhere."""
        return dressed(show(), self._kind, self._attributes)


Handle = Kept | View | Outer
"""What autograd is given."""


def wrap_like(tensor: torch.Tensor, inner: torch.Tensor, handle: Kept | View) -> Handle:
    """What stands for the saved ``tensor`` where ``handle`` stands for ``inner``, which is `inside` it."""
    if inner is tensor:
        return handle
    kind: Any = type(tensor)
    if is_subclass(kind):
        return handle if inner.requires_grad else Subclassed(tensor, handle)
    return Wrapped(tensor, handle) if isinstance(handle, View) else keep(tensor, handle.number)
