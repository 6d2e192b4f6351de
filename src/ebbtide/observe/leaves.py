"""Gives custom Functions the leaves that they have saved, as they get them without hooks.

Where a saved tensor needs a gradient, autograd makes a new tensor of what comes out of the hooks. If a parameter was
saved, the new tensor has none of its attributes, and a `grad` of its own: a Function that itself adds to its weight's
gradient, or to Megatron's ``main_grad``, would do so in vain, or fail. But the node that accumulates the gradient is
still the parameter's, and knows the parameter.
"""

from __future__ import annotations

import functools
from typing import Any

import torch

from ebbtide.observe.ledger import has_storage
from ebbtide.observe.passes import keeps_graph

_Context: Any = vars(torch.autograd.function)["BackwardCFunction"]
"""What is below the contexts of all custom Functions."""


@functools.cache
def show_leaves() -> None:
    """From now on ``ctx.saved_tensors`` has leaves themselves where they were saved, whatever hooks show of them."""
    saved: Any = torch._C._FunctionBase.saved_tensors

    def shown(context: Any) -> tuple[torch.Tensor | None, ...]:
        found = tuple([_itself(tensor) for tensor in saved.__get__(context)])
        if _is_asked_again() and any(tensor is not None for tensor in found):
            _copy_what_is_given_out(context, found)
        return found

    _Context.saved_tensors = property(shown)


def _is_asked_again() -> bool:
    """Whether a backward pass is under way that keeps the graph it goes through, and makes none of its own."""
    return keeps_graph() and not torch.is_grad_enabled()


def _copy_what_is_given_out(node: Any, shown: tuple[torch.Tensor | None, ...]) -> None:
    """Let the gradients that a Function returns be copies where they show what it has saved.

    A leaf takes a gradient that nobody else refers to as its own, and later passes add to it in place. Without hooks,
    the graph refers to what it has saved for as long as it is kept; to what hooks show, nobody does.
    """
    storages = {tensor.untyped_storage()._cdata for tensor in shown if tensor is not None and has_storage(tensor)}

    def returned(gradients: tuple[torch.Tensor | None, ...], _: Any) -> tuple[torch.Tensor | None, ...]:
        handle.remove()
        return tuple([_apart_from(storages, tensor) for tensor in gradients])

    handle = node.register_hook(returned)


def _apart_from(storages: set[int], tensor: torch.Tensor | None) -> torch.Tensor | None:
    """``tensor``, or a copy if it shows one of ``storages``."""
    shows_one = tensor is not None and has_storage(tensor) and tensor.untyped_storage()._cdata in storages
    return tensor.clone() if tensor is not None and shows_one else tensor


def _itself(shown: torch.Tensor | None) -> torch.Tensor | None:
    """The leaf that was saved, if ``shown`` was made of one; else ``shown``."""
    if type(shown) is not torch.Tensor or not (shown.requires_grad and shown.is_leaf and has_storage(shown)):
        return shown
    # A view is made only for its node: no mode may see that, and grad is on because a view has no node without it.
    with torch.inference_mode(False), torch.enable_grad(), torch._C._DisableTorchDispatch():
        node: Any = shown.view_as(shown).grad_fn
    if node is None:  # an inference tensor
        return shown
    leaf: torch.Tensor = node.next_functions[0][0].variable
    is_same = leaf.untyped_storage()._cdata == shown.untyped_storage()._cdata  # not what other hooks put in its place
    return leaf if is_same else shown
