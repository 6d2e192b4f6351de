"""The lengths that `torch.ctc_loss` is given as tensors are numbers to autograd under a dispatch mode, too.

Without a mode PyTorch makes numbers of these tensors. While any mode is on it passes on the tensors themselves, and
autograd saves them: an observed step would save two tensors more than the same step when it is planned. So while a mode
of ours is on, we do what PyTorch does without one. No other op of PyTorch saves something else under a mode. If
somebody has put another function in the place of `torch.ctc_loss`, that is left alone.
"""

from __future__ import annotations

import functools
import types
from typing import Any

import torch

_original: Any = torch.ctc_loss
_modes: set[object] = set()
"""Those of ours that are on, in whichever thread."""


def mode_is_on(mode: object) -> None:
    """From now on, `torch.ctc_loss` makes numbers of lengths, until no mode that this was called with is on."""
    global _original
    _modes.add(mode)
    found = vars(torch)["ctc_loss"]
    if isinstance(found, types.BuiltinFunctionType):
        _original = found
        vars(torch)["ctc_loss"] = _ctc_loss


def mode_is_off(mode: object) -> None:
    """Undo `mode_is_on`, if it was called."""
    _modes.discard(mode)
    if not _modes and vars(torch)["ctc_loss"] is _ctc_loss:
        vars(torch)["ctc_loss"] = _original


@functools.wraps(_original)
def _ctc_loss(
    log_probs: torch.Tensor,
    targets: torch.Tensor,
    input_lengths: Any,
    target_lengths: Any,
    blank: int = 0,
    *options: Any,
    **named: Any,
) -> Any:
    lengths = input_lengths, target_lengths
    if all(map(_may_be_read, lengths)) and not _stay_tensors(log_probs, targets, *lengths, blank):
        there = [length.to("cpu", torch.long).contiguous() for length in lengths]
        with torch._C._DisableTorchDispatch():
            lengths = there[0].tolist(), there[1].tolist()
    return _original(log_probs, targets, *lengths, blank, *options, **named)


def _may_be_read(length: Any) -> bool:
    """Whether it is a tensor of whole numbers that are there, as PyTorch wants them."""
    return (
        type(length) is torch.Tensor
        and not length.is_meta
        and not torch._C._functorch.is_functorch_wrapped_tensor(length)
        and not length.dtype.is_floating_point
        and not length.dtype.is_complex
        and length.dtype is not torch.bool
    )


def _stay_tensors(log_probs: torch.Tensor, *rest: Any) -> bool:
    """Whether a library of the device's takes the tensors, whatever is on."""
    if log_probs.device.type != "cuda":
        return False
    asks: Any = torch._use_miopen_ctc_loss if torch.version.hip else torch._use_cudnn_ctc_loss
    with torch._C._DisableTorchDispatch():
        return bool(asks(log_probs, *rest))
