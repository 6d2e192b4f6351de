"""One case of the demo, in a process of its own so that its resident memory is its own.

Several cases take turns, one step each, so that a busy moment of the machine hits all alike. A case says ``{}`` when it
has made its model, then reads one command a line on standard input and answers with one JSON object a line on standard
output. The first is a number of bytes, the budget, or ``plain``; then:

    step    ->  {"settled": bool}       train on the next batch; settled: from now on steps are timed
                {"unreachable": bytes}  instead, if the budget is below the least reachable peak
    count   ->  {}                      the same, with the live bytes counted, which takes longer
    least   ->  {"least_bytes": bytes}  the least peak that a budget's step can be brought to
    result  ->  the fields of `CaseResult`
    tune    ->  {}                      plain PyTorch only: take ebbtide's allocator settings, and time anew
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys
from contextlib import AbstractContextManager
from typing import Any

import torch

from ebbtide.demo.measure import Gauge, Measurement
from ebbtide.demo.workloads import Workload, digest, make_workload
from ebbtide.errors import BudgetError
from ebbtide.plan.frontier import least_peak_bytes
from ebbtide.run.allocator import set_tuned
from ebbtide.run.budget import Budget
from ebbtide.run.loop import FINAL_STATES
from ebbtide.run.meter import PeakMeter

WARM_UP_STEPS = 1
"""Plain steps that are not timed, at first and after `Case.tune`."""


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What a case measured.

    Attributes:
        peak_bytes: the most bytes of live tensors, resting ones included, counted in one step.
        resting_bytes: those of parameters, buffers and inputs.
        rss_bytes: the most resident bytes above rest over the timed steps.
        seconds: median time of a step.
        loss: of the last step.
        digest: sha256 of parameters, gradients and buffers after the last backward pass.
    """

    peak_bytes: int
    resting_bytes: int
    rss_bytes: int
    seconds: float
    loss: float
    digest: str


class Case:
    """A training loop that measures itself, one command at a time.

    The steps after the first one in its final state (for a budget: the first planned one) are timed. That one begins
    without the allocator's free pages and has to take them again.
    """

    def __init__(self, workload: Workload, memory: Budget | None) -> None:
        self._workload = workload
        self._memory = memory
        self._optimizer = workload.optimizer()
        self._gauge = Gauge()
        self._meter: PeakMeter | None = None
        self._at_rest = False
        self._number = 0
        self._cold = WARM_UP_STEPS
        self._seconds: list[float] = []
        self._rss_bytes: list[int] = []
        self._loss = float("nan")

    def step(self) -> dict[str, Any]:
        """Train on the next batch, timed if steps were settled before."""
        batch = self._next_batch()
        is_settled = self._cold == 0 if self._memory is None else self._memory.state in FINAL_STATES
        self._cold -= not is_settled
        is_timed = is_settled and self._at_rest
        if is_settled and not self._at_rest:
            self._gauge.rest()
            self._at_rest = True
        measurement = Measurement()
        self._train(batch, self._gauge.measure(measurement))
        if is_timed:
            self._seconds.append(measurement.seconds)
            self._rss_bytes.append(measurement.rss_bytes)
        return {"settled": self._at_rest}

    def count(self) -> dict[str, Any]:
        """Train on the last batch, with the live bytes counted: what that takes itself would disturb later steps."""
        self._meter = PeakMeter()
        self._train(self._next_batch(), self._meter)
        return {}

    def _next_batch(self) -> Any:
        if self._number > 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
        batch = self._workload.batch(self._number)
        self._number += 1
        return batch

    def _train(self, batch: Any, around: AbstractContextManager[object]) -> None:
        """Forward and backward; the gradients stay until the next step, for `digest`."""
        with around, self._memory.step() if self._memory is not None else contextlib.nullcontext():
            self._loss = float(self._workload.step(batch))

    def least(self) -> dict[str, Any]:
        """The least peak that the observed step can be brought to."""
        if self._memory is None or self._memory.observed is None:
            raise RuntimeError("no budget has observed a step")
        return {"least_bytes": least_peak_bytes(self._memory.observed, self._memory.machine)}

    def tune(self) -> dict[str, Any]:
        """Some of what ebbtide gains or loses comes from the allocator's settings alone: plain steps get them, too."""
        set_tuned()
        self._seconds.clear()
        self._cold = WARM_UP_STEPS
        return {}

    def result(self) -> dict[str, Any]:
        """What was measured until now."""
        if self._meter is None or not self._seconds:
            raise RuntimeError("too few steps: none was timed, or none counted")
        return dataclasses.asdict(
            CaseResult(
                peak_bytes=self._meter.peak_bytes,
                resting_bytes=self._meter.resting_bytes,
                rss_bytes=max(self._rss_bytes),
                seconds=statistics.median(self._seconds),
                loss=self._loss,
                digest=digest(self._workload.model),
            )
        )


def _choose_kernels() -> None:
    """Take a square root in one thread, before Adam takes its first in several.

    MKL chooses its kernel in a process's first call. Two threads that make that call at once may get two kernels, which
    round differently: on some processors every third process of plain PyTorch trains with other numbers than the rest.
    """
    torch.ones(1).sqrt()


def _say(answer: dict[str, Any]) -> None:
    print(json.dumps(answer), flush=True)


def _serve(case: Case) -> None:
    commands = {command.__name__: command for command in (case.step, case.count, case.least, case.result, case.tune)}
    _say({})
    for line in sys.stdin:
        try:
            answer = commands[line.strip()]()
        except BudgetError as error:
            answer = {"unreachable": error.reachable_bytes}
        _say(answer)


def main() -> None:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True, help="images or passages in a step")
    parser.add_argument("--spill", help="directory for what is moved out")
    options = parser.parse_args()
    workload = make_workload(options.model, batch_size=options.batch)
    workload.batch(0)  # reads the data
    workload.optimizer()  # imports what it needs
    _choose_kernels()
    _say({})
    first = sys.stdin.readline().strip()
    if first == "plain":
        _serve(Case(workload, None))
    elif first:
        with Budget(int(first), spill=options.spill) as memory:
            _serve(Case(workload, memory))


if __name__ == "__main__":
    main()
