"""The modules that a cell can reach, also those that its first step does not call."""

from __future__ import annotations

import functools
import gc
import types
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import torch
from torch.nn import Module

_PLAIN = frozenset({type(None), bool, int, float, complex, str, bytes, torch.Tensor, torch.nn.Parameter, np.ndarray})
_NOT_LOOKED_INTO = (torch.Tensor, np.ndarray, type, types.ModuleType, types.CodeType, types.FrameType)
_LOOKED_THROUGH = frozenset(
    {tuple, list, dict, set, frozenset, types.FunctionType, types.MethodType, types.CellType, functools.partial}
)
_LEVELS = 2
"""Attributes are followed this many levels deep: those of objects, and theirs."""
_ITEMS = 500
"""This many items of each list are looked at: a longer one has data."""
_OBJECTS = 2_000
"""This many objects are looked into, nearest first, which takes a millisecond at most."""


def reached_modules(roots: Iterable[object]) -> list[Module]:
    """Modules that ``roots`` are or hold, and all that are registered within these; each once.

    What is looked into: items of lists, tuples, sets and dicts, attributes of objects, methods and partials, and of
    functions the closure, the defaults and the global variables that they name. No code of any of these runs.
    """
    found: dict[int, Module] = {}
    left: list[tuple[Any, int]] = [(root, 0) for root in roots]
    most, seen = len(left) + _OBJECTS, set[int]()
    for one, level in left:  # it grows meanwhile, and holds all that was seen, so that no other has its id
        kind = type(one)
        if kind in _PLAIN or id(one) in seen or issubclass(kind, _NOT_LOOKED_INTO):
            continue
        if issubclass(kind, Module):  # `isinstance` may run code of what stands for another object
            _add(one, found)
        elif len(left) < most and (kind in _LOOKED_THROUGH or level < _LEVELS):
            seen.add(id(one))
            following = level if kind in _LOOKED_THROUGH else level + 1
            left += [(part, following) for part in _held_by(one, kind)]
    return list(found.values())


def _add(root: Module, found: dict[int, Module]) -> None:
    """Add ``root`` and the modules registered within it to ``found``, by their ids."""
    left: list[Module | None] = [root]
    while left:
        module = left.pop()
        if module is not None and id(module) not in found:
            found[id(module)] = module
            if parts := module.__dict__.get("_modules"):
                left += parts.values()


def _held_by(one: Any, kind: type) -> list[Any]:
    """The objects that ``one`` of this kind holds. Of functions in global variables, only those of the same file."""
    if kind is list or kind is tuple:
        return list(one[:_ITEMS])
    if kind is not types.FunctionType:
        return gc.get_referents(one)[:_ITEMS]
    known = one.__globals__
    named = [known[name] for name in _names(one.__code__) if name in known]
    near = [part for part in named if type(part) is not types.FunctionType or part.__globals__ is known]
    return [*(one.__closure__ or ()), one.__defaults__, one.__kwdefaults__, vars(one), *near]


def _names(code: types.CodeType) -> Iterator[str]:
    """Those that ``code`` and functions within it ask for, of global variables and of attributes."""
    yield from code.co_names
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _names(constant)
