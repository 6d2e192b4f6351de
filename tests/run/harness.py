"""Runs a program plain and under a budget, and compares the two bit for bit after every step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.decisions import Decision, Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Link, Machine, Tier
from ebbtide.run.meter import PeakMeter

Guard = Callable[[], AbstractContextManager[object]]
Record = dict[str, Tensor]

STEPS = 8
"""Enough for every state of a budget (it observes, verifies and audits first) and a few planned steps."""
METERED = (STEPS - 3, STEPS - 1)
"""Steps that run under a `PeakMeter`; the one between them shows that the result does not depend on the meter."""


def machine_with_disk(bandwidth_bytes_per_second: float, latency_seconds: float = 1e-5) -> Machine:
    """A machine, on paper, whose disk has this speed. What the disk really does is another matter."""
    rate = bandwidth_bytes_per_second
    links = tuple(Link(a, b, latency_seconds, rate, rate) for a, b in (("ram", "disk"), ("disk", "ram")))
    return Machine("paper", "ram", (Tier("ram", "device"), Tier("disk", "disk")), links)


FAST_DISK = machine_with_disk(1e12, 1e-7)
"""Offloading costs nothing: plans offload."""
SLOW_DISK = machine_with_disk(1e6, 1.0)
"""Offloading costs seconds: plans recompute whatever has a recipe."""


class Program:
    """A user's training loop: a model, an optimizer, and the code of one step.

    Everything it computes follows from its seed. Subclasses give `build` and `loss`, or `compute` where the step is
    more than ``loss().backward()``.

    Attributes:
        steady: all steps are of one kind and lie inside ``with memory.step()``, so the plan's peak can be measured.
        offloads, recomputes: whether a tight plan is expected to contain such decisions.
    """

    steady = True
    offloads = True
    recomputes = True

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        self.model = self.build()
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
        return torch.randn(*shape, generator=torch.Generator().manual_seed(1000 + index))

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
        return record


@dataclasses.dataclass
class Trial:
    """What happened in a run under a budget: its limit, the state of each step, the last plan."""

    limit_bytes: int
    states: list[str]
    plan: Plan | None

    @property
    def decisions(self) -> tuple[Decision, ...]:
        """The decisions of the last plan."""
        return self.plan.decisions if self.plan is not None else ()


def bits(tensor: Tensor) -> Tensor:
    """The bytes of a dense tensor."""
    return tensor.contiguous().reshape(-1).view(torch.uint8)


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


def run_plain(build: Callable[[], Program], steps: int = STEPS) -> list[Record]:
    """The records of a run without ebbtide."""
    program = build()
    return [program.run(index, contextlib.nullcontext) for index in range(steps)]


def run_within(
    build: Callable[[], Program],
    expected: list[Record],
    limit: int | str,
    machine: Machine,
    spill: Path,
    prepare: Callable[[ebbtide.Budget], None] = lambda memory: None,
) -> Trial:
    """Run a program under a budget, once it was prepared, and compare every step with plain PyTorch.

    A budget that no plan meets is asked for again at 1.02 x the least reachable peak; that one must work, if all steps
    are of one kind. Of others, the largest may come late.
    """
    for _ in range(1 if build().steady else 3):
        try:
            return _run_within(build, expected, limit, machine, spill, prepare)
        except BudgetError as error:
            refused = error
        assert refused.reachable_bytes > refused.limit_bytes, f"refused, but said to be reachable: {refused}"
        limit = int(refused.reachable_bytes * 1.02)
    return _run_within(build, expected, limit, machine, spill, prepare)


def _run_within(
    build: Callable[[], Program],
    expected: list[Record],
    limit: int | str,
    machine: Machine,
    spill: Path,
    prepare: Callable[[ebbtide.Budget], None],
) -> Trial:
    program = build()
    states: list[str] = []
    with ebbtide.Budget(limit, spill=spill, machine=machine) as memory:
        prepare(memory)
        for index, record in enumerate(expected):
            metered = program.steady and index in METERED
            guard = (lambda: _metered_step(memory)) if metered else memory.step
            states.append(memory.state)
            compare(record, program.run(index, guard), f"step {index} ({states[-1]}), limit {limit}")
        assert memory.limit_bytes is not None
        return Trial(memory.limit_bytes, states, memory.plan)


@contextlib.contextmanager
def _metered_step(memory: ebbtide.Budget) -> Iterator[None]:
    """A step whose peak must be the planned one, byte for byte."""
    with PeakMeter() as meter, memory.step():
        yield
    assert memory.plan is not None, f"still without a plan ({memory.state})"
    assert meter.peak_bytes == memory.plan.peak_bytes, "the measured peak is not the planned one"
    assert meter.peak_bytes <= memory.plan.limit_bytes, "above the budget"
