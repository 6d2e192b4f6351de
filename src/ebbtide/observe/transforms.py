"""Tells whether a transform of `torch.func` is under way.

Behind every op in `torch.func.vmap` or `jvp`, PyTorch restores its dispatcher's state of before, and with it whether
modes are asked at all. Autograd saves below them, in the middle of such an op. So no mode may be put on there, which
would see nothing, or taken off, after which no op would run any more. Neither that state nor the stack of transforms
shows it there; the stack of Python's frames does.
"""

from __future__ import annotations

import sys
from types import FrameType

_MODULES = ("torch._functorch.vmap", "torch._functorch.eager_transforms")
"""Where all transforms call what they transform."""


def in_transform() -> bool:
    """Whether what this thread runs is called by a transform."""
    frame: FrameType | None = sys._getframe(1)
    while frame is not None:
        if frame.f_globals.get("__name__") in _MODULES:
            return True
        frame = frame.f_back
    return False
