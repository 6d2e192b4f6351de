"""Gives custom Functions the leaves that they have saved, as they get them without hooks.

Where a saved tensor needs a gradient, autograd makes a new tensor of what comes out of the hooks. If a parameter was
saved, the new tensor has none of its attributes, and a `grad` of its own: a Function that itself adds to its weight's
gradient, or to Megatron's ``main_grad``, would do so in vain, or fail. But the node that accumulates the gradient is
still the parameter's, and knows the parameter.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor

from ebbtide.observe.ledger import has_storage
from ebbtide.observe.mode import unseen
from ebbtide.observe.passes import in_pass, keeps_graph
from ebbtide.observe.wrapped import AsOrdinary

LEAF_NODE: type[torch.autograd.graph.Node] = vars(torch._C)["_functions"].AccumulateGrad
"""What accumulates the gradient of a leaf."""
_PASSING_ON = {"AddBackward0", "SubBackward0", "CloneBackward0", "ToCopyBackward0", "AliasBackward0"}
"""Nodes that may give on the very tensor that they are given."""
_Context: Any = vars(torch.autograd.function)["BackwardCFunction"]
"""What is below the contexts of all custom Functions."""


@functools.cache
def show_leaves() -> None:
    """From now on ``ctx.saved_tensors`` has leaves themselves where they were saved, whatever hooks show of them."""
    saved: Any = torch._C._FunctionBase.saved_tensors

    def shown(context: Any) -> tuple[torch.Tensor | None, ...]:
        found = tuple([_itself(tensor) for tensor in saved.__get__(context)])
        # What a pass that makes a graph brings to leaves is theirs by a sum.
        if in_pass() and not torch.is_grad_enabled() and any(tensor is not None for tensor in found):
            _copy_what_is_given_out(context, found, to_all=keeps_graph())
        return found

    _Context.saved_tensors = property(shown)


def _copy_what_is_given_out(node: Any, shown: tuple[torch.Tensor | None, ...], *, to_all: bool) -> None:
    """Let the gradients that a Function returns be copies where they show what it has saved: those that come to leaves
    as they are, or, where the graph is kept, ``to_all``.

    A leaf takes a gradient that nobody else refers to as its own, and may be added to in place. Without hooks, others
    who have saved or kept the same tensor refer to it, and the graph does for as long as it is kept; to what hooks
    show, nobody does.
    """
    are_taken = [to_all or _comes_to_leaf(taker) for taker, _ in node.next_functions]
    if not any(are_taken):
        return
    with AsOrdinary():
        # What the Function lets go of may be gone by then, and its address another one's.
        storages = [weakref.ref(one.untyped_storage()) for one in shown if one is not None and has_storage(one)]

    def returned(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
        handle.remove()
        pairs = zip(gradients, are_taken, strict=True)
        return tuple([_apart_from(storages, tensor) if is_taken else tensor for tensor, is_taken in pairs])

    handle = node.register_hook(returned)


def _comes_to_leaf(taker: Any) -> bool:
    """Whether a leaf takes what is given to ``taker``, or that passes it on to one."""
    left = [taker]
    while left:
        taker = left.pop()
        if type(taker) is LEAF_NODE:
            return True
        if taker is not None and taker.name() in _PASSING_ON:
            left += (node for node, _ in taker.next_functions)
    return False


def _apart_from(
    storages: Sequence[weakref.ref[torch.UntypedStorage]], tensor: torch.Tensor | None
) -> torch.Tensor | None:
    """``tensor``, or a copy if it shows one of ``storages``."""
    with AsOrdinary():
        shown = weakref.ref(tensor.untyped_storage()) if tensor is not None and has_storage(tensor) else None
    shows_one = shown is not None and any(shown is one for one in storages)  # of one object they are one
    return tensor.clone() if tensor is not None and shows_one else tensor


def _itself(shown: torch.Tensor | None) -> torch.Tensor | None:
    """The leaf that was saved, if ``shown`` was made of one; else ``shown``."""
    stands_for_one = type(shown) is torch.Tensor or isinstance(shown, FakeTensor)
    if shown is None or not (stands_for_one and shown.requires_grad and shown.is_leaf and has_storage(shown)):
        return shown
    # A view is made only for its node: no mode may see that, and grad is on because a view has no node without it.
    with torch.inference_mode(False), torch.enable_grad(), unseen():
        node: Any = shown.view_as(shown).grad_fn
    if node is None:  # an inference tensor
        return shown
    leaf: torch.Tensor = node.next_functions[0][0].variable
    is_same = leaf.untyped_storage()._cdata == shown.untyped_storage()._cdata  # not what other hooks put in its place
    return leaf if is_same else shown
