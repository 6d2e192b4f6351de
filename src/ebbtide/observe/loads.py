"""Tells of memory that no op makes: what a budget takes for what it loads back, and a scan for states."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

import torch

from ebbtide.observe.mode import modes_on


class LoadWatcher(Protocol):
    """A mode that wants to know of loads."""

    def note_load(self, memory: torch.UntypedStorage, tier: object, is_on: bool, /) -> None:
        """There is ``memory`` for a load from ``tier``; ``is_on``: whether the mode is on in the thread that loads, as
        it is where one budget's step is within another's, so that it sees the ops of both."""
        ...


_watchers: list[LoadWatcher] = []


def watch_loads(watcher: LoadWatcher) -> None:
    """Tell ``watcher`` of all loads, in whatever thread, until `unwatch_loads`."""
    _watchers.append(watcher)


def unwatch_loads(watcher: LoadWatcher) -> None:
    """Tell ``watcher`` no more."""
    _watchers[:] = [other for other in _watchers if other is not watcher]


def note_memory(memory: torch.UntypedStorage, tier: object) -> None:
    """Tell all who watch of ``memory`` for a load from ``tier``."""
    if _watchers:
        on: list[object] = [*modes_on()]
        for watcher in _watchers[:]:
            watcher.note_load(memory, tier, watcher in on)


def note_states(storages: Iterable[torch.UntypedStorage]) -> None:
    """Tell all who watch of memory for states, from no tier; again and again does no harm."""
    if _watchers:
        for memory in storages:
            note_memory(memory, None)
