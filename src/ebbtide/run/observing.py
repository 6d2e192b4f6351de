"""Observing a step without a budget: for the command line, for fixtures, for machines that are not at hand."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from ebbtide.errors import StepError
from ebbtide.observe.recorder import Recorder
from ebbtide.run import allocator
from ebbtide.run.safe import SafePolicy
from ebbtide.run.tiers import SlowTier
from ebbtide.step import Step


def observe_step(run: Callable[[], Any], *, probe_workspace: bool = False) -> Step:
    """Call ``run``, one forward and backward pass, and return what was seen.

    Args:
        run: runs the step; nothing moves while it does.
        probe_workspace: also read the memory that each op takes inside itself from the system; the step is slower then.
    """
    recorder = Recorder(probe_workspace=probe_workspace)
    policy = SafePolicy(None, _nowhere, recorder)
    if probe_workspace:
        allocator.set_exact()
    try:
        with torch.autograd.graph.saved_tensors_hooks(policy.pack, policy.unpack), recorder:
            run()
    finally:
        if probe_workspace:
            allocator.set_default()
    return recorder.finish()


def _nowhere() -> SlowTier:
    raise StepError("a step that is only observed moves nothing")
