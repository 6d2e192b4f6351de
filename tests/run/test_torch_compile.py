"""Code compiled by `torch.compile` runs compiled under a budget, and exactly as it does without one."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._dynamo.utils import counters

import ebbtide
from ebbtide.decisions import Offload, Recompute
from ebbtide.errors import BudgetError
from ebbtide.observe import inductor
from ebbtide.run.observing import observe_step
from tests.run.harness import FAST_DISK, SLOW_DISK
from tests.run.inside import kinds_of

STEPS = 6

pytestmark = [
    pytest.mark.usefixtures("quick_plans"),
    # PyTorch's own: of a tensor that has a graph, and where Inductor is imported
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning:torch"),
]
needs_compiler = pytest.mark.skipif(shutil.which("g++") is None, reason="Inductor needs a C++ compiler")


class Compiled:
    """A backend of `torch.compile` that counts how often what it made runs."""

    def __init__(self) -> None:
        self.runs = 0

    def __call__(self, graph: torch.fx.GraphModule, _: list[Tensor]) -> Any:
        """See `torch.compile`."""

        def run(*values: Tensor) -> Any:
            self.runs += 1
            return graph.forward(*values)

        return run


@pytest.fixture(autouse=True)
def _fresh() -> Any:
    torch.compiler.reset()
    counters.clear()
    yield
    torch.compiler.reset()


def model() -> nn.Sequential:
    torch.manual_seed(3)
    return nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(96, 96), nn.LayerNorm(96), nn.GELU())))


def gradients(net: nn.Module, call: Any, batch: Tensor) -> list[Tensor]:
    net.zero_grad()
    call(batch).square().mean().backward()
    return [p.grad.clone() for p in net.parameters() if p.grad is not None]


def under(budget: ebbtide.Budget, net: nn.Module, call: Any, batch: Tensor) -> list[Tensor]:
    with budget.step():
        return gradients(net, call, batch)


def equal(some: list[Tensor], others: list[Tensor]) -> bool:
    return all(torch.equal(a, b) for a, b in zip(some, others, strict=True))


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["offload", "recompute"])
@pytest.mark.parametrize("warm", [False, True], ids=["new", "compiled before"])
@pytest.mark.parametrize("may", [True, False], ids=["compiled", "as written"])
def test_steps_are_those_of_the_model(
    machine: Any, warm: bool, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also with a PyTorch that compiles nothing under a mode: then a warning says so."""
    monkeypatch.setattr(inductor, "_MODES_MAY_STAY", may)
    batch, backend = torch.randn(400, 96), Compiled()
    expected = gradients(net := model(), net, batch)
    net = model()
    compiled = torch.compile(net, backend=backend)
    if warm:
        gradients(net, compiled, batch)
    runs = backend.runs
    with ebbtide.Budget("60%", spill=tmp_path, machine=machine) as budget:
        if may:
            found = [under(budget, net, compiled, batch) for _ in range(STEPS)]
        else:
            with pytest.warns(UserWarning, match="without torch.compile"):
                found = [under(budget, net, compiled, batch) for _ in range(STEPS)]
        assert all(equal(expected, step) for step in found)
        assert budget.plan is not None
        assert budget.plan.peak_bytes <= budget.plan.limit_bytes
        assert budget.plan.peak_bytes < budget.plan.plain_peak_bytes
        assert budget.state == "planned"
    assert backend.runs == runs + (STEPS if may else 0)
    gradients(net, compiled, batch)
    assert backend.runs > runs


def test_a_compiled_function_does_not_make_a_plan_invalid(tmp_path: Path) -> None:
    batch, backend, net = torch.randn(400, 96), Compiled(), model()
    loss = torch.compile(lambda outputs: (outputs * 2).exp().clamp(max=9).square(), backend=backend)
    expected = gradients(net, lambda given: loss(net(given)), batch)
    runs = backend.runs
    assert runs > 0
    with ebbtide.Budget("60%", spill=tmp_path, machine=SLOW_DISK) as budget:
        for _ in range(STEPS):
            assert equal(expected, under(budget, net, lambda given: loss(net(given)), batch))
        assert budget.state == "planned"
    assert backend.runs == runs + STEPS


PIECES: list[Any] = [
    lambda layer, norm, x: F.gelu(layer(norm(x))),
    lambda layer, norm, x: torch.tanh(layer(x)).exp(),
    lambda layer, norm, x: norm(F.relu(layer(x))) + x,
    lambda layer, norm, x: F.dropout(layer(x), 0.2) * 2,
]


@pytest.mark.parametrize("may", [True, False], ids=["compiled", "as written"])
@pytest.mark.parametrize("seed", range(4))
def test_recomputing_between_calls_of_compiled_functions(
    seed: int, may: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """PyTorch restores its dispatcher's state behind such calls: no mode may be put on or taken off in them."""
    monkeypatch.setattr(inductor, "_MODES_MAY_STAY", may)
    choose, batch = random.Random(seed), torch.randn(200, 64)
    compiled = [torch.compile(piece, backend="eager") for piece in PIECES]
    torch.manual_seed(seed)
    parts, calls = nn.ModuleList(), []
    for _ in range(10):
        which = choose.randrange(len(PIECES))
        parts.append(nn.ModuleList([nn.Linear(64, 64), nn.LayerNorm(64)]))
        calls.append(choose.choice([compiled, PIECES])[which])

    def call(x: Tensor) -> Tensor:
        torch.manual_seed(seed)
        for part, piece in zip(parts, calls, strict=True):
            x = piece(*part, x)  # type: ignore[misc]
        return x

    expected = gradients(parts, call, batch)
    with ebbtide.Budget("60%", spill=tmp_path, machine=SLOW_DISK) as budget:
        for _ in range(STEPS):
            assert equal(expected, under(budget, parts, call, batch))
        assert budget.plan is not None
        assert any(isinstance(decision, Recompute) for decision in budget.plan.decisions)
        assert budget.state == "planned"


def test_compiling_between_two_planned_steps(tmp_path: Path) -> None:
    """What is saved stays the same, but modes must not go on and off any more: steps are planned for anew, once."""
    batch, net, backend = torch.randn(400, 96), model(), Compiled()
    expected = gradients(net, net, batch)
    with ebbtide.Budget("60%", spill=tmp_path, machine=SLOW_DISK) as budget:
        for _ in range(STEPS):
            assert equal(expected, under(budget, net, net, batch))
        assert budget.state == "planned"
        compiled = torch.compile(net, backend=backend)
        for _ in range(3 * STEPS):
            assert equal(expected, under(budget, net, compiled, batch))
        assert budget.state == "planned"
        assert sum(bool(measured.left) for measured in budget._loop.measured) == 1
        assert budget.plan is not None
        assert any(isinstance(decision, Recompute) for decision in budget.plan.decisions)
    assert backend.runs == 3 * STEPS


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["offload", "recompute"])
def test_nothing_of_ours_is_compiled_within_modules_that_pytorch_leaves_as_they_are(
    machine: Any, tmp_path: Path
) -> None:
    """Nor of the standard library, which our hooks and modes call: PyTorch skips files, not what runs from within."""
    batch, net = torch.randn(400, 96), nn.Sequential(model(), model())
    for block in net:
        block.compile(backend="aot_eager")
    expected = gradients(net, net, batch)
    frames = dict(counters["frames"])  # none, or with PyTorch 2.14 those of the blocks
    with ebbtide.Budget("60%", spill=tmp_path, machine=machine) as budget:
        for _ in range(STEPS):
            assert equal(expected, under(budget, net, net, batch))
        assert budget.state == "planned"
    assert counters["frames"] == frames


@pytest.mark.parametrize("smallest", [256, 128])
def test_steps_that_turn_out_to_be_of_another_kind_within_a_compiled_call(smallest: int, tmp_path: Path) -> None:
    """No mode could be put on there: the one that is on goes on, and captures what the other kind's plan needs. The
    plan for batches of 128 needs no calls itself."""
    net, choose = model(), random.Random(0)
    compiled = torch.compile(net, backend=Compiled(), dynamic=True)
    batches = [torch.randn(size, 96) for size in (smallest, 320, 400)]
    expected = [gradients(net, net, batch) for batch in batches]
    with ebbtide.Budget(1_400_000, spill=tmp_path, machine=SLOW_DISK) as budget:
        for step in range(48):
            which = step % 3 if step < 12 else choose.randrange(3)
            assert equal(expected[which], under(budget, net, compiled, batches[which]))
        assert len(budget._loop.kinds) == 3
        for kind in kinds_of(budget):
            assert kind.script is not None
            assert kind.script.remakes == (kind.script.saves[0].shape[0] >= 256)
        assert [measured.left for measured in budget.measured[12:]] == [""] * 36
        states = [kind.state for kind in kinds_of(budget)]
        assert states == ["planned" if smallest == 256 else "idle", "planned", "planned"]


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.wide, self.narrow = nn.LayerNorm(96), nn.Linear(96, 384), nn.Linear(384, 96)

    def forward(self, x: Tensor) -> Tensor:
        return x + F.dropout(self.narrow(F.gelu(self.wide(self.norm(x)))), 0.1)


def blocks() -> nn.Sequential:
    torch.manual_seed(5)
    return nn.Sequential(*(Block() for _ in range(6)))


def seeded(call: Any) -> Any:
    def run(x: Tensor) -> Tensor:
        torch.manual_seed(7)
        return torch.relu(call(x)) * 2

    return run


@needs_compiler
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast disk", "slow disk"])
def test_graphs_of_inductor_are_ops_whose_results_move(machine: Any, tmp_path: Path) -> None:
    batch, net = torch.randn(300, 96), blocks()
    for block in net:
        block.compile()
    expected, graphs = gradients(net, seeded(net), batch), counters["stats"]["unique_graphs"]
    torch.compiler.reset()  # compiled anew in the first step that is observed
    counters.clear()
    with ebbtide.Budget("65%", spill=tmp_path, machine=machine) as budget:
        for _ in range(STEPS):
            assert equal(expected, under(budget, net, seeded(net), batch))
        assert counters["stats"]["unique_graphs"] == graphs > 0
        assert not counters["graph_break"]
        assert budget.plan is not None
        assert budget.observed is not None
        assert sum(op.name == "compiled_graph" for op in budget.observed.ops) == 2 * len(net)
        assert sum(isinstance(decision, Offload) for decision in budget.plan.decisions) > 0
        assert budget.plan.peak_bytes <= budget.plan.limit_bytes < budget.plan.plain_peak_bytes
        assert budget.state == "planned"
        counted = [measured.peak_bytes for measured in budget._loop.measured if measured.peak_bytes is not None]
        assert max(counted) == budget.plan.peak_bytes


@needs_compiler
def test_a_budget_too_small_for_one_graph_runs_uncompiled(tmp_path: Path) -> None:
    batch, net = torch.randn(300, 96), blocks()
    expected = gradients(net, seeded(net), batch)
    whole = torch.compile(net)
    with ebbtide.Budget("70%", spill=tmp_path, machine=FAST_DISK) as budget:
        with pytest.warns(UserWarning, match="compile the model's blocks instead of the whole model"):
            found = [under(budget, net, seeded(whole), batch) for _ in range(2 + STEPS)]
        assert all(equal(expected, step) for step in found[2:])
        assert budget.state == "planned"
        assert budget.plan is not None
        assert budget.plan.peak_bytes <= budget.plan.limit_bytes < budget.plan.plain_peak_bytes


@pytest.mark.parametrize("backend", ["eager", "aot_eager"])
def test_a_budget_too_small_for_what_another_backend_made_runs_uncompiled(backend: str, tmp_path: Path) -> None:
    """Its graph of several ops is seen op by op, and needs all that it has saved at once, too."""
    batch, net = torch.randn(300, 96), blocks()
    whole = torch.compile(net, backend=backend)
    with ebbtide.Budget("70%", spill=tmp_path, machine=FAST_DISK) as budget:
        if backend == "eager":  # what it runs are the ops of the model
            found = [under(budget, net, seeded(whole), batch) for _ in range(STEPS)]
            assert budget._loop.compiles
        else:
            with pytest.warns(UserWarning, match="compile the model's blocks instead of the whole model"):
                found = [under(budget, net, seeded(whole), batch) for _ in range(2 + STEPS)]
        assert equal(gradients(net, seeded(net), batch), found[-1])
        assert budget.state == "planned"
        assert budget.plan is not None
        assert budget.plan.peak_bytes <= budget.plan.limit_bytes < budget.plan.plain_peak_bytes


def test_a_budget_too_small_for_a_model_that_is_not_compiled_is_an_error(tmp_path: Path) -> None:
    batch, net, other = torch.randn(300, 96), blocks(), torch.compile(nn.Linear(96, 96), backend="aot_eager")
    with ebbtide.Budget("10%", spill=tmp_path, machine=FAST_DISK) as budget:
        other(batch)
        under(budget, net, seeded(net), batch)
        with pytest.raises(BudgetError):
            under(budget, net, seeded(net), batch)
    assert budget._loop.compiles


def test_operators_that_compile_functions_for_themselves_compile_no_step(tmp_path: Path) -> None:
    def step() -> None:
        h = torch.cond(weight.sum() > 0, torch.sin, torch.cos, (weight,))
        h.square().sum().backward()

    weight = torch.randn(64, 64, requires_grad=True)
    with ebbtide.Budget("10%", spill=tmp_path, machine=FAST_DISK) as budget:
        with budget.step():
            step()
        with pytest.raises(BudgetError, match="cannot be met") as refused, budget.step():
            step()
    assert "torch.compile" not in str(refused.value)
    assert budget._loop.compiles


def test_what_is_observed_is_the_model_as_it_was_written() -> None:
    batch, backend, net = torch.randn(400, 96), Compiled(), model()
    plain = observe_step(lambda: gradients(net, net, batch))
    call = torch.compile(net.forward, backend=backend)
    gradients(net, call, batch)
    seen = observe_step(lambda: gradients(net, call, batch))
    assert [op.name for op in seen.ops] == [op.name for op in plain.ops]


def test_a_step_that_fails_leaves_the_compiler_as_it_was(tmp_path: Path) -> None:
    batch, backend, net = torch.randn(40, 96), Compiled(), model()
    call = torch.compile(net.forward, backend=backend)
    gradients(net, call, batch)
    runs = backend.runs
    with (
        ebbtide.Budget("90%", spill=tmp_path, machine=FAST_DISK) as budget,
        pytest.raises(ZeroDivisionError),
        budget.step(),
    ):
        raise ZeroDivisionError
    gradients(net, call, batch)
    assert backend.runs > runs


def test_a_compiled_cell_is_run_as_it_was_written() -> None:
    torch.manual_seed(4)
    layer, state, inputs = nn.Linear(24, 24), torch.randn(8, 24), [torch.randn(8, 24) for _ in range(12)]

    def cell(state: Tensor, given: Tensor) -> tuple[Tensor, None]:
        return torch.tanh(layer(state) + given), None

    last = state
    for given in inputs:
        last, _ = cell(last, given)
    last.sum().backward()
    expected = [p.grad.clone() for p in layer.parameters() if p.grad is not None]
    layer.zero_grad()
    backend = Compiled()
    final, _ = ebbtide.scan(torch.compile(cell, backend=backend), state, inputs, memory="24KiB")
    final.sum().backward()
    assert torch.equal(final, last)
    assert all(torch.equal(a, p.grad) for a, p in zip(expected, layer.parameters(), strict=True) if p.grad is not None)
    assert backend.runs == 0
