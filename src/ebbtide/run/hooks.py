"""Saved-tensor hooks on autograd's stack, and what is left of them where a budget does not bind.

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

import math
import os
import threading
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.observe.ledger import has_storage, sizes
from ebbtide.observe.mode import drop_modes, our_modes
from ebbtide.observe.smoothing import weigh_as_ever
from ebbtide.observe.uncompiled import never_compiled
from ebbtide.observe.wrapped import inside
from ebbtide.run.holdings import keep
from ebbtide.run.leaves import show_leaves
from ebbtide.run.passes import tell_no_more, tell_of_passes
from ebbtide.run.wrapped import Handle, wrap_like
from ebbtide.step import Saved

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


def push_hooks(pack: Pack, unpack: Show) -> None:
    """From now on autograd saves through these hooks. Raises `RuntimeError` where hooks are `disabled`."""
    show_leaves()
    weigh_as_ever()
    _autograd._push_saved_tensors_default_hooks(pack, unpack)
    _ours.on.append((pack, unpack))
    _autograd._saved_tensors_hooks_disable, _autograd._saved_tensors_hooks_enable = _step_aside, _come_back


def pop_hooks() -> None:
    """Undo the latest `push_hooks`."""
    del _ours.on[-1:]  # a thread of autograd has hooks that it has not pushed
    _autograd._pop_saved_tensors_default_hooks()


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


def go_late() -> None:
    """Take the hooks off that are being called: their step was left in another thread, which could take nothing off
    here. Its modes, which see nothing any more, go before this thread's next backward pass: an op may be under way."""
    pop_hooks()
    modes = our_modes()

    def modes_go() -> None:
        drop_modes(modes)
        tell_no_more(modes_go)

    tell_of_passes(modes_go)


class LightWatch:
    """Watches a step whose budget does not bind: looks at the first saved tensor, then takes its hooks out.

    Args:
        first: what was saved first when such a step was observed; None if nothing was.

    Attributes:
        watching: whether its hooks are still on the stack.
        left: why the step is of another kind, or an empty string.
    """

    def __init__(self, first: Saved | None) -> None:
        self.watching = True
        self.left = ""
        self._first = first

    @never_compiled
    def pack(self, tensor: torch.Tensor) -> Handle:
        """The pack hook."""
        self.watching = False
        pop_hooks()
        first, inner = self._first, inside(tensor)
        shape, most = sizes(inner), math.prod(first.shape) if first is not None else 0
        if first is None or len(shape) != len(first.shape) or (has_storage(inner) and inner.numel() > most):
            self.left = f"the first saved tensor is {list(shape)}, expected {first.shape if first else 'none'}"
        return wrap_like(tensor, inner, keep(inner, -1))

    @never_compiled
    def unpack(self, handle: Handle) -> torch.Tensor:
        """The unpack hook."""
        return handle.show()


def forget_failed_backward() -> None:
    """Let go of what was ready to run when a backward pass failed: autograd keeps it until this thread's next one."""
    with torch.inference_mode(False), torch.enable_grad():
        torch.zeros((), device="cpu", requires_grad=True).clone().backward()
