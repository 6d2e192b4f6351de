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
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode, _pop_mode, _push_mode

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
    """What ``tensor`` wraps, if that is one plain tensor, or else itself. Waits for a collective that still fills it,
    as the next op would."""
    if not is_wrapper(type(tensor)):
        return tensor
    name = wrapped_name(tensor)
    if name is None:
        return tensor
    inner = getattr(tensor, name)
    if _awaits(inner):
        inner = inner.trigger_wait()
    return inner if type(inner) in PLAIN_TYPES else tensor


def _awaits(tensor: Any) -> bool:
    """Whether it is what a collective will have filled once it was waited for."""
    module = sys.modules.get(_COLLECTIVES)
    return module is not None and isinstance(tensor, module.AsyncCollectiveTensor)


class Within(TorchDispatchMode):
    """Lets ops on wrappers become what they are, and shows that to somebody.

    Args:
        see: called with each op that has no wrappers among its arguments, and these; returns its result.
    """

    def __init__(self, see: Callable[[Any, Any, Any], Any]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._see = see

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        """To PyTorch: compile as if this mode were not there."""
        return True

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return NotImplemented if types and wraps(types) else self._see(func, args, kwargs or {})

    def run(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an op on wrappers."""
        _push_mode(self)  # its `with` block would tell the compiler, which the mode that calls has done
        try:
            return func(*args, **kwargs)
        finally:
            _pop_mode()
