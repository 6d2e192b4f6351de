"""A process that runs steps of one workload by one method, one command at a time.

Several workers are alive at once and take turns, so that a busy moment of a shared machine hits all methods alike, and
each has an allocator and a resident memory of its own. Commands and answers are JSON, one a line, on standard input
and output:

    {"do": "settle"}              -> {"unreachable": bytes or null}   run until all later steps are alike
    {"do": "turn", "number": 3}   -> {"seconds": [s, ...], "rss_bytes": n}  steps one after another, from batch 3 on
    {"do": "plain", "number": 3}  -> the same of plain steps, with the allocator's settings as they are
    {"do": "count"}               -> {"peak_bytes": n, "resting_bytes": n}  one step with its live bytes counted
    {"do": "compare"}             -> {"gradients_identical": bool, "buffers_identical": bool}  against a plain step
    {"do": "facts"}               -> what the method knows about itself
"""

from __future__ import annotations

import argparse
import contextlib
import json
import sys
from collections.abc import Callable
from contextlib import AbstractContextManager
from typing import Any

import torch
from torch import Tensor

from benchmarks.methods import MOST_STEPS_TO_SETTLE, Method, make_method
from ebbtide.demo.measure import Gauge, Measurement
from ebbtide.demo.workloads import Workload, make_workload
from ebbtide.errors import BudgetError
from ebbtide.run.meter import PeakMeter

Context = AbstractContextManager[Any]
BATCHES = 4
"""Different batches, which steps use in turn."""
FIRST, TIMED = 4, 3
"""Steps of a turn that are not timed, and those that are. In training, steps follow each other; after a pause the first
finds everything cold, and where it moves data, the second or third shares its cores with what a virtual machine's host
still has to do for that: of ResNet-50 within 50 % the first ten steps took 0.99, 0.99, 1.08, 1.01, 1.03, 1.02, 1.01,
1.01, 1.00 and 0.98 s, with 120 ms of the third stolen by the host, 35 of the fifth, and up to 20 of others."""


class Worker:
    """The commands of the module's description, as methods."""

    def __init__(self, workload: Workload, method: Method) -> None:
        self._workload = workload
        self._method = method
        self._gauge = Gauge()
        # Made beforehand: what reading data leaves on the heap is no part of a step.
        self._batches = [workload.batch(number) for number in range(BATCHES)]

    def settle(self) -> dict[str, Any]:
        """Run steps until all later ones are alike, take the memory at rest, and run one more to fill the heap."""
        try:
            for number in range(MOST_STEPS_TO_SETTLE):
                self._run(number)
                if number > 0 and self._method.settled():
                    break
            else:
                raise RuntimeError(f"not settled after {MOST_STEPS_TO_SETTLE} steps")
        except BudgetError as error:
            return {"unreachable": error.reachable_bytes}
        self._clear()
        self._gauge.rest()
        self._run(0)
        return {"unreachable": None}

    def turn(self, number: int) -> dict[str, Any]:
        """Steps one after another; the last ones are measured."""
        return self._measured(number, self._method.active)

    def plain(self, number: int) -> dict[str, Any]:
        """The same of plain steps."""
        return self._measured(number, contextlib.nullcontext)

    def count(self) -> dict[str, Any]:
        """One step under the meter."""
        meter = PeakMeter()
        self._run(0, around=meter)
        return {"peak_bytes": meter.peak_bytes, "resting_bytes": meter.resting_bytes}

    def compare(self) -> dict[str, Any]:
        """The same step plain and by the method, from the same state."""
        model = self._workload.model
        before = {name: buffer.clone() for name, buffer in model.named_buffers()}
        outcomes = []
        for active in (contextlib.nullcontext, self._method.active):
            for name, buffer in model.named_buffers():
                buffer.copy_(before[name])
            loss = self._run(0, active=active)
            gradients = [parameter.grad for parameter in model.parameters() if parameter.grad is not None]
            outcomes.append(([loss, *gradients], [buffer.clone() for buffer in model.buffers()]))
        (plain_gradients, plain_buffers), (gradients, buffers) = outcomes
        return {
            "gradients_identical": _identical(plain_gradients, gradients),
            "buffers_identical": _identical(plain_buffers, buffers),
        }

    def facts(self) -> dict[str, Any]:
        """What the method knows about itself."""
        return self._method.facts()

    def _clear(self) -> None:
        for parameter in self._workload.model.parameters():
            parameter.grad = None

    def _measured(self, first: int, active: Callable[[], Context]) -> dict[str, Any]:
        for number in range(first, first + FIRST):
            self._run(number, active=active)
        found = []
        for number in range(first + FIRST, first + FIRST + TIMED):
            found.append(Measurement())
            self._run(number, active=active, around=self._gauge.measure(found[-1]))
        return {"seconds": [each.seconds for each in found], "rss_bytes": max(each.rss_bytes for each in found)}

    def _run(
        self, number: int, *, active: Callable[[], Context] | None = None, around: Context | None = None
    ) -> Tensor:
        """One step on batch ``number``: by the method unless ``active`` is given, and ``around`` it another context."""
        self._clear()
        batch = self._batches[number % BATCHES]
        torch.manual_seed(number)
        with around or contextlib.nullcontext(), (active or self._method.active)():
            return self._workload.step(batch)


def _identical(these: list[Tensor], those: list[Tensor]) -> bool:
    return len(these) == len(those) and all(map(torch.equal, these, those))


def main() -> None:
    """Serve commands until standard input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", required=True)
    parser.add_argument("--method", required=True)
    parser.add_argument("--limit-bytes", type=int)
    parser.add_argument("--spill")
    parser.add_argument("--compile", action="store_true", help="the model's blocks, by torch.compile")
    options = parser.parse_args()
    workload = make_workload(options.model)
    if options.compile:
        for block in workload.blocks:
            block.compile()
    method = make_method(options.method, workload, limit_bytes=options.limit_bytes, spill=options.spill)
    worker = Worker(workload, method)
    with contextlib.closing(method):
        for line in sys.stdin:
            command = json.loads(line)
            answer = getattr(worker, command.pop("do"))(**command)
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
