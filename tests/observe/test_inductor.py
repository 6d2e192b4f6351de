"""What is recorded of graphs that `torch.compile` made, and of compiling."""

from __future__ import annotations

import shutil
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn

from ebbtide.observe.compiled_calls import compiled_calls
from ebbtide.observe.recorder import Recorder
from ebbtide.run.observing import observe_step
from ebbtide.step import EXTERNAL, Step

needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")
pytestmark = pytest.mark.filterwarnings("ignore::DeprecationWarning:torch")  # where Inductor is imported


@pytest.fixture(autouse=True)
def _fresh() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def graphs(step: Step) -> list[int]:
    return [tick for tick, op in enumerate(step.ops) if op.name == "compiled_graph"]


@needs_compiler
def test_a_graph_is_one_op_that_cannot_be_run_again() -> None:
    net = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.GELU(), nn.Linear(32, 32)))
    batch = torch.ones(8, 32)
    step = observe_step(lambda: net(batch).square().mean().backward())
    forward, backward = graphs(step)
    assert [op.phase for op in (step.ops[forward], step.ops[backward])] == ["forward", "backward"]
    assert step.ops[forward].replay == "opaque"
    assert step.ops[forward].module == "Sequential"
    made = {value for value in step.ops[forward].outputs if step.values[value].maker == forward}
    assert made
    saved = {saved.value for saved in step.saved}
    assert made & saved & set(step.ops[backward].inputs)
    assert {absence.value for absence in step.absences} <= made
    assert step.absences


@needs_compiler
def test_what_a_graph_writes_in_place_has_a_new_version() -> None:
    net = torch.compile(nn.Sequential(nn.Linear(32, 32), nn.BatchNorm1d(32)))
    step = observe_step(lambda: net(torch.ones(8, 32)).square().mean().backward())
    written = step.ops[graphs(step)[0]].mutated
    assert len(written) == 3  # mean, variance and number of batches
    assert all(step.values[old].maker == EXTERNAL for old, _ in written)
    assert all(step.values[old].storage == step.values[new].storage for old, new in written)

    def add(x: Tensor, bias: Tensor) -> Tensor:
        bias.add_(1)
        return (x * bias).exp()

    compiled = torch.compile(add)

    def run() -> None:
        x, bias = torch.randn(8, 8, requires_grad=True), torch.ones(8, 8) * 2
        (compiled(x, bias) * (bias * 3)).sum().backward()

    step = observe_step(run)
    tick = graphs(step)[0]
    ((old, new),) = step.ops[tick].mutated
    assert new in step.ops[tick + 1].inputs
    assert old not in step.ops[tick + 1].inputs


class Ticks:
    """A clock that a test sets."""

    def __init__(self) -> None:
        self.now = 0

    def mark(self) -> int:
        """The time."""
        return self.now

    def passed(self, _mark: int) -> bool:
        """Whether that is over."""
        return True

    def seconds(self, earlier: int, later: int) -> float:
        """What has passed."""
        return float(later - earlier)

    def fall_behind(self) -> None:
        """Nothing waits here."""

    def is_behind(self, _mark: int) -> bool:
        """As on a CPU."""
        return True


def test_compiling_is_no_part_of_the_step_and_sees_plain_modules() -> None:
    clock = Ticks()
    recorder = Recorder(clock=clock)
    linear = nn.Linear(4, 4)
    plain = nn.Module.__call__
    with recorder:
        linear(torch.ones(2, 4))
        assert nn.Module.__call__ is not plain
        clock.now += 3
        recorder.compiling(True)
        assert nn.Module.__call__ is plain
        clock.now += 1000
        recorder.compiling(False)
        assert nn.Module.__call__ is not plain
        clock.now += 4
        linear(torch.ones(2, 4))
    assert nn.Module.__call__ is plain
    assert sum(op.duration_seconds for op in recorder.finish().ops) == 7


def test_calls_of_compiled_functions_are_counted() -> None:
    double = torch.compile(lambda x: x * 2, backend="eager")
    before = compiled_calls()
    assert compiled_calls() == before
    double(torch.ones(2))
    assert compiled_calls() > before
    before = compiled_calls()
    torch.nn.Linear(2, 2)(torch.ones(2))
    torch.compiler.disable(lambda x: x * 2)(torch.ones(2))
    with torch.compiler.set_stance("force_eager"):
        assert compiled_calls() == before
        double(torch.ones(2))
    assert compiled_calls() > before
