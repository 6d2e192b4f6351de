"""Which module of the user's model is running, by name, without being told what the model is."""

from __future__ import annotations

import weakref
from typing import Any

import torch
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

from ebbtide.observe.uncompiled import warn_if_compiled


class ModuleTrail:
    """Follows the modules being called, through PyTorch's global module hooks.

    The path starts with the class name of the outermost module: ``ResNet.body.3.conv1``.
    """

    def __init__(self) -> None:
        self._stack: list[tuple[torch.nn.Module, str]] = []
        self._names: weakref.WeakKeyDictionary[torch.nn.Module, dict[int, str]] = weakref.WeakKeyDictionary()
        self._hooks: list[Any] = []

    @property
    def path(self) -> str:
        """Path of the innermost module that is running, or an empty string."""
        return self._stack[-1][1] if self._stack else ""

    def start(self) -> None:
        """Begin to follow."""
        self._hooks = [
            register_module_forward_pre_hook(self._enter),
            register_module_forward_hook(self._leave, always_call=True),
        ]

    def stop(self) -> None:
        """Stop following and take the hooks out."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        self._stack.clear()

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        warn_if_compiled(module)
        if not self._stack:
            path = type(module).__name__
        else:
            parent, parent_path = self._stack[-1]
            path = f"{parent_path}.{self._name_within(parent, module)}"
        self._stack.append((module, path))

    def _name_within(self, parent: torch.nn.Module, module: torch.nn.Module) -> str:
        names = self._names.get(parent)
        if names is None:
            names = {id(child): name for name, child in parent.named_modules() if name}
            self._names[parent] = names
        return names.get(id(module), type(module).__name__)

    def _leave(self, module: torch.nn.Module, *_: Any) -> None:
        # A module that raised may have left its children on the stack.
        while self._stack:
            if self._stack.pop()[0] is module:
                break
