"""A tensor around a tensor, in the manner of `DTensor`: of another shape, and recorded by autograd in place of it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import return_and_correct_aliasing
from torch.utils._pytree import tree_map_only


class Doubled(Tensor):
    """Says that it has twice the rows of what it wraps, as if another process had the other half. What works on each
    number by itself can be done to it."""

    wrapped: Tensor

    @staticmethod
    def __new__(cls, inner: Tensor) -> Doubled:
        shape = (2 * inner.shape[0], *inner.shape[1:])
        made: Doubled = Tensor._make_wrapper_subclass(cls, shape, dtype=inner.dtype, device=inner.device)
        made.wrapped = inner
        return made

    def __tensor_flatten__(self) -> tuple[list[str], None]:
        return ["wrapped"], None

    @staticmethod
    def __tensor_unflatten__(inner: dict[str, Tensor], _context: None, _size: Any, _stride: Any) -> Doubled:
        return Doubled(inner["wrapped"])

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # its stubs have another protocol
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        inner: Any = tree_map_only(Doubled, lambda wrapper: wrapper.wrapped, (args, kwargs or {}))
        made = tree_map_only(Tensor, Doubled, func(*inner[0], **inner[1]))
        return return_and_correct_aliasing(func, args, kwargs or {}, made)

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Doubled({self.wrapped!r})"


class _Wrap(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, inner: Tensor) -> Tensor:
        return Doubled(inner.view_as(inner))

    @staticmethod
    def backward(_context: Any, *gradients: Any) -> Any:
        return gradients[0].wrapped


class _Unwrap(torch.autograd.Function):
    @staticmethod
    def forward(_context: Any, wrapper: Tensor) -> Tensor:
        assert isinstance(wrapper, Doubled)
        return wrapper.wrapped.view_as(wrapper.wrapped)

    @staticmethod
    def backward(_context: Any, *gradients: Any) -> Any:
        return Doubled(gradients[0])


def wrap(tensor: Tensor) -> Tensor:
    """``tensor`` in a `Doubled`; gradients go through."""
    wrapped: Tensor = _Wrap.apply(tensor)  # type: ignore[no-untyped-call]
    return wrapped


def unwrap(tensor: Tensor) -> Tensor:
    """What `wrap` has wrapped, or became of it."""
    inner: Tensor = _Unwrap.apply(tensor)  # type: ignore[no-untyped-call]
    return inner
