"""The benchmark's chains and methods: right gradients, and the same from every method."""

from __future__ import annotations

import copy
import importlib.util
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest
import torch

from benchmarks.sequence import Case, Sweep, cases, run_case, tables
from benchmarks.sequence_cells import Array, LSTMOperators, Pair, Wave, make_cell
from benchmarks.sequence_methods import METHODS
from benchmarks.sequence_plot import draw

NEEDS = {"pyrevolve": "pyrevolve", "h-revolve": "checkpoint_schedules"}
N = 40


@pytest.mark.filterwarnings("ignore:The given NumPy array is not writable")
def test_every_method_gives_the_same(tmp_path: Path) -> None:
    for name in ("wave", "heavy-wave", "lstm"):
        cell = make_cell(name)
        found = {}
        for method in ("ours", "revolve", "store-all", "pyrevolve", "h-revolve"):
            if name == "heavy-wave" and method == "pyrevolve":
                continue  # it runs the step before the reverse, over what that looks at
            if method not in NEEDS or importlib.util.find_spec(NEEDS[method]) is not None:
                answer = METHODS[method](cell, N, 6, str(tmp_path))
                assert answer is not None
                found[method] = answer["adjoint"]
        assert len(set(found.values())) == 1, found


def pair(parts: Iterable[Array]) -> Pair:
    now, before = parts
    return now, before


def test_adjoints_of_the_lstm_are_autograds() -> None:
    """Of the state and of all weights, after some steps."""
    cell = LSTMOperators()
    rng = np.random.default_rng(0)
    state, (of_h, of_c) = (pair(0.5 * rng.standard_normal(part.shape, np.float32) for part in cell.start) for _ in "12")
    h, c = (torch.from_numpy(part).clone().requires_grad_() for part in state)
    module, steps = copy.deepcopy(cell.module), 3
    module.zero_grad()
    final = (h, c, torch.zeros(()))
    for step in range(steps):
        final, _ = module.cell(final, step)
    torch.autograd.backward([final[2], *final[:2]], [None, torch.from_numpy(of_h), torch.from_numpy(of_c)])
    states = [state]
    for step in range(steps):
        states.append(cell.forward(states[-1], step))
    adjoint: Pair = (of_h, of_c)
    for step in reversed(range(steps)):
        adjoint = cell.reverse(states[step], adjoint, step)
    np.testing.assert_allclose(states[-1][0], final[0].detach(), rtol=1e-5, atol=1e-6)
    own = [torch.from_numpy(part) for part in adjoint] + [p.grad for p in cell.module.parameters()]
    for found, true in zip(own, [h.grad, c.grad, *(p.grad for p in module.parameters())], strict=True):
        assert found is not None
        torch.testing.assert_close(found, true, rtol=1e-4, atol=1e-6)


def test_gradient_of_the_wave() -> None:
    """Against finite differences, with respect to the field at the start."""
    wave = Wave(24)
    rng = np.random.default_rng(0)
    start = pair(part + 0.1 * rng.standard_normal(part.shape) * (wave.start[0] != 0) for part in wave.start)

    def final(state: Pair) -> Pair:
        state = pair(part.copy() for part in state)
        for step in range(N):
            state = wave.forward(state, step)
        return state

    states = [pair(part.copy() for part in start)]
    for step in range(N):
        states.append(wave.forward(pair(part.copy() for part in states[-1]), step))
    adjoint = wave.turn(states[-1])
    for step in reversed(range(N)):
        adjoint = wave.reverse(states[step], adjoint, step)
    direction = pair(1e-6 * rng.standard_normal(part.shape) * (wave.start[0] != 0) for part in start)
    above = final(pair(a + b for a, b in zip(start, direction, strict=True)))
    below = final(pair(a - b for a, b in zip(start, direction, strict=True)))
    expected = 0.25 * float(np.sum(above[0] ** 2) - np.sum(below[0] ** 2))
    inside = wave.start[0] != 0
    found = sum(float(np.sum((a * b)[inside])) for a, b in zip(adjoint, direction, strict=True))
    assert found == pytest.approx(expected, rel=1e-5)


class Stub:
    """A worker whose answers are known."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self.asked = 0

    def ask(self, n: int, count: int) -> dict[str, object] | None:
        self.asked += 1
        answer = {"seconds": self.seconds, "rss_bytes": 1 << 20, "adjoint": "a", "recompute_factor": 1.5}
        return answer | {"predicted_seconds": self.seconds * (0.5, 0.8, 1.0)[self.asked - 1]}


def test_records_and_tables(tmp_path: Path) -> None:
    team = {"ours": Stub(1.0), "pyrevolve": Stub(2.0)}
    records = run_case(Case("wave", 1000, 10, ("ours", "pyrevolve", "scan"), 3), team)  # type: ignore[arg-type]
    assert [(r.method, r.ratio, r.microseconds_per_step, r.same) for r in records] == [
        ("ours", 1.0, 1000.0, True),
        ("pyrevolve", 2.0, 2000.0, True),
    ]
    assert [record.over_predicted for record in records] == [1.25, 1.25]
    sweeps = [Sweep("wave", 1, 0.5, 1.0, 10, chosen=False), Sweep("wave", 4, 2.0, 0.01, 50, chosen=True)]
    assert [table.row_count for table in tables(records, sweeps)] == [2, 2]
    pytest.importorskip("matplotlib")
    draw(records, sweeps, tmp_path / "picture.png")
    assert (tmp_path / "picture.png").stat().st_size > 10_000


def test_cases() -> None:
    assert all(isinstance(case, Case) and case.methods[0] == "ours" for case in cases(small=False))
    assert {case.n for case in cases(small=False)} == {100, 300, 10**3, 10**4, 10**5, 10**6}
