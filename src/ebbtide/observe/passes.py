"""Tells when a backward pass begins, from Python: the last moment at which a mode can be taken off for all of it.

Autograd notes which modes are on as a pass begins, and has exactly these on at each of the pass's nodes. Modes are
usually taken off at a save. One that is not wanted in the pass is taken off now, if no save has come since it was
wanted.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.step import Phase

Tell = Callable[[], None]


class _Told(threading.local):
    """Who is told of this thread's passes."""

    def __init__(self) -> None:
        self.each: list[Tell] = []
        self.next: list[Tell] = []


_told = _Told()
_stands_between = False


def tell_of_passes(tell: Tell) -> None:
    """From now on call ``tell`` before each backward pass that this thread begins."""
    _stand_between()
    _told.each.append(tell)


def tell_no_more(tell: Tell) -> None:
    """Undo `tell_of_passes`, if it was done."""
    _told.each = [other for other in _told.each if other != tell]


def tell_of_next_pass(tell: Tell) -> None:
    """Call ``tell``, once, before the next backward pass that this thread begins, be it within another."""
    _stand_between()
    if tell not in _told.next:
        _told.next.append(tell)


def in_pass() -> bool:
    """Whether a backward pass is under way in this thread."""
    return torch._C._current_graph_task_id() >= 0


def phase_now() -> Phase:
    """In which part of its step this thread is."""
    return "backward" if in_pass() else "forward"


def keeps_graph() -> bool:
    """Whether the backward pass that is under way in this thread, if any, keeps the graph that it goes through."""
    return in_pass() and bool(torch._C._autograd._get_current_graph_task_keep_graph())


def _stand_between() -> None:
    """Stand between `torch.autograd` and its engine, where that is called from one place; else nobody is told."""
    global _stands_between
    original: Any = vars(torch.autograd).get("_engine_run_backward")
    if _stands_between or original is None:
        return

    @functools.wraps(original)
    def run(*args: Any, **kwargs: Any) -> Any:
        while _told.next:
            _told.next.pop()()
        if not in_pass():
            for tell in _told.each:
                tell()
        return original(*args, **kwargs)

    vars(torch.autograd)["_engine_run_backward"] = run
    _stands_between = True
