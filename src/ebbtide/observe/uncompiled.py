"""Code compiled by `torch.compile` runs as it was written where ebbtide has to see its ops.

PyTorch compiles nothing under a dispatch mode, and what it does not compile then it never compiles later; code that was
compiled before shows few of its ops, and Dynamo would compile our own hooks along with the user's frames. So a step is
seen, planned and run without it. Its gradients are those of the same code not compiled.
"""

from __future__ import annotations

import contextlib
import sys
import warnings
from contextlib import AbstractContextManager

import torch


def uncompiled() -> AbstractContextManager[object]:
    """A context in which no compiled code runs and nothing is compiled; to be entered where it is made.

    Where nobody has asked for `torch.compile` so far it costs nothing: its modules take two seconds to import.
    """
    if "torch._dynamo" not in sys.modules:
        return contextlib.nullcontext()
    context: AbstractContextManager[object] = torch.compiler.set_stance("force_eager")
    return context


def warn_if_compiled(module: torch.nn.Module) -> None:
    """Say so if ``module`` is one that `torch.compile` was asked to compile."""
    if hasattr(module, "_orig_mod") or getattr(module, "_compiled_call_impl", None) is not None:
        warnings.warn(
            "ebbtide cannot look into what torch.compile makes: where it runs a model, the model runs as it was "
            "written, without torch.compile. Compile only what runs outside, or leave the budget out",
            stacklevel=2,
        )
