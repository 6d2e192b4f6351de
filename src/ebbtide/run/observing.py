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


def observe_step(run: Callable[[], Any]) -> Step:
    """Call ``run``, one forward and backward pass during which nothing moves, and return what was seen."""
    recorder = Recorder(allocator.arena_probe())
    policy = SafePolicy(None, _nowhere, recorder)
    with (
        allocator.tuned(),
        torch.autograd.graph.saved_tensors_hooks(policy.pack, policy.unpack),
        recorder,
    ):
        run()
    return recorder.finish()


def _nowhere() -> SlowTier:
    raise StepError("a step that is only observed moves nothing")
