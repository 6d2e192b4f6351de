"""Fake tensors have no values, and say so to whatever asks for them.

Ops that need values are refused by the mode. NumPy, `format` and storages read a tensor without an op: PyTorch then
complains of subclasses or meta tensors, which are none of the user's, or even hands out memory of others.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.errors import StepError


def no_value(reader: object) -> StepError:
    """The error of a step in which ``reader``, an op or a function, asks for the value of a fake tensor."""
    return StepError(
        f"the step looks into a tensor ({reader}), and fake tensors have no values: take .item(), float(), `if tensor`"
        " and the like out of it, or observe it on real tensors"
    )


@contextlib.contextmanager
def values_refused() -> Iterator[None]:
    """While it lasts, what reads a fake tensor past its ops raises `no_value`."""
    storages: tuple[Any, ...] = torch.UntypedStorage, torch.TypedStorage
    replacements: list[tuple[Any, str, Callable[..., Any]]] = [
        (FakeTensor, "numpy", _refuses(FakeTensor.numpy)),
        (FakeTensor, "__dlpack__", _refuses(FakeTensor.__dlpack__)),
        (FakeTensor, "__format__", _formatted),
        *((kind, "__getitem__", _item_of(kind.__getitem__)) for kind in storages),
    ]
    found = [(kind, name, vars(kind).get(name)) for kind, name, _ in replacements]
    try:
        for kind, name, function in replacements:
            setattr(kind, name, function)
        yield
    finally:
        for kind, name, original in found:
            if original is not None:
                setattr(kind, name, original)
            elif name in vars(kind):
                delattr(kind, name)


def _is_of_a_step(tensor: Any) -> bool:
    """Others may have fake tensors of their own meanwhile, as `torch.compile` has."""
    return hasattr(tensor.fake_mode, "stands_for_a_step")


def _refuses(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def refuse(tensor: FakeTensor, *arguments: Any, **options: Any) -> Any:
        if _is_of_a_step(tensor):
            raise no_value(original.__name__)
        return original(tensor, *arguments, **options)

    return refuse


def _formatted(tensor: torch.Tensor, form: str) -> str:
    """As `torch.Tensor.__format__` writes real tensors; where no form is asked for, fake ones stay printed as such."""
    if form and tensor.dim() == 0 and _is_of_a_step(tensor):
        return tensor.detach().item().__format__(form)
    return object.__format__(tensor, form)


def _item_of(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def item(storage: Any, *place: Any) -> Any:
        try:
            return original(storage, *place)
        except NotImplementedError as fault:  # it has no bytes
            raise no_value(original.__qualname__) from fault

    return item
