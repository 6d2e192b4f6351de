"""Hooks that a cell puts on tensors: a step's first run leaves them, as in a plain loop; runs after it leave none."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable
from types import TracebackType
from typing import Any

from torch import Tensor
from torch.utils.hooks import RemovableHandle

_make = RemovableHandle.__init__
_lock = threading.Lock()
_entered = 0  # how many `PutHooks` are, in all threads


class PutHooks:
    """Notes, while it is entered, which hooks this thread puts on tensors.

    PyTorch makes a handle for each hook, whatever it is put on, and tells nobody of it but who has put it.

    Attributes:
        handles: those of the hooks, until they are undone or kept.
    """

    def __init__(self) -> None:
        self.handles: list[RemovableHandle] = []

    def __enter__(self) -> PutHooks:
        global _entered
        _here.noting.append(self)
        with _lock:
            _entered += 1
            if _entered == 1:
                RemovableHandle.__init__ = _make_noted  # type: ignore[method-assign, assignment]
        return self

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _entered
        with _lock:
            _entered -= 1
            if _entered == 0:
                RemovableHandle.__init__ = _make  # type: ignore[method-assign]
        _here.noting.remove(self)
        self.handles.clear()

    def undo(self, since: int = 0) -> None:
        """Remove the hooks, but for the first ``since``."""
        if self.handles:
            for handle in self.handles[since:]:
                handle.remove()
            del self.handles[since:]

    def hand_over(self, given: Iterable[Tensor], inputs: Iterable[Tensor]) -> None:
        """Make hooks that a cell has put on what it was ``given`` those of ``inputs``, and handles remove them there.

        A step's own leaf gets a part of the gradient only, where an input is used elsewhere.
        """
        for stand_in, part in zip(given, inputs, strict=True):
            hooks = stand_in._backward_hooks
            if not hooks:
                continue
            if part._backward_hooks is None:
                part.register_hook(lambda _: None).remove()  # that makes a dictionary
            theirs: dict[int, Any] = part._backward_hooks  # type: ignore[assignment]
            theirs.update(hooks)
            for handle in self.handles:
                if handle.hooks_dict_ref() is hooks:
                    handle.hooks_dict_ref = weakref.ref(theirs)


class FirstHooks:
    """Hooks that a cell has put in its first run, which is no step. They are put back if step 0 puts none there.

    So does a cell that puts some once, in whichever run is the first.
    """

    def __init__(self) -> None:
        self._hooks: list[tuple[weakref.ref[Any], int, Any]] = []

    def note(self, put: PutHooks) -> None:
        """Take up those that are there at the end of that run."""
        for handle in put.handles:
            hooks = handle.hooks_dict_ref()
            if hooks is not None and handle.id in hooks:
                self._hooks.append((handle.hooks_dict_ref, handle.id, hooks[handle.id]))

    def put_back(self, put: PutHooks) -> None:
        """Step 0 has ``put`` these."""
        again = {id(handle.hooks_dict_ref()) for handle in put.handles}
        for reference, key, hook in self._hooks:
            hooks = reference()
            if hooks is not None and id(hooks) not in again:
                hooks[key] = hook
        self._hooks.clear()


def drop_hooks(tensors: Iterable[Tensor]) -> None:
    """Forget all hooks on these."""
    for tensor in tensors:
        if tensor._backward_hooks:
            tensor._backward_hooks.clear()


class _Here(threading.local):
    """What notes hooks in this thread."""

    def __init__(self) -> None:
        self.noting: list[PutHooks] = []


_here = _Here()


def _make_noted(handle: RemovableHandle, *arguments: Any, **options: Any) -> None:
    _make(handle, *arguments, **options)
    if not handle.extra_dict_ref:  # as those have that hook what modules compute, which is the cell's own affair
        for put in _here.noting:
            put.handles.append(handle)
