"""Tells whether a transform of `torch.func`, or a trace, is under way.

After every op in `torch.func.vmap` or `jvp`, PyTorch restores the state that its dispatcher had before the op, and with
it whether modes are asked at all. Autograd saves in the middle of such an op. So no mode may be put on there: it would
see nothing. Nor may one be taken off: no op would run any more. Neither the dispatcher's state nor the stack of
transforms shows at a save that a transform is under way; the stack of Python's frames does.

A trace (`make_fx`, and so `torch.func.linearize`) knows tensors by their Python objects, and takes a tensor for a
constant if no op that the trace has seen has made it. So what autograd saves in a trace stays where it is: it then is
the result of an op that the trace has seen.
"""

from __future__ import annotations

import sys
from types import FrameType

import torch
import torch._functorch.eager_transforms
import torch._functorch.vmap

_VMAP, _EAGER = vars(torch._functorch.vmap), vars(torch._functorch.eager_transforms)
"""The names of the modules where all transforms call what they transform."""
_TRACES = torch._C._TorchDispatchModeKey.PROXY
"""The kind of mode that traces."""


def in_transform() -> bool:
    """Whether what this thread runs is called by a transform."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        names = frame.f_globals
        if names is _VMAP or names is _EAGER:
            return True
        frame = frame.f_back
    return False


def in_trace() -> bool:
    """Whether this thread's ops are being written down as a graph."""
    return torch._C._get_dispatch_mode(_TRACES) is not None
