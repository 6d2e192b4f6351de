"""Every program gives bit for bit the numbers of plain PyTorch under every budget, and keeps to the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import Tensor

import ebbtide
import tests.run.programs_rare  # noqa: F401  (registers its programs)
from ebbtide.decisions import Offload, Plan, Recompute
from ebbtide.machine import Machine
from ebbtide.observe.clock import HostClock
from ebbtide.plan.caution import Caution
from ebbtide.run.tiers import disk
from tests.run.faults import written_bytes
from tests.run.harness import (
    FAST_DISK,
    METERED,
    SLOW_DISK,
    Guard,
    Program,
    Record,
    Solver,
    allowed_raises,
    assert_identical_within,
    compare,
    deeper,
    identical,
    once,
    plain_peak_bytes,
    run_plain,
)
from tests.run.programs import PROGRAMS, SAID_BY_PYTORCH, Chain

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]

CASES: dict[str, tuple[str | float, Machine]] = {
    "fast-90": ("90%", FAST_DISK),
    "fast-60": (0.6, FAST_DISK),
    "fast-40": ("40%", FAST_DISK),
    "slow-80": ("80%", SLOW_DISK),
    "slow-50": (0.5, SLOW_DISK),
}
"""A share is given in bytes, so that values move in the first steps, too, of which a percentage says nothing."""


@once
def plain(kind: type[Program]) -> list[Record]:
    """The records of a plain run, made once."""
    return run_plain(kind)


@pytest.mark.parametrize("name", PROGRAMS)
def test_programs_are_deterministic(name: str) -> None:
    for index, record in enumerate(run_plain(PROGRAMS[name])):
        compare(plain(PROGRAMS[name])[index], record, f"step {index}")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", PROGRAMS)
def test_identical_to_plain(name: str, case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = PROGRAMS[name]
    limit, machine = CASES[case]
    if machine is FAST_DISK:  # links as steady as a device's: what is left free for a disk's is longer than these steps
        monkeypatch.setattr(Caution, "of", lambda *_, **__: Caution())
    within = limit if isinstance(limit, str) else int(limit * plain_peak_bytes(kind))
    trial = assert_identical_within(kind, plain(kind), within, machine, tmp_path, may_raise_limit=allowed_raises(kind))
    if kind.steady:
        expected = "planned" if trial.plan is not None and trial.plan.binds else "idle"
        if kind.recomputes:
            assert not trial.banned, "what was computed again differed"
        assert [trial.states[index] for index in METERED] == [expected] * len(METERED), trial.states
    if case == "fast-40" and kind.offloads:
        decisions = trial.decisions if kind.steady else trial.every_decision  # which kind comes last is chance
        assert any(isinstance(decision, Offload) for decision in decisions)
    if case == "slow-80" and kind.recomputes:
        assert any(isinstance(decision, Recompute) for decision in trial.decisions)


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_first_step_is_identical_within_bytes(name: str, tmp_path: Path) -> None:
    """Of a percentage nothing is known in it, and nothing moves."""
    kind = PROGRAMS[name]
    expected, limit_bytes = plain(kind)[0], int(0.5 * plain_peak_bytes(kind))
    program = kind()  # after the plain runs: it seeds the generator
    with ebbtide.Budget(limit_bytes, spill=tmp_path, machine=FAST_DISK) as memory:
        compare(expected, program.run(0, memory.step), "step 0")
        assert written_bytes(memory) > 0 or name == "Conditional", "only there all that is saved is small"


@pytest.mark.parametrize("name", ["ConvolutionalNet", "Transformer", "Complex", "UNet"])
def test_deep_recipes_give_the_same(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_plans: Solver
) -> None:
    """Whatever is computed again goes back as far as it can, to values that the plan has dropped itself."""
    shallow: list[Plan] = []

    def solve(*arguments: Any, **options: Any) -> Plan:
        shallow.append(quick_plans(*arguments, **options))
        return shallow[-1]

    monkeypatch.setattr("ebbtide.run.solving.solve", deeper(solve))
    trial = assert_identical_within(
        PROGRAMS[name],
        plain(PROGRAMS[name]),
        "80%",
        SLOW_DISK,
        tmp_path,
        may_raise_limit=allowed_raises(PROGRAMS[name]),
    )
    assert not trial.banned
    assert trial.decisions != shallow[-1].decisions, "no recipe goes back further"


class Forbidden(Chain):
    """Writes over an activation that the backward pass needs: PyTorch refuses, and so must we."""

    steady = False

    def begin(self, index: int) -> tuple[Tensor, Tensor]:
        """An activation that the backward pass needs, and the loss."""
        h = self.model[:4](self.data(index, 256, 64)).sigmoid()
        return h, self.model[4:](h).square().mean()

    def compute(self, index: int, guard: Guard) -> Record:
        with guard():
            h, loss = self.begin(index)
            if index % 2:
                h.add_(1)
                with pytest.raises(RuntimeError, match=r"modified by an inplace operation|changed in place"):
                    loss.backward()
                self.optimizer.zero_grad()
            else:
                loss.backward()
        return {"loss": loss}


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
@pytest.mark.parametrize("limit", ["90%", "60%"])
def test_a_forbidden_in_place_op_is_still_refused(limit: str, machine: Machine, tmp_path: Path) -> None:
    assert_identical_within(Forbidden, run_plain(Forbidden), limit, machine, tmp_path, may_raise_limit=1)


def test_a_budget_that_does_not_bind_changes_nothing(tmp_path: Path) -> None:
    trial = assert_identical_within(Chain, run_plain(Chain), "100%", FAST_DISK, tmp_path)
    assert trial.plan is not None
    assert not trial.plan.binds


def test_limits_in_bytes_and_percent_agree(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Which plan is found depends on how long ops took: here all take the same, in both runs.
    monkeypatch.setattr(HostClock, "seconds", lambda *_: 1e-4)
    half = assert_identical_within(Chain, run_plain(Chain), "60%", FAST_DISK, tmp_path)
    same = assert_identical_within(Chain, run_plain(Chain), half.limit_bytes, FAST_DISK, tmp_path)
    assert half.plan is not None
    assert same.plan is not None
    assert half.limit_bytes == same.limit_bytes == int(0.6 * half.plan.plain_peak_bytes)
    assert half.plan.peak_bytes == same.plan.peak_bytes
    for plan in (half.plan, same.plan):
        assert plan.limit_bytes == half.limit_bytes
        assert plan.binds
        assert plan.peak_bytes <= half.limit_bytes


@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["fast", "slow"])
@pytest.mark.parametrize("options", [{"verify": False}, {"checksum": True}, {"tune_allocator": False}], ids=str)
def test_options_change_no_numbers(
    options: dict[str, bool], machine: Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    states, kind, checksum = list[str](), PROGRAMS["ConvolutionalNet"], Mock(wraps=disk._checksum)
    monkeypatch.setattr(disk, "_checksum", checksum)
    expected = plain(kind)
    program = kind()  # after the plain run: it seeds the generator
    with ebbtide.Budget("60%", spill=tmp_path, machine=machine, **options) as memory:
        for index, record in enumerate(expected):
            states.append(memory.state)
            compare(record, program.run(index, memory.step), f"step {index}")
        assert memory.plan is not None
        assert memory.plan.binds
        assert memory._loop.allocator_lease.is_taken == options.get("tune_allocator", True)
    verifies = options.get("verify", True)
    if machine is SLOW_DISK or not verifies:  # on a fast disk it is chance whether something is computed again
        assert ("verify" in states) == verifies, states
    assert checksum.called == options.get("checksum", False)


def test_two_budgets_take_turns(tmp_path: Path) -> None:
    first, second = Chain(0), Chain(1)
    expected = [run_plain(Chain), run_plain(lambda: Chain(1))]
    with (
        ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as one,
        ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as two,
    ):
        for index in range(len(expected[0])):
            found = first.run(index, one.step), second.run(index, two.step)
            for record, program in zip(found, expected, strict=True):
                without_random = {k: v for k, v in program[index].items() if k != "random state"}
                compare(without_random, {k: v for k, v in record.items() if k != "random state"}, f"step {index}")


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (torch.zeros(3), torch.zeros(3, dtype=torch.float64)),
        (torch.zeros(3), torch.zeros(3, 1)),
        (torch.tensor([0.0]), torch.tensor([-0.0])),
        (torch.tensor(1.0 + 0j), torch.tensor(1.0 + 1e-7j)),
        (torch.eye(2).to_sparse(), 2 * torch.eye(2).to_sparse()),
    ],
    ids=["type", "shape", "sign of zero", "complex", "sparse"],
)
def test_the_comparison_sees_a_difference(one: Tensor, other: Tensor) -> None:
    assert identical(one, one.clone())
    assert not identical(one, other)
