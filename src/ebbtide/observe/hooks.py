"""Our saved-tensor hooks on autograd's stack.

NOTE [Transforms]
The transforms of `torch.func` refuse to run where saved-tensor hooks are on: what is saved within them must not go
through any. They say so by disabling hooks, which fails if some are on the stack, and enable them in the end. Ours step
aside for as long as that lasts, so that such code runs in a step as it does without one; what it saves stays where it
is. Where hooks of the user's are on, they refuse, as ever.

NOTE [Children]
A process that is forked within a step, as a worker of a data loader that is started there, has the hooks of its parent,
but neither the threads nor the file that move tensors. Its own passes run as in any other child: ours go off the stack,
unless the user's lie above them, as do our dispatch modes (`drop_modes`), which would write down what it does for as
long as it lives. What the parent has saved shows itself if it is here, and raises `SpillError` if not.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ebbtide.observe.cross_entropy import stand_in_for_cross_entropy
from ebbtide.observe.leaves import show_leaves

_autograd: Any = torch._C._autograd
_disable, _enable = _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable
Pack = Callable[[torch.Tensor], Any]
Show = Callable[[Any], torch.Tensor]


class _Ours(threading.local):
    """This thread's hooks.

    Attributes:
        on: those on the stack, the latest one last.
        aside: those that have stepped aside, in the order in which they did.
    """

    def __init__(self) -> None:
        self.on: list[tuple[Pack, Show]] = []
        self.aside: list[tuple[Pack, Show]] = []


_ours = _Ours()


def disabled() -> str | None:
    """Why no hooks can be pushed now, if so."""
    reason: str | None = _autograd._saved_tensors_hooks_get_disabled_error_message()
    return reason


def any_on() -> bool:
    """Whether any hooks are on, ours or the user's."""
    return _autograd._top_saved_tensors_default_hooks(True) is not None


def push_hooks(pack: Pack, unpack: Show) -> None:
    """From now on autograd saves through these hooks. Raises `RuntimeError` where hooks are `disabled`."""
    show_leaves()
    stand_in_for_cross_entropy()
    _ours.on.append((pack, unpack))  # first, so that they are known wherever an interrupt comes
    _autograd._push_saved_tensors_default_hooks(pack, unpack)
    _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable = _step_aside, _come_back


def pop_hooks() -> None:
    """Undo the latest `push_hooks`."""
    del _ours.on[-1:]  # a thread of autograd has hooks that it has not pushed
    _autograd._pop_saved_tensors_default_hooks()


def take_off(pack: Pack, unpack: Show) -> None:
    """Undo `push_hooks` of these, as far as that was done; the user's may lie above them.

    They may be on though they were taken off before: autograd puts back, behind each node, what was on when that began.
    """
    above = []
    while (top := _autograd._top_saved_tensors_default_hooks(True)) not in (None, (pack, unpack)):
        above.append(top)
        _autograd._pop_saved_tensors_default_hooks()
    if top is not None:
        _autograd._pop_saved_tensors_default_hooks()
    for pair in reversed(above):
        _autograd._push_saved_tensors_default_hooks(*pair)
    _ours.on[:] = [pair for pair in _ours.on if pair != (pack, unpack)]


@contextmanager
def hooks_on(pack: Pack, unpack: Show) -> Iterator[None]:
    """A context in which autograd saves through these hooks. Raises as `push_hooks`."""
    try:
        push_hooks(pack, unpack)
        yield
    finally:
        take_off(pack, unpack)


def _step_aside(message: str, fail_if_non_empty: bool = True) -> None:
    """Disable hooks; those of ours at the top of the stack are taken off: see NOTE [Transforms]."""
    while fail_if_non_empty and _ours.on and _autograd._top_saved_tensors_default_hooks(True) == _ours.on[-1]:
        _ours.aside.append(_ours.on[-1])
        pop_hooks()
    _disable(message, fail_if_non_empty)


def _come_back() -> None:
    """Enable hooks, and put ours back on."""
    _enable()
    while _ours.aside:
        push_hooks(*_ours.aside.pop())


def drop_hooks() -> None:
    """Take ours off the stack in a child of a step, as far as they are on it. See NOTE [Children]."""
    while _autograd._top_saved_tensors_default_hooks(True) in _ours.on:
        _autograd._pop_saved_tensors_default_hooks()  # still in `on`: behind a backward pass there is another stack
    _ours.aside.clear()


os.register_at_fork(after_in_child=drop_hooks)
