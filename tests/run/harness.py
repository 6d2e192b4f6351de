"""Runs a program plain and under a budget, and compares the two bit for bit after every step."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import itertools
import re
import warnings
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Decision, Offload, Plan, Recompute
from ebbtide.errors import BudgetError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import simulate
from ebbtide.plan.problem import Facts
from ebbtide.plan.recipes import deeper_recipes
from ebbtide.run.meter import PeakMeter
from ebbtide.step import Step
from tests.run.inside import kinds_of, latest_kind

Guard = Callable[[], AbstractContextManager[object]]
Record = dict[str, Tensor]
Solver = Callable[..., Plan]
Key = TypeVar("Key")
Made = TypeVar("Made")

STEPS = 8
"""Enough for every state of a budget (it observes, verifies and audits first) and a few planned steps."""
HELD_MORE = "a step held .* more than is planned for, and passed the limit"
METERED = (STEPS - 3, STEPS - 1)
"""Steps that run under a `PeakMeter`; the one between them shows that the result does not depend on the meter."""


def paper_machine(fast: str, *slow: Tier, bandwidth_bytes_per_second: float, latency_seconds: float) -> Machine:
    """A machine, on paper, whose links all have this speed. What they really have is another matter."""
    rate = bandwidth_bytes_per_second
    ways = [way for tier in slow for way in ((fast, tier.name), (tier.name, fast))]
    links = tuple(Link(*way, latency_seconds, rate, rate) for way in ways)
    return Machine("paper", fast, (Tier(fast, "device"), *slow), links)


def fast_machine(fast: str, *slow: Tier) -> Machine:
    """Offloading costs nothing: plans offload."""
    return paper_machine(fast, *slow, bandwidth_bytes_per_second=1e12, latency_seconds=1e-7)


def slow_machine(fast: str, *slow: Tier) -> Machine:
    """Offloading costs seconds: plans recompute whatever has a recipe."""
    return paper_machine(fast, *slow, bandwidth_bytes_per_second=1e6, latency_seconds=1.0)


FAST_DISK = fast_machine("ram", Tier("disk", "disk"))
SLOW_DISK = slow_machine("ram", Tier("disk", "disk"))
NO_DISK = fast_machine("ram")


class Program:
    """A user's training loop: a model, an optimizer, and the code of one step, all on PyTorch's default device.

    Everything it computes follows from its seed. Subclasses give `build` and `loss`, or `compute` where the step is
    more than ``loss().backward()``.

    Attributes:
        steady: all steps are of one kind and lie inside ``with memory.step()``, so the plan's peak can be measured.
        holds_more: some step holds much that others of its kind do not, and may pass a limit: what is warned of has
            to be so.
        offloads, recomputes: whether a tight plan is expected to contain such decisions.
    """

    steady = True
    holds_more = False
    offloads = True
    recomputes = True

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model: Any = self.build()  # whatever kind of module: subclasses know which
        self.optimizer = self.optimize()
        self.kept: Record = {}

    def build(self) -> nn.Module:
        """The model; a `ModuleDict` if there are several."""
        raise AssertionError(f"{type(self).__name__} does not say what its model is")

    def optimize(self) -> torch.optim.Optimizer:
        """The optimizer of all parameters."""
        return torch.optim.SGD(self.model.parameters(), lr=0.01, momentum=0.9)

    def data(self, index: int, *shape: int) -> Tensor:
        """The input of step ``index``: normal numbers that do not touch the global random state."""
        dice = torch.Generator("cpu").manual_seed(1000 + index)
        return torch.randn(*shape, generator=dice, device="cpu").to(torch.get_default_device())

    def integers(self, index: int, below: int, *shape: int) -> Tensor:
        """The same with numbers from 0 on."""
        dice = torch.Generator("cpu").manual_seed(index)
        return torch.randint(below, shape, generator=dice, device="cpu").to(torch.get_default_device())

    def loss(self, index: int) -> Tensor:
        """The loss of step ``index``, inside the step; not needed by a program with its own `compute`."""
        raise AssertionError(f"{type(self).__name__} has neither a loss nor its own way to compute")

    def compute(self, index: int, guard: Guard) -> Record:
        """Forward and backward of step ``index``; returns what the user looks at."""
        with guard():
            loss = self.loss(index)
            loss.backward()
        return {"loss": loss}

    def update(self) -> None:
        """What the user does between steps."""
        self.optimizer.step()
        self.optimizer.zero_grad()

    def run(self, index: int, guard: Guard) -> Record:
        """One turn of the loop; returns copies of all that a user could see of it."""
        shown = {**self.compute(index, guard), **self.kept}
        record = {name: tensor.detach().clone() for name, tensor in shown.items()}
        record |= {f"grad of {name}": p.grad.clone() for name, p in self.model.named_parameters() if p.grad is not None}
        self.update()
        record |= {name: parameter.detach().clone() for name, parameter in self.model.named_parameters()}
        record |= {f"buffer {name}": buffer.clone() for name, buffer in self.model.named_buffers()}
        record["random state"] = torch.get_rng_state()
        if torch.get_default_device().type == "cuda":
            record["random state of the device"] = torch.cuda.get_rng_state()
        return record


@dataclasses.dataclass
class Trial:
    """What happened in a run under a budget: its limit, the state of each step, the last plan, those of all kinds of
    steps, what differed."""

    limit_bytes: int
    states: list[str]
    plan: Plan | None
    plans: list[Plan]
    banned: frozenset[int]

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of the last plan."""
        return self.plan.decisions if self.plan is not None else ()

    @property
    def every_decision(self) -> list[Decision]:
        """The decisions of all plans."""
        return [decision for plan in self.plans for decision in plan.decisions]


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor, in RAM."""
    return tensor.contiguous().reshape(-1).view(torch.uint8).cpu()


def identical(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors have the same type, shape and bits."""
    if (one.dtype, one.shape, one.layout) != (other.dtype, other.shape, other.layout):
        return False
    if one.layout is torch.sparse_coo:
        pairs = ((one._indices(), other._indices()), (one._values(), other._values()))
        return all(identical(a, b) for a, b in pairs)
    return torch.equal(bits(one), bits(other))


def compare(expected: Record, found: Record, where: str) -> None:
    """Fail, naming every tensor that is not bit for bit what plain PyTorch computes."""
    assert found.keys() == expected.keys(), f"{where}: {found.keys() ^ expected.keys()} is in one run only"
    wrong = [name for name in expected if not identical(expected[name], found[name])]
    assert not wrong, f"{where}: not identical to plain PyTorch: {', '.join(wrong)}"


def once(make: Callable[[Key], Made]) -> Callable[[Key], Made]:
    """`functools.cache` for functions of a class: mypy takes the hash of its instances for its own."""
    return functools.cache(make)


def run_plain(build: Callable[[], Program], steps: int = STEPS) -> list[Record]:
    """The records of a run without ebbtide."""
    program = build()
    return [program.run(index, contextlib.nullcontext) for index in range(steps)]


@once
def plain_peak_bytes(kind: type[Program]) -> int:
    """What the first plain step holds."""
    with PeakMeter() as meter:
        kind().compute(0, contextlib.nullcontext)
    return meter.peak_bytes


def allowed_raises(build: Callable[[], Program]) -> int:
    """How often a limit that many programs are given may be raised for this one, where it is below what is reachable:
    once if its steps are all of one kind; of others, the largest may come late."""
    return 1 if build().steady else 3


def assert_identical_within(
    build: Callable[[], Program],
    expected: list[Record],
    limit: int | str,
    machine: Machine,
    spill: Path,
    prepare: Callable[[ebbtide.Budget], None] = lambda memory: None,
    *,
    metered: bool = True,
    may_raise_limit: int = 0,
) -> Trial:
    """Run a program under a budget, and fail unless every step is bit for bit as ``expected``, that is as in plain
    PyTorch, and the peaks of planned steps are those of their plans.

    Args:
        build: makes the program.
        expected: the records of a plain run.
        limit: of the budget.
        machine: of the budget.
        spill: of the budget.
        prepare: called with the budget before its first step.
        metered: whether steps run under a meter that compares their peaks with the plan's, as where tensors are all
            that a budget counts. Programs that are not steady have none.
        may_raise_limit: how often the limit may be raised where no plan meets it: to 1.02 x the least reachable peak.
    """
    raises = 0
    while True:
        try:
            return _compare_within(build, expected, limit, machine, spill, prepare, metered)
        except BudgetError as error:
            if raises == may_raise_limit:
                raise
            refused = error.with_traceback(None)  # which keeps the program, and on a device all that lies there counts
        gc.collect()
        assert refused.reachable_bytes > refused.limit_bytes, f"refused, but said to be reachable: {refused}"
        limit = int(refused.reachable_bytes * 1.02)
        raises += 1


def _compare_within(
    build: Callable[[], Program],
    expected: list[Record],
    limit: int | str,
    machine: Machine,
    spill: Path,
    prepare: Callable[[ebbtide.Budget], None],
    metered: bool,
) -> Trial:
    program = build()
    states: list[str] = []
    with ebbtide.Budget(limit, spill=spill, machine=machine) as memory:
        prepare(memory)
        for index, record in enumerate(expected):
            counts = metered and program.steady and index in METERED
            guard = (lambda: _metered_step(memory)) if counts else memory.step
            if program.holds_more:
                guard = lambda: rightly_warned_step(memory)  # noqa: E731
            states.append(memory.state)
            compare(record, program.run(index, guard), f"step {index} ({states[-1]}), limit {limit}")
        assert memory.limit_bytes is not None
        kind = latest_kind(memory)
        plans = [each.plan for each in kinds_of(memory) if each.plan is not None]
        return Trial(memory.limit_bytes, states, memory.plan, plans, kind.banned if kind is not None else frozenset())


def divided(solve: Solver, *tiers: str) -> Solver:
    """A planner whose plans compute nothing again, and send what leaves to each of ``tiers`` in turn."""

    def solve_divided(step: Step, *arguments: Any, **options: Any) -> Plan:
        plan = solve(step, *arguments, **options | {"banned": frozenset(range(len(step.absences)))})
        turns = itertools.cycle(tiers)
        decisions = tuple(
            dataclasses.replace(d, tier=next(turns)) if isinstance(d, Offload) else d for d in plan.decisions
        )
        return dataclasses.replace(plan, decisions=decisions)

    return solve_divided


def deeper(solve: Solver) -> Solver:
    """A planner whose plans compute values again from as far back as they may within the limit."""

    def solve_deeper(step: Step, machine: Machine, limit_bytes: int, **options: Any) -> Plan:
        plan = solve(step, machine, limit_bytes, **options)
        facts, decisions, outcome = Facts.of(step), list(plan.decisions), None
        for number, decision in enumerate(plan.decisions):
            if isinstance(decision, Recompute):
                for ops in reversed(deeper_recipes(facts, step.absences[number], decision.ops)):
                    changed = [*decisions[:number], Recompute(ops), *decisions[number + 1 :]]
                    found = simulate(step, machine, changed)
                    if found.peak_bytes <= limit_bytes:
                        decisions, outcome = changed, found
                        break
        if outcome is None:
            return plan
        return dataclasses.replace(plan, decisions=tuple(decisions), peak_bytes=outcome.peak_bytes)

    return solve_deeper


@contextlib.contextmanager
def _metered_step(memory: ebbtide.Budget) -> Iterator[None]:
    """A step whose peak must be the planned one, byte for byte."""
    with PeakMeter() as meter, memory.step():
        yield
    assert memory.plan is not None, f"still without a plan ({memory.state})"
    held, planned = meter.peak_bytes, memory.plan.peak_bytes
    assert held == planned, f"the measured peak, {held}, is not the planned one, {planned} ({memory.state})"
    assert meter.peak_bytes <= memory.plan.limit_bytes, "above the budget"


@contextlib.contextmanager
def rightly_warned_step(memory: ebbtide.Budget) -> Iterator[None]:
    """A step that may hold more than others of its kind: if that is warned of, it passed the limit."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.filterwarnings("always", HELD_MORE, UserWarning)
        with PeakMeter() as meter, memory.step():
            yield
    assert memory.limit_bytes is not None or not caught
    for warning in caught:
        assert re.match(HELD_MORE, str(warning.message))
        assert meter.peak_bytes > (memory.limit_bytes or 0), f"warned of for nothing: {warning.message}"


def gradients_beside_a_buffer(
    layers: nn.ModuleList, shift: Tensor, rows: int, writes: bool, guard: Guard
) -> list[Tensor]:
    """Gradients of ``layers``, to whose outputs ``shift`` is added: one step on so many ``rows``, which writes to the
    buffer between its forward and its backward pass or not."""
    shift.zero_()
    h = torch.ones(rows, 128)
    with guard():
        for layer in layers:
            h = torch.sigmoid(layer(h) + shift)
        if writes:
            shift.add_(1)
        return list(torch.autograd.grad(h.square().mean(), list(layers.parameters())))
