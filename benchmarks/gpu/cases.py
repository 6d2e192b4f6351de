"""One case: a method runs steps of a model in turns with plain PyTorch, and is compared with it."""

from __future__ import annotations

import contextlib
import math
import statistics
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from benchmarks.gpu.devices import Cost, Device, Peak
from benchmarks.gpu.methods import Options, make_budget, make_peer
from benchmarks.gpu.records import Verdict
from benchmarks.gpu.workloads import state_of, zero_gradients
from benchmarks.methods import MOST_STEPS_TO_SETTLE, Ebbtide, Method, Plain
from ebbtide.decisions import Offload, Recompute
from ebbtide.demo.run import MARGIN, TRIES
from ebbtide.demo.workloads import Workload
from ebbtide.errors import BudgetError
from ebbtide.run.budget import Budget

Facts = dict[str, Any]

PLAIN_STEPS = 3
"""Plain steps before anything is measured: libraries are loaded, kernels chosen, gradients made."""
COUNTED_STEPS = 2
"""Steps that are counted together: the first of them finds no memory cached."""
LEAST_REPEATS = 3
"""Steps that are timed even if time is up."""
SPREAD_MARGIN = 2.0
"""Gradients may differ from a plain step's by so many times what plain steps were seen to differ by."""


class Bench:
    """One model on one device. Times of `time.perf_counter` say until when work may begin.

    Attributes:
        plain: bytes of a plain step.
    """

    def __init__(self, workload: Workload, device: Device) -> None:
        self.device = device
        self.workload = workload
        self._batch = workload.batch(0)
        self._plain = Plain()
        self._spread: float | None = None
        for number in range(PLAIN_STEPS):
            self._ready(number)
            self._run(self._plain)
        self.plain: Peak = self._counted(self._plain)

    def measure(self, method: Method, repeats: int, until: float) -> Facts:
        """Everything about a method; the names are those of `Record`."""
        began = time.perf_counter()
        self._settle(method)
        settled = time.perf_counter()
        counted = self._counted(method)
        plain_costs, costs = self._in_turns(method, repeats, until)
        peaks = [cost.peak_bytes for cost in costs if cost.peak_bytes is not None]
        plain_seconds, seconds = _median(plain_costs), _median(costs)
        return self._compare(method) | {
            "resting_bytes": self.plain.resting_bytes,
            "plain_peak_bytes": self.plain.peak_bytes,
            "plain_reserved_bytes": self.plain.reserved_bytes,
            "peak_bytes": max([counted.peak_bytes, *peaks]),
            "reserved_bytes": counted.reserved_bytes,
            "seconds": seconds,
            "plain_seconds": plain_seconds,
            "ratio": seconds / plain_seconds,
            "all_seconds": tuple(cost.seconds for cost in costs),
            "all_plain_seconds": tuple(cost.seconds for cost in plain_costs),
            "settling_seconds": settled - began,
        }

    def _settle(self, method: Method) -> None:
        for number in range(MOST_STEPS_TO_SETTLE):
            self._ready(number)
            self._run(method)
            if number > 0 and method.settled():
                return
        raise RuntimeError(f"not settled after {MOST_STEPS_TO_SETTLE} steps")

    def _counted(self, method: Method) -> Peak:
        def run() -> None:
            for _ in range(COUNTED_STEPS):
                self._run(method)

        self._ready(0)
        return self.device.counted(run)

    def _in_turns(self, method: Method, repeats: int, until: float) -> tuple[list[Cost], list[Cost]]:
        """Times of plain steps and of the method's, each in front of the other every second time."""
        takes: dict[Method, list[Cost]] = {self._plain: [], method: []}
        turn = list(takes)
        for each in turn:  # counting left the allocator empty
            self._run(each)
        for number in range(repeats):
            if number >= LEAST_REPEATS and time.perf_counter() > until:
                break
            for each in turn:
                self._ready(number)
                takes[each].append(self._timed(each))
            turn.reverse()
        return takes[self._plain], takes[method]

    def _timed(self, method: Method) -> Cost:
        return self.device.timed(lambda: self._run(method))

    def _compare(self, method: Method) -> Facts:
        """The same step plain and by the method, from the same state."""
        before = state_of(self.workload.model)
        if self._spread is None:
            first, *others = (self._outcome(self._plain, before)[0] for _ in range(3))
            self._spread = max(_difference(first, other) for other in others)
        gradients, buffers = self._outcome(self._plain, before)
        found, found_buffers = self._outcome(method, before)
        difference = _difference(gradients, found)
        return {
            "gradients": _verdict(difference, self._spread),
            "gradient_difference": difference,
            "plain_spread": self._spread,
            "buffers_identical": all(map(torch.equal, buffers, found_buffers)),
        }

    def _outcome(self, method: Method, before: Sequence[Tensor]) -> tuple[list[Tensor], list[Tensor]]:
        """Loss and gradients, and buffers, of a step that starts from buffers ``before``."""
        model = self.workload.model
        for buffer, value in zip(model.buffers(), before, strict=True):
            buffer.copy_(value)
        self._ready(0)
        loss = self._run(method)
        gradients = [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]
        return [loss, *gradients], state_of(model)

    def _ready(self, seed: int) -> None:
        zero_gradients(self.workload.model)
        torch.manual_seed(seed)

    def _run(self, method: Method) -> Tensor:
        with method.active():
            return self.workload.step(self._batch)


def measure_peer(bench: Bench, name: str, repeats: int, until: float) -> Facts:
    """Everything about the peer called ``name``."""
    with contextlib.closing(make_peer(name, bench.workload, bench.device)) as method:
        return bench.measure(method, repeats, until)


def measure_budget(
    bench: Bench, fraction: float, options: Options, repeats: int, until: float, look: Callable[[Budget], None]
) -> Facts:
    """Everything about ebbtide within ``fraction`` of the plain bytes above rest, or within the least that can be met.

    ``look`` is called with the budget at the end.

    Raises:
        BudgetError: if no budget was found that can be met.
    """
    plain = bench.plain
    share = (plain.resting_bytes + fraction * (plain.peak_bytes - plain.resting_bytes)) / plain.peak_bytes
    refused: BudgetError | None = None
    for _ in range(TRIES):
        with contextlib.closing(make_budget(share, options, bench.device)) as method:
            try:
                facts = bench.measure(method, repeats, until)
            except BudgetError as error:
                refused = error
                share *= MARGIN * error.reachable_bytes / error.limit_bytes
                continue
            look(method.memory)
            least_bytes = refused.reachable_bytes if refused is not None else None
            return facts | _planned(method) | {"least_reachable_bytes": least_bytes}
    assert refused is not None
    raise refused


def _planned(method: Ebbtide) -> Facts:
    """What the plan promised, and what it is made of."""
    memory = method.memory
    plan, step = memory.plan, memory.observed
    if plan is None or step is None:
        raise RuntimeError("a budget that has settled has no plan")
    facts = method.facts()
    moved = [a.value for a, d in zip(step.absences, plan.decisions, strict=True) if isinstance(d, Offload)]
    return {
        "limit_bytes": memory.limit_bytes,
        "predicted_peak_bytes": facts["predicted_peak_bytes"],
        "predicted_seconds": facts["predicted_seconds"],
        "predicted_plain_seconds": facts["predicted_plain_seconds"],
        "bound": facts["bound_seconds"] / facts["predicted_plain_seconds"],
        "moved_bytes": sum(step.values[value].size_bytes for value in moved),
        "remade_values": sum(isinstance(decision, Recompute) for decision in plan.decisions),
        "left": next((measured.left for measured in memory.measured if measured.left), ""),
    }


def _median(costs: Sequence[Cost]) -> float:
    return statistics.median(cost.seconds for cost in costs)


def _difference(these: Sequence[Tensor], those: Sequence[Tensor]) -> float:
    """The largest over the tensors of the norm of the difference over the norm; 0 only if they are equal bit for bit.

    Infinite where one is zero or not finite, and the other is something else.
    """
    worst = 0.0
    for a, b in zip(these, those, strict=True):
        if not torch.equal(a, b):
            norm = float(torch.linalg.vector_norm(a, dtype=torch.float32))
            apart = float(torch.linalg.vector_norm(a.float() - b.float()))
            worst = max(worst, apart / norm if norm > 0 and math.isfinite(apart) else math.inf)
    return worst


def _verdict(difference: float, spread: float) -> Verdict:
    if difference == 0:
        return "identical"
    return "spread" if difference <= SPREAD_MARGIN * spread else "differs"
