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

_Context: Any = vars(torch.autograd.function)["BackwardCFunction"]
"""What is below the contexts of all custom Functions."""


@functools.cache
def show_leaves() -> None:
    """From now on ``ctx.saved_tensors`` has leaves themselves where they were saved, whatever hooks show of them."""
    saved: Any = torch._C._FunctionBase.saved_tensors

    def shown(context: Any) -> tuple[torch.Tensor | None, ...]:
        return tuple([_itself(tensor) for tensor in saved.__get__(context)])

    _Context.saved_tensors = property(shown)


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
