"""Counts calls of what `torch.compile` returned.

After every such call, whether or not it ran compiled, PyTorch restores the state that its dispatcher had before, and
with it whether modes are asked at all. So no mode may be put on or taken off in the middle of one.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

_AS_WRITTEN = "eager"
"""Name of the backend that runs the ops of a graph as they are. `torch.cond`, `scan` and their like compile with it the
functions that they are given, in models that are not compiled, too."""

_begun = _ran = 0
_counting = False


def compiled_calls() -> int:
    """A number that is another one if calls have begun since it was asked for last, or might have."""
    global _begun, _counting
    frames: Any = sys.modules.get("torch._dynamo.eval_frame")
    if frames is not None and not _counting:
        _begun += 1  # whatever was called before it was counted
        _counting = hasattr(frames, "_callback_from_stance")
        if _counting:
            _count(frames)
    return _begun


def compiled_runs() -> int:
    """A number that is another one if calls that may run compiled have begun since it was asked for last, and since
    `compiled_calls` was asked for. Those whose graphs run as they were written are none."""
    return _ran


def _count(frames: Any) -> None:
    """Each such call asks what to compile with."""
    original = frames._callback_from_stance

    @functools.wraps(original)
    def counted(callback: Any) -> Any:
        global _begun, _ran
        _begun += callback is not None  # None is for functions that are not to be compiled
        found = original(callback)
        if callback is not None and found is not None:  # the latter is for all, where nothing is to be
            _ran += _backend_name(callback) != _AS_WRITTEN
        return found

    frames._callback_from_stance = counted


def _backend_name(callback: Any) -> str:
    """What `torch.compile` was told to compile with, from the callback that it made of it."""
    while hasattr(callback, "_torchdynamo_orig_backend"):
        callback = callback._torchdynamo_orig_backend
    return str(getattr(callback, "compiler_name", ""))
