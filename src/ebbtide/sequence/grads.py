"""`.grad` of tensors outside, where a cell runs backward passes of its own.

The first such pass puts a tensor there, if there is none, and others add to it, in place: then it is written to as any
other tensor is (see NOTE [What a cell writes to] in `surroundings.py`). So one is put there before the first step; it
is of -0.0, as that plus a number is that number, also if it is 0.0. A cell that begins with `zero_grad` leaves another
tensor in each step, which no other step needs: only the last one is put back when steps have run again.
"""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Collection, Iterator, Sequence

import torch
from torch import Tensor
from torch.autograd.graph import Node

from ebbtide.errors import SequenceError
from ebbtide.observe.leaves import LEAF_NODE
from ebbtide.observe.ledger import has_storage
from ebbtide.observe.mode import unseen

Grads = tuple[tuple[weakref.ref[Tensor], Tensor | None], ...]
"""Tensors, each with what must be its `.grad` when steps run again; None where that does not matter."""


@dataclasses.dataclass(frozen=True, slots=True)
class Replaced:
    """A tensor in whose `.grad` a step has left another one than it found.

    Attributes:
        tensor: it.
        before: what was there.
        given: that, or one of -0.0 like the one that the step has left; None if that is sparse, or nothing.
    """

    tensor: Tensor
    before: Tensor | None
    given: Tensor | None


class SeenGrads:
    """Sees what a cell does to `.grad` of tensors outside.

    Attributes:
        replaced: where it has left another one; after `put_back`.
    """

    def __init__(self) -> None:
        self.replaced: list[Replaced] = []
        self._around = torch._C._current_graph_task_id()  # a backward pass in which the cell runs
        self._before: dict[int, tuple[Tensor, Tensor | None]] = {}  # by id
        self._nodes: set[Node] = set()
        self._left: list[Node] = []  # of those, whose next ones have not been looked at

    def see(self, tensor: Tensor) -> None:
        """The cell uses ``tensor`` from outside."""
        if tensor.requires_grad:
            self._note(tensor)
            self._follow(tensor.grad_fn)

    def look_behind(self) -> None:
        """Before an op: if it is one of a backward pass, that may go on to what was computed outside."""
        if not self._left or torch._C._current_graph_task_id() in (-1, self._around):
            return
        while self._left:
            for node, _ in self._left.pop().next_functions:
                if type(node) is LEAF_NODE:
                    self._note(node.variable)  # type: ignore[attr-defined]
                else:
                    self._follow(node)

    def _note(self, tensor: Tensor) -> None:
        if (tensor.is_leaf or tensor.retains_grad) and id(tensor) not in self._before:
            self._before[id(tensor)] = tensor, tensor.grad

    def _follow(self, node: Node | None) -> None:
        if node is not None and node not in self._nodes:
            self._nodes.add(node)
            self._left.append(node)

    def put_back(self) -> None:
        """Let all have the `.grad` that they had."""
        for tensor, before in self._before.values():
            left = tensor.grad
            if left is not before:
                with torch.no_grad(), unseen():
                    zero = torch.zeros_like(left).neg_() if left is not None and has_storage(left) else None
                self.replaced.append(Replaced(tensor, before, zero if before is None else before))
                tensor.grad = before

    def written(self, storages: Collection[int]) -> Grads:
        """Those whose `.grad` lies in these storages, which are written to."""
        there = ((tensor, grad) for tensor, grad in self._before.values() if grad is not None and has_storage(grad))
        return tuple((weakref.ref(tensor), grad) for tensor, grad in there if grad.untyped_storage()._cdata in storages)


@contextlib.contextmanager
def given(replaced: Sequence[Replaced]) -> Iterator[None]:
    """Give each its `given`; if a fault comes inside, they have what they had before."""
    try:
        for one in replaced:
            one.tensor.grad = one.given
        yield
    except BaseException:
        for one in replaced:
            one.tensor.grad = one.before
        raise


@contextlib.contextmanager
def preserved(grads: Grads) -> Iterator[None]:
    """Inside, these are there; after it, `.grad` of the tensors is what it was."""
    there = [(tensor, tensor.grad, grad) for reference, grad in grads if (tensor := reference()) is not None]
    try:
        for tensor, before, grad in there:
            if grad is not None and before is not grad:
                tensor.grad = grad
        yield
    finally:
        for tensor, before, _ in there:
            tensor.grad = before


def refuse_sum(tensor: Tensor) -> SequenceError:
    """What a scan raises whose cell puts a sum with what it finds in `.grad` there, as another tensor."""
    return SequenceError(
        f"a backward pass of the cell's own leaves in .grad of a tensor outside of shape {tuple(tensor.shape)} another "
        "tensor than it finds there, which steps that run again would add to: give it a zero .grad before the scan, "
        "and let the cell add to that in place, or clear it first; with create_graph=True, for a sparse gradient and "
        "for tensors that retain their gradient, take torch.autograd.grad and return what it gives"
    )
