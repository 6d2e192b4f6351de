"""Tells of memory that is given to storages, or taken from them, by no op.

`torch.UntypedStorage.resize_` passes by every dispatch mode, and the tensors of the storage live on: what has been
emptied for a while, as between a forward and a backward pass, would count all the time.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from typing import Any

import torch

Told = Callable[[torch.UntypedStorage], object]
_told: list[Told] = []


def tell_of_resizing(told: Told) -> None:
    """From now on ``told`` is called with each storage that `torch.UntypedStorage.resize_` was called for, in whichever
    thread, as soon as that is done."""
    _stand_behind_resize()
    _told.append(told)


def tell_no_more_of_resizing(told: Told) -> None:
    """Undo `tell_of_resizing`, if it was done."""
    _told[:] = [other for other in _told if other != told]


@functools.cache
def _stand_behind_resize() -> None:
    original = torch.UntypedStorage.resize_

    @functools.wraps(original)
    def resize_(self: torch.UntypedStorage, *args: Any, **kwargs: Any) -> Any:
        result = original(self, *args, **kwargs)
        for told in tuple(_told):
            told(self)
        return result

    torch.UntypedStorage.resize_ = resize_  # type: ignore[assignment, method-assign]


os.register_at_fork(after_in_child=_told.clear)  # what a child of a step does is no part of that
