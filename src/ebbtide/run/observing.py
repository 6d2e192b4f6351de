"""Observing a step without a budget: for the command line, for fixtures, for machines that are not at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.errors import StepError
from ebbtide.observe.hooks import hooks_on
from ebbtide.observe.inductor import compiled_as_ops
from ebbtide.observe.recorder import Recorder
from ebbtide.run import allocator
from ebbtide.run.gauges import gauges_of, likely_device
from ebbtide.run.safe import SafePolicy
from ebbtide.run.tiers import SlowTier
from ebbtide.step import Step


def observe_step(run: Callable[[], Any], device: torch.device | None = None) -> Step:
    """Call ``run``, one forward and backward pass during which nothing moves, and return what was seen.

    Args:
        run: the step.
        device: where it runs; None for the current CUDA device, if CUDA is in use, and else the CPU.
    """
    gauges = gauges_of(device or likely_device())
    on_cpu = gauges.device.type == "cpu"
    probe = allocator.arena_probe() if on_cpu else None
    recorder = Recorder(probe, clock=gauges.clock, memory=gauges.memory)
    policy = SafePolicy(None, _nowhere, recorder, memory=gauges.memory)
    with (
        compiled_as_ops(),
        allocator.tuned() if on_cpu else contextlib.nullcontext(),
        hooks_on(policy.pack, policy.unpack),
        recorder,
    ):
        run()
    return recorder.finish()


def _nowhere() -> SlowTier:
    raise StepError("a step that is only observed moves nothing")
