"""Measures what it costs to compute values again, besides the ops that make them.

Their calls are captured under a dispatch mode, what they read is held, and they run from Python in the middle of a
backward pass. A plan that counts the ops alone takes many small ones for cheaper than a transfer, which they are not.

Steps of a chain of small ops run under a conductor, in turns: by a script that computes every other value again, and by
one that keeps all.
"""

from __future__ import annotations

import concurrent.futures
import statistics
import time
from collections.abc import Callable

import torch

from ebbtide.decisions import Decision, Keep, Plan, Recompute
from ebbtide.errors import StepError
from ebbtide.run.conductor import Conductor
from ebbtide.run.forks import KnownScripts
from ebbtide.run.observing import observe_step
from ebbtide.run.safe import SafePolicy
from ebbtide.run.script import Script, write_script
from ebbtide.run.tiers import DeviceTiers, SlowTier
from ebbtide.step import Step

OPS = 256
"""Ops of the chain; every other one runs again."""
NUMBERS = 1 << 14
"""In each tensor: in a step as large as this chain, what the runtime looks at is in no near cache, as in real ones."""
TURNS = 12
"""Runs of a step by either script, and of the ops alone: the median counts. All of it takes 0.4 s."""


def lost_per_replay() -> float:
    """Seconds that an op which runs again costs besides its own time."""
    # In a thread of its own there is no mode, hook or context of the caller's.
    with concurrent.futures.ThreadPoolExecutor(1) as thread:
        return thread.submit(_measure).result()


def _measure() -> float:
    start = torch.linspace(0, 1, NUMBERS, dtype=torch.float32, device="cpu", requires_grad=True)
    step = observe_step(lambda: _train(start), torch.device("cpu"))
    kept, again = _script(step, again=False), _script(step, again=True)
    lost = []
    for _ in range(TURNS):
        without, op_seconds = _seconds(kept, start), _forward_seconds(start) / OPS
        lost.append((_seconds(again, start) - without) / len(again.known) - op_seconds)
    return max(statistics.median(lost), 0.0)


def _chain(start: torch.Tensor) -> torch.Tensor:
    """Each op saves what it makes, and reads what the one before it has made."""
    x = start
    for _ in range(OPS):
        x = x.relu()
    return x


def _train(start: torch.Tensor) -> None:
    _chain(start).sum().backward()
    start.grad = None


def _script(step: Step, *, again: bool) -> Script:
    """A script that keeps all of the chain's values, or computes every other one ``again``."""
    decisions: list[Decision] = [Keep() for _ in step.absences]
    if again:
        makers = [step.values[absence.value].maker for absence in step.absences]
        decisions[1::2] = [Recompute((maker,)) for maker in makers[1::2]]
    plan = Plan(
        tuple(decisions),
        limit_bytes=0,
        peak_bytes=0,
        seconds=0.0,
        physical_peak_bytes=0,
        plain_peak_bytes=0,
        plain_seconds=0.0,
        resting_bytes=0,
    )
    return write_script(step, plan, [0] * step.moments)


def _seconds(script: Script, start: torch.Tensor) -> float:
    """How long a step takes by ``script``."""
    conductor = Conductor(script, KnownScripts([]), _empty_tier, SafePolicy(None, _empty_tier))

    def run() -> None:
        with torch.autograd.graph.saved_tensors_hooks(conductor.pack, conductor.unpack):
            conductor.start()
            _train(start)
            conductor.stop()

    return _timed(run)


def _forward_seconds(start: torch.Tensor) -> float:
    """How long the ops take by themselves."""
    with torch.no_grad():
        return _timed(lambda: _chain(start))


def _timed(run: Callable[[], object]) -> float:
    began = time.perf_counter()
    run()
    return time.perf_counter() - began


def _no_tier(_: torch.device) -> SlowTier:
    raise StepError("nothing moves where values are only computed again")


def _empty_tier(_: str = "") -> SlowTier:
    return DeviceTiers("nowhere", "disk", _no_tier, lambda _: None)
