"""Nodes of autograd that ask whether a dispatch mode is on, and compute by another formula if so.

NOTE [Nodes that ask]
PyTorch has two formulas for some gradients, one of them for tensor subclasses. While a dispatch mode is on, it uses
that one for all tensors. The results differ in their last bits, or in the signs of zeros. The nodes that ask are those
of all operators of which PyTorch's own samples show a difference in first derivatives.

So that a step in which a mode of ours is on computes what it would without one, these nodes must not find the mode: the
dispatch key that leads to modes is excluded while they run. Autograd puts its keys back after each node, whether it
fails or not. What a node calls then is not seen: the node is taken for one op, with what it was given and what it has
made. Two kinds of passes use the other formula still: those in which a mode of the user's is on, as they do without
us; and those that make a graph, because what a node makes there has to be seen if the node saves it. Nodes of
`masked_fill` save only what they were given, and are hidden in such passes, too.

A node asks for what it has saved as it runs, and hooks may run ops to give it that. Recipes of ours show these ops to
modes (`shown`), and so does a checkpoint that is not reentrant, which computes all of its region again there.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch
import torch.utils.checkpoint

from ebbtide.observe.mode import DispatchMode, modes_on
from ebbtide.observe.passes import tell_of_next_pass

_aten = torch.ops.aten
_WITH_NODES_THAT_ASK = frozenset(
    {
        _aten.prod.default,
        _aten.prod.dim_int,
        _aten.masked_fill.Tensor,
        _aten.masked_fill_.Tensor,
        _aten.max.default,
        _aten.min.default,
        _aten.median.default,
        _aten.nanmedian.default,
    }
)
_NODES_THAT_ASK = ("Prod", "MaskedFill", "Max", "Min", "Median", "Nanmedian")
"""How their names begin. What was written through a view has the node of the view."""
_SAVE_WHAT_IS_GIVEN = "MaskedFill"
_Frame: Any = vars(torch.utils.checkpoint)["_CheckpointFrame"]
"""What a checkpoint that is not reentrant knows of one call of its region."""

_NOTHING_TO_DO: contextlib.AbstractContextManager[None] = contextlib.nullcontext()


def shown() -> contextlib.AbstractContextManager[None]:
    """A context of which modes see the ops, though it be within a node that asks: a hook may run ops there."""
    # To ask for the key by its name would take four times as long.
    is_hidden = torch._C._dispatch_tls_local_exclude_set().has(torch._C.DispatchKey.Python)
    return _show() if is_hidden else _NOTHING_TO_DO


@contextlib.contextmanager
def _show() -> Iterator[None]:
    torch._C._dispatch_tls_set_dispatch_key_excluded("Python", False)
    try:
        yield
    finally:
        torch._C._dispatch_tls_set_dispatch_key_excluded("Python", True)


@functools.cache
def _show_checkpoints() -> None:
    """From now on checkpoints show modes what they compute again. See NOTE [Nodes that ask]."""
    make = _Frame.__init__

    @functools.wraps(make)
    def make_shown(frame: Any, recompute: Callable[..., None], *rest: Any, **named: Any) -> None:
        def recompute_shown(*args: Any) -> None:
            with shown():
                recompute(*args)

        make(frame, recompute_shown, *rest, **named)

    _Frame.__init__ = make_shown


def is_node_that_asks(name: str) -> bool:
    """Whether this is the name of a node that asks, or of the op that it is taken for."""
    return name.startswith(_NODES_THAT_ASK)


class NodeWatcher(Protocol):
    """Sees ops, and wants to know of nodes that ask what it cannot see."""

    def node_begins(self) -> None:
        """A node runs; what it calls is not shown to anyone."""
        ...

    def node_ended(self, name: str, given: Sequence[Any], made: Sequence[Any]) -> None:
        """It has run: its name, the gradients it was given, those it has made; None where there is none."""
        ...


class AskingNodes:
    """Finds the nodes that ask of the ops that its owner, a mode, sees. It does not keep its owner alive."""

    def __init__(self, owner: NodeWatcher) -> None:
        _show_checkpoints()
        self._owner = weakref.ref(owner)
        self._results: list[torch.Tensor] = []

    def made(self, func: Any, result: Any) -> None:
        """``func`` was run and returned ``result``, which gets its node only after it was shown to all modes."""
        if func in _WITH_NODES_THAT_ASK and torch.is_grad_enabled():
            self._results.append(result)
            tell_of_next_pass(self.follow)  # it may begin with the node of what was made last

    def follow(self) -> None:
        """Something else comes: hide modes from the nodes of what was made before, and let go of that."""
        if self._results:
            for result in self._results:
                node = result.grad_fn
                if node is not None and is_node_that_asks(node.name()):
                    hidden = _Hidden(self._owner, node.name())
                    node.register_prehook(hidden.begin)
                    node.register_hook(hidden.end)
            self._results.clear()

    def forget(self) -> None:
        """Nothing else comes: let go of what was made last."""
        self._results.clear()


class _Hidden:
    """Hides modes from one node, whenever that runs."""

    def __init__(self, owner: weakref.ref[NodeWatcher], name: str) -> None:
        self._owner = owner
        self._name = name
        self._is_on = False

    def begin(self, given: Sequence[Any]) -> None:
        """The node is to run, with these gradients or None: its pre-hook."""
        del given
        stack: list[object] = [*modes_on()]
        owner = self._owner()
        ours = owner in stack and all(isinstance(mode, DispatchMode) for mode in stack)
        self._is_on = ours and (self._name.startswith(_SAVE_WHAT_IS_GIVEN) or not torch.is_grad_enabled())
        if self._is_on and owner is not None:
            owner.node_begins()
            torch._C._dispatch_tls_set_dispatch_key_excluded("Python", True)

    def end(self, made: Sequence[Any], given: Sequence[Any]) -> None:
        """It has run: its hook."""
        owner = self._owner()
        if self._is_on and owner is not None:
            torch._C._dispatch_tls_set_dispatch_key_excluded("Python", False)
            owner.node_ended(self._name, given, made)
