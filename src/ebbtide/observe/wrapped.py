"""Tensors around tensors, such as `DTensor`: the memory is that of what they wrap; and those with a class of their own.

NOTE [Wrapped tensors]
A wrapper says a shape that need not be that of what it wraps, and has a storage without memory. Autograd records ops on
wrappers, and saves those; below it each op becomes some on what they wrap. Our modes see the latter alone. What is
saved counts, moves and comes back as what it wraps. An in-place op on a wrapper is not counted in the versions of what
that wraps, so that nobody could tell whether what it read is still there: ops that wrappers have become are never run
again.

NOTE [Subclasses]
Other subclasses, such as MONAI's images and fastai's, are ordinary tensors to PyTorch's kernels: their class says what
Python functions do with them (`__torch_function__`) and what attributes they have. What is saved is held as an ordinary
tensor with the same memory and versions; none of the class's own code runs for that. Autograd asks for the class again
only where what was saved needs no gradient; of all else it makes an ordinary tensor, with any hooks. A backward pass is
no code of Python's, and makes ordinary tensors of all: so ours runs ops as on ordinary ones where a mode sees them. The
operators of others may be code of Python's, which is to find its own subclasses as they are: it runs as it is called.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.utils._pytree import tree_any_only

PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)
"""Types of tensors that PyTorch's own kernels work on, and nobody else's code."""
AsOrdinary: Any = torch._C.DisableTorchFunctionSubclass
"""In a ``with`` block of it tensors with a class of their own are ordinary ones, and so are results."""
OF_PYTORCH = frozenset({"aten", "prim", "prims"})
"""Namespaces of operators that are no code of Python's."""
SMALL = 1 / 8
"""Share of the bytes of what a wrapper wraps that all else it has may take, as that stays."""
_COLLECTIVES = "torch.distributed._functional_collectives"


@functools.cache
def is_wrapper(kind: type) -> bool:
    """Whether tensors of this type wrap others, as far as PyTorch's compiler can tell."""
    return issubclass(kind, torch.Tensor) and hasattr(kind, "__tensor_flatten__")


@functools.cache
def is_subclass(kind: type) -> bool:
    """Whether tensors of this type are ordinary ones but for Python. See NOTE [Subclasses]."""
    if kind in PLAIN_TYPES or is_wrapper(kind) or not issubclass(kind, torch.Tensor):
        return False
    return kind.__torch_dispatch__ is torch.Tensor.__torch_dispatch__ and not issubclass(kind, torch.nn.Parameter)


def ordinary(tensor: torch.Tensor) -> torch.Tensor:
    """The ordinary tensor that one of a subclass is, outside any graph.

    No mode of the user's sees that, or `dressed`: autograd itself saves, and shows what it has saved, by no function.
    """
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        return tensor.detach().requires_grad_(tensor.requires_grad)


def dressed(tensor: torch.Tensor, kind: type[torch.Tensor], attributes: Mapping[str, Any]) -> torch.Tensor:
    """An ordinary tensor as one of a subclass, with its attributes."""
    with torch._C.DisableTorchFunction(), torch._C._DisableTorchDispatch():
        found = tensor.as_subclass(kind)
    vars(found).update(attributes)
    return found


def runs_as_called(func: Any, args: Any, kwargs: Any) -> bool:
    """Whether an op may be Python code of somebody's that is given no subclass. See NOTE [Subclasses]."""
    if func.namespace in OF_PYTORCH:
        return False
    return not tree_any_only(torch.Tensor, _is_of_subclass, (args, kwargs))


def _is_of_subclass(tensor: torch.Tensor) -> bool:
    kind: Any = type(tensor)
    return is_subclass(kind)


def wraps(kinds: Iterable[type]) -> bool:
    """Whether any of these types is one of wrappers."""
    return any(map(is_wrapper, kinds))


def wrapped_name(wrapper: torch.Tensor) -> str | None:
    """The attribute by which ``wrapper`` wraps a tensor, beside small ones at most, such as a jagged tensor's offsets.

    None if there is no such attribute, or if it waits for a collective itself.
    """
    if _awaits(wrapper):
        return None
    attributes: list[str] = wrapper.__tensor_flatten__()[0]  # type: ignore[attr-defined]  # a protocol, not a method
    found = [(name, getattr(wrapper, name)) for name in attributes]
    tensors = [(name, inner) for name, inner in found if isinstance(inner, torch.Tensor)]
    if len(tensors) < 2:
        return tensors[0][0] if tensors else None
    largest, inner = max(tensors, key=lambda each: each[1].nbytes)
    is_small = sum(each.nbytes for _, each in tensors) <= (1 + SMALL) * inner.nbytes  # what it has beside that
    return largest if is_small and largest in vars(wrapper) else None


def inside(tensor: torch.Tensor) -> torch.Tensor:
    """What ``tensor`` wraps, if that is one tensor, which wraps none; the ordinary tensor that one of a subclass is; or
    else itself. Waits for a collective that still fills it, as the next op would."""
    kind: Any = type(tensor)
    if is_subclass(kind) and not isinstance(tensor, torch.nn.Parameter):  # which is saved as itself: see `keep`
        return ordinary(tensor)
    if not is_wrapper(kind):
        return tensor
    name = wrapped_name(tensor)
    if name is None:
        return tensor
    found: Any = getattr(tensor, name)
    inner: torch.Tensor = found.trigger_wait() if _awaits(found) else found
    kind = type(inner)
    return tensor if is_wrapper(kind) else inner


def _awaits(tensor: Any) -> bool:
    """Whether it is what a collective will have filled once it was waited for."""
    module = sys.modules.get(_COLLECTIVES)
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)
