"""Counts calls of what `torch.compile` returned.

After every such call, whether or not it ran compiled, PyTorch restores the state that its dispatcher had before, and
with it whether modes are asked at all. So no mode may be put on or taken off in the middle of one.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

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
    `compiled_calls` was asked for."""
    return _ran


def _count(frames: Any) -> None:
    """Each such call asks what to compile with."""
    original = frames._callback_from_stance

    @functools.wraps(original)
    def counted(callback: Any) -> Any:
        global _begun, _ran
        _begun += callback is not None  # None is for functions that are not to be compiled
        found = original(callback)
        _ran += callback is not None and found is not None  # the latter is for all, where nothing is to be
        return found

    frames._callback_from_stance = counted
