"""One case of the demo, in a process of its own so that its resident memory is its own.

Prints one JSON object a line: ``{"step": 3}`` after each step, then either ``{"result": {...}}`` with the fields of
`CaseResult`, or ``{"unreachable": bytes}`` if the limit is below the least reachable peak.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import statistics
import sys

from ebbtide.demo.measure import Gauge, Measurement
from ebbtide.demo.workloads import Workload, digest, make_workload
from ebbtide.errors import BudgetError
from ebbtide.run.allocator import tuned
from ebbtide.run.budget import FINAL_STATES, Budget
from ebbtide.run.meter import PeakMeter

PLAIN_WARM_UP_STEPS = 1
TUNED_STEPS = 4


@dataclasses.dataclass(frozen=True)
class CaseResult:
    """What a case measured.

    Attributes:
        peak_bytes: the most bytes of live tensors, resting ones included, counted in one step.
        resting_bytes: those of parameters, buffers and inputs.
        rss_bytes: the most resident bytes above rest over the timed steps.
        seconds: median time of a step; of plain steps, with the faster of glibc's own and ebbtide's allocator settings.
        loss: of the last step.
        digest: sha256 of parameters, gradients and buffers after the last backward pass.
        timed_steps: number of steps behind ``seconds``.
    """

    peak_bytes: int
    resting_bytes: int
    rss_bytes: int
    seconds: float
    loss: float
    digest: str
    timed_steps: int


class Training:
    """A training loop that measures itself.

    The first step in its final state (for a budget: the first planned one) is counted and not timed, the steps after
    it are timed.
    """

    def __init__(self, workload: Workload, memory: Budget | None) -> None:
        self._workload = workload
        self._memory = memory
        self._optimizer = workload.optimizer()
        self._gauge = Gauge()
        self._meter: PeakMeter | None = None
        self.seconds: list[float] = []
        self.rss_bytes: list[int] = []
        self.loss = float("nan")

    def step(self, number: int) -> None:
        """Train on batch ``number``. The gradients stay until the next step, for `digest`."""
        if number > 0:
            self._optimizer.step()
            self._optimizer.zero_grad()
        batch = self._workload.batch(number)
        settled = number >= PLAIN_WARM_UP_STEPS if self._memory is None else self._memory.state in FINAL_STATES
        context = self._memory.step() if self._memory is not None else contextlib.nullcontext()
        if settled and self._meter is None:
            self._gauge.rest()
            with PeakMeter() as self._meter, context:
                loss = self._workload.step(batch)
        else:
            measurement = Measurement()
            with self._gauge.measure(measurement), context:
                loss = self._workload.step(batch)
            if settled:
                self.seconds.append(measurement.seconds)
                self.rss_bytes.append(measurement.rss_bytes)
        self.loss = float(loss)

    def result(self, seconds: float) -> CaseResult:
        """What was measured, with ``seconds`` as the time of a step."""
        if self._meter is None or not self.seconds:
            raise RuntimeError("too few steps: none was timed")
        return CaseResult(
            peak_bytes=self._meter.peak_bytes,
            resting_bytes=self._meter.resting_bytes,
            rss_bytes=max(self.rss_bytes),
            seconds=seconds,
            loss=self.loss,
            digest=digest(self._workload.model),
            timed_steps=len(self.seconds),
        )


def run_plain(workload: Workload, steps: int) -> CaseResult:
    """Train for ``steps`` steps without a budget."""
    training = Training(workload, None)
    for number in range(steps):
        training.step(number)
        _say({"step": number})
    result = training.result(statistics.median(training.seconds))
    # Some of what ebbtide gains or loses comes from the allocator's settings alone; so plain steps get them too.
    training.seconds.clear()
    with tuned():
        for number in range(steps, steps + TUNED_STEPS):
            training.step(number)
            _say({"step": number})
    tuned_seconds = statistics.median(training.seconds[1:])
    return dataclasses.replace(result, seconds=min(result.seconds, tuned_seconds))


def run_budget(workload: Workload, steps: int, limit_bytes: int, spill: str | None) -> CaseResult:
    """Train for ``steps`` steps within ``limit_bytes``. Raises `BudgetError` if that cannot be."""
    with Budget(limit_bytes, spill=spill) as memory:
        training = Training(workload, memory)
        for number in range(steps):
            training.step(number)
            _say({"step": number})
        return training.result(statistics.median(training.seconds))


def _say(message: dict[str, object]) -> None:
    print(json.dumps(message), flush=True)


def main() -> None:
    """Run the case that the command line describes."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--batch", type=int, required=True, help="images or passages in a step")
    parser.add_argument("--steps", type=int, required=True)
    parser.add_argument("--limit-bytes", type=int, help="the budget; plain PyTorch without it")
    parser.add_argument("--spill", help="directory for what is moved out")
    options = parser.parse_args()
    workload = make_workload(options.model, batch_size=options.batch)
    try:
        if options.limit_bytes is None:
            result = run_plain(workload, options.steps)
        else:
            result = run_budget(workload, options.steps, options.limit_bytes, options.spill)
    except BudgetError as error:
        _say({"unreachable": error.reachable_bytes})
        sys.exit(0)
    _say({"result": dataclasses.asdict(result)})


if __name__ == "__main__":
    main()
