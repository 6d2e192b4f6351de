"""Graphs that are kept for another backward pass: when saved values may be away between the passes."""

from __future__ import annotations

import collections
import itertools
from collections.abc import Callable

import torch
from torch import Tensor, nn

from ebbtide.run.observing import observe_step
from ebbtide.step import Absence, Step


def model() -> nn.Module:
    """What it saves for GELU is nobody else's."""
    return nn.Sequential(*[layer for _ in range(4) for layer in (nn.Linear(32, 32), nn.GELU())])


def observed(run: Callable[[Tensor], None]) -> Step:
    """The step that calls ``run`` with the output of a model."""
    net, x = model(), torch.randn(64, 32)
    return observe_step(lambda: run(net(x)))


def absences(step: Step) -> dict[int, list[Absence]]:
    """Those of each value, in order."""
    found: dict[int, list[Absence]] = collections.defaultdict(list)
    for absence in step.absences:
        found[absence.value].append(absence)
    return found


def asked(step: Step, value: int) -> list[int]:
    """The moments at which autograd asks for a value."""
    return sorted(moment for saved in step.saved if saved.value == value for moment in saved.unpacked)


def passes(step: Step) -> int:
    """How often the saved tensor that is asked for most often is."""
    return max(len(saved.unpacked) for saved in step.saved)


def check(step: Step) -> None:
    """Between two absences of a value autograd asks for it; in none of them anybody does."""
    for value, gaps in absences(step).items():
        moments = asked(step, value)
        for gap in gaps:
            assert gap.closes in moments
            assert not any(gap.opens <= moment < gap.closes for moment in moments)
        for former, later in itertools.pairwise(gaps):
            assert former.closes < later.opens


def test_a_value_has_an_absence_before_each_pass() -> None:
    def run(y: Tensor) -> None:
        y.square().mean().backward(retain_graph=True)
        y.abs().sum().backward(retain_graph=True)
        y.sum().backward()

    step = observed(run)
    check(step)
    counts = collections.Counter(len(gaps) for gaps in absences(step).values())
    assert passes(step) == 3
    assert counts[3] >= 6  # three inner GELUs, four inputs of layers but for the first


def test_one_pass_has_one_absence_of_what_it_asks_for_twice() -> None:
    def run(y: Tensor) -> None:
        z = y.tanh()  # saved by itself and by each of these
        a, b = z.square(), z.exp()
        del y, z
        (a.sin() * b.cos()).sum().backward()

    step = observed(run)
    check(step)
    assert max(len(asked(step, value)) for value in absences(step)) >= 2
    assert all(len(gaps) == 1 for gaps in absences(step).values())


def test_what_the_loop_holds_during_the_first_pass_may_leave_after_it() -> None:
    def run(y: Tensor) -> None:
        held = y.exp()  # exp saves its result
        loss = held.sin().sum()
        loss.backward(retain_graph=True)
        del held
        torch.ones(8).sum()
        loss.backward()

    step = observed(run)
    check(step)
    made = next(op.outputs[0] for op in step.ops if op.name == "aten.exp.default")
    (absence,) = absences(step)[made]
    first, *_, last = asked(step, made)
    assert first < absence.opens < absence.closes <= last


def test_gradients_of_gradients() -> None:
    net, x = model(), torch.randn(64, 32, requires_grad=True)

    def run() -> None:
        (slope,) = torch.autograd.grad(net(x).sum(), x, create_graph=True)
        slope.square().mean().backward()

    step = observe_step(run)
    check(step)
    assert sum(len(gaps) == 2 for gaps in absences(step).values()) >= 3


def test_asking_outside_of_a_backward_pass_is_no_gap() -> None:
    seen = []

    def run(y: Tensor) -> None:
        z = y.exp()
        node = z.grad_fn
        assert node is not None
        loss = z.sum()
        del z
        seen.append(node._saved_result.sum().item())  # type: ignore[attr-defined]
        loss.backward()

    step = observed(run)
    check(step)
    assert seen
    made = next(op.outputs[0] for op in step.ops if op.name == "aten.exp.default")
    (absence,) = absences(step)[made]
    first, last = asked(step, made)
    assert first < absence.opens < absence.closes == last
