"""Code compiled by `torch.compile` runs as it was written where ebbtide has to see its ops or to run parts of it again.

Fake tensors, scans and versions of PyTorch that compile nothing under a dispatch mode need it. If PyTorch is asked to
compile something and does not, it never compiles that later, so it must not be asked. Gradients are those of the same
code not compiled.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

import torch

_Function = TypeVar("_Function", bound=Callable[..., Any])
_eval_frame: Any = vars(vars(torch._C)["_dynamo"])["eval_frame"]
_warn = _inside = 0
_stance: Any = None
_lock = threading.Lock()


def never_compiled(function: _Function) -> _Function:
    """A function of ours that Dynamo compiles as little as what it calls, the standard library's for one.

    Where a user's module is compiled, and Dynamo leaves it as it is, it looks at whatever else runs inside. For the
    functions of modes and hooks: what calls a user's module must not be one. Not every version of PyTorch can be told.
    """
    if hasattr(_eval_frame, "set_code_exec_strategy"):
        skip = _eval_frame._FrameAction.SKIP
        _eval_frame.set_code_exec_strategy(function.__code__, _eval_frame._FrameExecStrategy(skip, skip))
    return function


@contextlib.contextmanager
def uncompiled(*, warns: bool = True) -> Iterator[None]:
    """A context in which no compiled code runs and nothing is compiled; ``warns``: a recorder says so of modules.

    Where nobody has asked for `torch.compile` so far it costs nothing: its modules take two seconds to import.
    """
    global _warn
    if "torch._dynamo" not in sys.modules:
        yield
        return
    _begin_eager()
    _warn += warns
    try:
        yield
    finally:
        _warn -= warns
        _end_eager()


def _begin_eager() -> None:
    """The stance is one for all threads: the first of overlapping contexts sets it."""
    global _inside, _stance
    with _lock:
        if not _inside:
            _stance = torch.compiler.set_stance("force_eager")
        _inside += 1


def _end_eager() -> None:
    """The last one puts back what the first found."""
    global _inside, _stance
    with _lock:
        _inside -= 1
        if not _inside:
            stance, _stance = _stance, None
            stance.__exit__(None, None, None)


def is_compiling() -> bool:
    """Whether this is called by what `torch.compile` made, or while it makes it."""
    return bool(_eval_frame.get_eval_frame_callback())


def warn_if_compiled(module: torch.nn.Module) -> None:
    """Say so if ``module`` is one that `torch.compile` was asked to compile and that does not run compiled here."""
    found = vars(module)
    if _warn and ("_orig_mod" in found.get("_modules", ()) or found.get("_compiled_call_impl") is not None):
        warnings.warn(
            "ebbtide cannot look into what torch.compile makes: here the model runs as it was written, without "
            "torch.compile",
            stacklevel=2,
        )
