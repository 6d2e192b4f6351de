"""Tensors around tensors, such as `DTensor`: the memory is that of what they wrap.

NOTE [Wrapped tensors]
A wrapper says a shape that need not be that of what it wraps, and has a storage without memory. Autograd records ops on
wrappers, and saves those; below it each op becomes some on what they wrap. Our modes see the latter alone. What is
saved counts, moves and comes back as what it wraps. An in-place op on a wrapper is not counted in the versions of what
that wraps, so that nobody could tell whether what it read is still there: ops that wrappers have become are never run
again.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable
from typing import Any

import torch

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that PyTorch's own kernels work on, and nobody else's code."""
_COLLECTIVES = "torch.distributed._functional_collectives"


@functools.cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of this type wrap others, as far as PyTorch's compiler can tell."""
    return issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_flatten__")


def wraps(kinds: Iterable[type]) -> bool:
    """Whether any of these types is one of wrappers."""
    return any(map(is_wrapper, kinds))


def wrapped_name(wrapper: torch.Tensor) -> str | None:
    """The attribute by which ``wrapper`` wraps a tensor; None if it wraps several, or waits for a collective itself."""
    if _awaits(wrapper):
        return None
    attributes: list[str] = wrapper.__tensor_flatten__()[0]  # type: ignore[attr-defined]  # a protocol, not a method
    tensors = [name for name in attributes if isinstance(getattr(wrapper, name), torch.Tensor)]
    return tensors[0] if len(tensors) == 1 else None


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """What ``tensor`` wraps, if that is one tensor, which wraps none, or else itself. Waits for a collective that still
    fills it, as the next op would."""
    if not is_wrapper(type(tensor)):
        return tensor
    name = wrapped_name(tensor)
    if name is None:
        return tensor
    found: Any = getattr(tensor, name)
    inner: torch.Tensor = found.trigger_wait() if _awaits(found) else found
    kind: Any = type(inner)
    return tensor if is_wrapper(kind) else inner


def _awaits(tensor: Any) -> bool:
    """Whether it is what a collective will have filled once it was waited for."""
    module = sys.modules.get(_COLLECTIVES)
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)
