"""`cross_entropy` with weights of classes and smoothed labels adds up the same numbers under a dispatch mode.

The loss is divided by the weights of all targets that are not ignored. PyTorch picks those weights and adds them up;
while any mode is on, it adds up zeros for the other targets as well, which rounds differently. A mode of ours may come
and go in the middle of the call, as autograd saves. So once a step has begun, we call the ops of the first way one by
one wherever PyTorch without us would go that way. If somebody has put another function in the place of `cross_entropy`,
that is left alone.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch
from torch.jit._builtins import _register_builtin

from ebbtide.observe.mode import DispatchMode, modes_on
from ebbtide.observe.wrapped import PLAIN_TYPES

_nn: Any = torch._C._nn  # its stubs lack most of it
_original: Any = _nn.cross_entropy_loss
_MEAN = 1
"""How PyTorch numbers this way to reduce a loss."""


def stand_in_for_cross_entropy() -> None:
    """From now on `torch.nn.functional.cross_entropy` computes as it does without a mode."""
    global _original
    found = _nn.cross_entropy_loss
    if not isinstance(found, types.BuiltinFunctionType):
        return
    _original = found
    _register_builtin(_cross_entropy, "aten::cross_entropy_loss")  # for `torch.jit.script`, which knows ops by function
    _nn.cross_entropy_loss = _cross_entropy


@functools.wraps(_original)
def _cross_entropy(
    scores: Any,
    target: Any,
    weight: Any = None,
    reduction: int = _MEAN,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Any:
    asks = weight is not None and reduction == _MEAN and 0 < label_smoothing <= 1 and scores.shape != target.shape
    if not asks or not all(map(_is_plain, (scores, target, weight))) or not _only_ours():
        return _original(scores, target, weight, reduction, ignore_index, label_smoothing)
    device = scores.device.type
    if not torch.is_autocast_enabled(device) or not _is_cast_whole(device):
        return _smoothed(scores, target, weight, ignore_index, label_smoothing)
    scores, weight = (each if each.dtype is torch.double else each.float() for each in (scores, weight))
    with torch.autocast(device, enabled=False):
        return _smoothed(scores, target, weight, ignore_index, label_smoothing)


@functools.cache
def _is_cast_whole(device: str) -> bool:
    """Whether autocast makes float numbers of all it is given, as on CPUs. Elsewhere it looks at each op of it."""
    name = "aten::cross_entropy_loss"
    return device == "cpu" and torch._C._dispatch_has_kernel_for_dispatch_key(name, "AutocastCPU")


def _smoothed(scores: Any, target: Any, weight: Any, ignore_index: int, label_smoothing: float) -> Any:
    classes = 0 if scores.dim() == 1 else 1
    logs = torch.log_softmax(scores, classes, dtype=scores.dtype)
    hard = _nn.nll_loss_nd(logs, target, weight, _MEAN, ignore_index)
    shape = [1] * logs.dim()
    shape[classes] = weight.shape[0]
    smooth = -(logs * weight.view(shape)).sum(classes)
    ignored = target == ignore_index
    smooth.masked_fill_(ignored, 0.0)
    total = weight.gather(0, target.masked_select(~ignored).flatten()).sum()
    return (1 - label_smoothing) * hard + smooth.sum() / total * (label_smoothing / logs.shape[classes])


def _is_plain(tensor: Any) -> bool:
    return type(tensor) in PLAIN_TYPES and not torch._C._functorch.is_functorch_wrapped_tensor(tensor)


def _only_ours() -> bool:
    """Whether no mode of the user's is on, with which PyTorch goes the other way anyway."""
    return all(isinstance(mode, DispatchMode) for mode in modes_on())
