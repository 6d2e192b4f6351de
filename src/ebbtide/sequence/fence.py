"""Where the gradients of a scan's step stop: at tensors from outside, whatever those were computed from."""

from __future__ import annotations

import contextlib
import functools
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from torch import Tensor
from torch.autograd.function import BackwardCFunction
from torch.autograd.graph import Node

_Hooks = dict[int, Any]
"""A tensor's, by number."""


class Fence:
    """Stands around the graphs of steps that a thread is reversing, of one scan or of several, one within the other.

    While it is up (enter it for that), gradients stop at tensors from outside, and the users' hooks on these do not
    run. Where one is computed from another, the engine would go on from the one to the other: hooks take what it wants
    to bring there. And hooks are for the whole gradient: they run when that has been summed up.

    It is up only while the engine takes back a step's graph, not while a cell runs: the cell may take gradients of its
    own, in which hooks have their say, and which may go through what was computed outside.
    """

    def __init__(self) -> None:
        self._is_up = False
        self._nodes: set[Node] = set()  # behind the tensors outside of all those scans
        self._hooks: dict[int, _Hooks] = {}  # of these tensors, by id
        self._taken: list[tuple[_Hooks, _Hooks]] = []  # while it is up: those, empty, and what was in them

    def __enter__(self) -> None:
        self._is_up = True
        for hooks in self._hooks.values():  # this runs for each step
            self._taken.append((hooks, dict(hooks)))
            hooks.clear()

    def __exit__(self, *_: object) -> None:
        self._is_up = False
        while self._taken:  # also what an interrupted call of this has left
            hooks, taken = self._taken[-1]
            hooks.update(taken)
            self._taken.pop()

    def silence(self, tensors: Iterable[Tensor]) -> None:
        """Hooks on these do not run either while it is up."""
        for tensor in tensors:
            if tensor._backward_hooks:
                self._hooks.setdefault(id(tensor._backward_hooks), tensor._backward_hooks)

    @contextlib.contextmanager
    def around(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Inside, these are outside, too. It is down, also where it was up, as for a scan within a cell."""
        nodes = {tensor.grad_fn for tensor in tensors if tensor.grad_fn is not None}
        retained = [(tensor, tensor.grad) for tensor in tensors if tensor.retains_grad]
        with contextlib.ExitStack() as stack:  # what an interrupt leaves of it would give wrong gradients from then on
            if self._is_up:
                stack.callback(self.__enter__)
            stack.callback(self._forget_hooks, len(self._hooks))
            stack.callback(self.__exit__)
            self.__exit__()
            self.silence(tensors)
            for node in nodes:
                stack.callback(node.register_prehook(self._stop).remove)
            behind = _nodes_behind(nodes, self._nodes)
            stack.callback(self._nodes.difference_update, behind)
            self._nodes |= behind
            for function in filter(_is_called, behind):
                stack.callback(_call_again, function)
                self._skip(function)
            for tensor, grad in retained:
                stack.callback(setattr, tensor, "grad", grad)
            yield

    def _forget_hooks(self, known: int) -> None:
        while len(self._hooks) > known:
            self._hooks.popitem()

    def _stop(self, grads: Sequence[Tensor | None]) -> tuple[None, ...] | None:
        """A node's hook before it runs."""
        return (None,) * len(grads) if self._is_up else None

    def _skip(self, function: Any) -> None:
        """Do not let a custom function be called while it is up.

        It would be given zeros for none, and may make something of them.
        """
        nothing = (None,) * len(function.needs_input_grad)
        for name in ("apply", "apply_boxed"):
            setattr(function, name, functools.partial(self._call, getattr(function, name), nothing))

    def _call(self, apply: Callable[..., Any], nothing: tuple[None, ...], *grads: Any) -> Any:
        return nothing if self._is_up else apply(*grads)


class _Here(threading.local):
    """This thread's."""

    def __init__(self) -> None:
        self.fence = Fence()


_here = _Here()


def fence_here() -> Fence:
    """The one around all graphs of steps that this thread is reversing."""
    return _here.fence


def _call_again(function: Any) -> None:
    """Let a custom function be called by the engine once more."""
    for name in ("apply", "apply_boxed"):
        vars(function).pop(name, None)


def _is_called(node: Any) -> bool:
    """Whether it is a custom function that the engine calls, as no scan has fenced it."""
    return issubclass(type(node), BackwardCFunction) and "apply" not in vars(node)


def _nodes_behind(nodes: set[Node], known: set[Node]) -> set[Node]:
    """``nodes`` and all that these were computed from, without what is ``known``, of which all behind it is, too."""
    seen = nodes - known
    left = list(seen)
    while left:
        for node, _ in left.pop().next_functions:
            if node is not None and node not in seen and node not in known:
                seen.add(node)
                left.append(node)
    return seen
