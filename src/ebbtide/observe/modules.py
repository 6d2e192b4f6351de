"""Which module of the user's model is running, by name, without being told what the model is.

Calls of modules are followed from outside, around `torch.nn.Module.__call__`: what `torch.compile` makes depends on
whether there are global module hooks, and would be made anew for a step with some.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import torch

from ebbtide.observe.uncompiled import never_compiled, warn_if_compiled

_following: list[ModuleTrail] = []
_followed: Any = None
"""What stands for `torch.nn.Module.__call__` while anybody follows; knows the one before as ``__wrapped__``."""


class ModuleTrail:
    """Follows the modules that are called in the thread that starts it.

    The path starts with the class name of the outermost module: ``ResNet.body.3.conv1``.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[torch.nn.Module, str]] = []
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self.thread = 0

    @property
    def path(self) -> str:
        """Path of the innermost module that is running, or an empty string."""
        return self._stack[-1][1] if self._stack else ""

    def start(self) -> None:
        """Begin to follow."""
        self.thread = threading.get_ident()
        self.go_on()

    def stop(self) -> None:
        """Stop following."""
        self.pause()
        self._stack.clear()

    def pause(self) -> None:
        """Follow no module that is called from now on."""
        if self in _following:
            _following.remove(self)
        current: Any = torch.nn.Module.__call__
        if not _following and current is _followed:  # nobody else has put something around it since
            torch.nn.Module.__call__ = current.__wrapped__  # type: ignore[method-assign]

    def go_on(self) -> None:
        """Follow modules again, at first and after `pause`."""
        global _followed
        if self not in _following:
            _following.append(self)
        if torch.nn.Module.__call__ is not _followed:
            _followed = _following_calls(torch.nn.Module.__call__)
            torch.nn.Module.__call__ = _followed  # type: ignore[method-assign]

    @never_compiled
    def enter(self, module: torch.nn.Module) -> None:
        """``module`` is called."""
        warn_if_compiled(module)
        # What `torch.compile` returned for a module is named as that module. `vars`, because a class of the user's may
        # compute attributes itself.
        children = vars(module).get("_modules")
        original = children.get("_orig_mod") if isinstance(children, dict) else None
        module = original if isinstance(original, torch.nn.Module) else module
        if not self._stack:
            path = type(module).__name__
        else:
            parent, parent_path = self._stack[-1]
            path = parent_path if parent is module else f"{parent_path}.{self._name_within(parent, module)}"
        self._stack.append((module, path))

    @never_compiled
    def leave(self, depth: int) -> None:
        """The call is over before which ``depth`` modules were running."""
        del self._stack[depth:]

    @property
    def depth(self) -> int:
        """How many modules are running, each inside the one before."""
        return len(self._stack)

    def _name_within(self, parent: torch.nn.Module, module: torch.nn.Module) -> str:
        names = self._names.get(parent)
        if names is None:
            names = {id(child): name for name, child in parent.named_modules() if name}
            self._names[parent] = names
        return names.get(id(module), type(module).__name__)


def _following_calls(original: Any) -> Any:
    @functools.wraps(original)
    def call(self: torch.nn.Module, *args: Any, **kwargs: Any) -> Any:
        thread = threading.get_ident()
        trails = [(trail, trail.depth) for trail in _following if trail.thread == thread]
        for trail, _ in trails:
            trail.enter(self)
        try:
            return original(self, *args, **kwargs)
        finally:
            for trail, depth in trails:
                trail.leave(depth)

    return call
