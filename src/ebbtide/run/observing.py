"""Observing a step without a budget: for the command line, for fixtures, for machines that are not at hand."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import torch

from ebbtide.errors import ArgumentError, StepError
from ebbtide.observe.hooks import hooks_on
from ebbtide.observe.inductor import compiled_as_ops
from ebbtide.observe.recorder import Recorder
from ebbtide.run import allocator
from ebbtide.run.gauges import gauges_of, likely_device
from ebbtide.run.safe import SafePolicy
from ebbtide.run.tiers import SlowTier
from ebbtide.step import Step


def observe_step(run: Callable[[], Any], device: torch.device | str | None = None) -> Step:
    """Call ``run`` once, one forward and backward pass during which nothing moves, and record what it does.

    The first step of a process has page faults and set-up in its durations: call ``run`` before, or observe twice and
    take the second step. Gradients that ``run`` leaves stay, and the next step adds to them: clear them in between, or
    within ``run``.

    Args:
        run: runs the step; called without arguments, and what it returns is ignored.
        device: where it runs; None for the current CUDA device, if CUDA is in use, and else the CPU.

    Returns:
        The step: its ops with their durations in seconds, the values that they make with their sizes in bytes, and when
        autograd needs these.

    Raises:
        ArgumentError: if ``run`` cannot be called, or there is no such device; it is a `ValueError`.
        StepError: if the allocator of CUDA memory is not PyTorch's own.
    """
    if not callable(run):
        raise ArgumentError(f"run={run!r} cannot be called; give a function that runs one step")
    try:
        gauges = gauges_of(torch.device(device) if device is not None else likely_device())
    except (RuntimeError, TypeError, AssertionError) as fault:  # the last of a PyTorch that was built without CUDA
        raise ArgumentError(f"device={device!r} is no device of PyTorch's: {fault}") from fault
    on_cpu = gauges.device.type == "cpu"
    probe = allocator.arena_probe() if on_cpu else None
    recorder = Recorder(probe, clock=gauges.clock, memory=gauges.memory)
    policy = SafePolicy(None, _no_tier, recorder, memory=gauges.memory)
    with (
        compiled_as_ops(),
        allocator.tuned() if on_cpu else contextlib.nullcontext(),
        hooks_on(policy.pack, policy.unpack),
        recorder,
    ):
        run()
    return recorder.finish()


def _no_tier() -> SlowTier:
    raise StepError("a step that is only observed moves nothing")
