"""Tells whether a transform of `torch.func`, or a trace, is under way.

Behind every op in `torch.func.vmap` or `jvp`, PyTorch restores its dispatcher's state of before, and with it whether
modes are asked at all. Autograd saves below them, in the middle of such an op. So no mode may be put on there, which
would see nothing, or taken off, after which no op would run any more. Neither that state nor the stack of transforms
shows it there; the stack of Python's frames does.

A trace (`make_fx`, and so `torch.func.linearize`) knows tensors by their Python objects, and takes for a constant what
no op that it has seen has made. So what autograd saves in one stays where it is, as the result of an op that it sees.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch

_MODULES = ("torch._functorch.vmap", "torch._functorch.eager_transforms")
"""Where all transforms call what they transform."""
_TRACES = torch._C._TorchDispatchModeKey.PROXY
"""The kind of mode that traces."""


def in_transform() -> bool:
    """Whether what this thread runs is called by a transform."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _MODULES:
            return True
        frame = frame.f_back
    return False


def in_trace() -> bool:
    """Whether this thread's ops are being written down as a graph."""
    return torch._C._get_dispatch_mode(_TRACES) is not None
