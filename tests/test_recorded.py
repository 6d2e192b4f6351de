"""Steps recorded from real models: they load, plan and simulate as they did when they were recorded."""

from __future__ import annotations

from pathlib import Path

import pytest

from ebbtide import BudgetError, Link, Machine, Offload, Recompute, Step, Tier
from ebbtide.plan import simulate, solve
from tests.plan.limits import limit_at

FIXTURES = Path(__file__).parent / "fixtures"
MACHINE = Machine(
    name="paper",
    fast="ram",
    tiers=(Tier("ram", "device"), Tier("disk", "disk")),
    links=(Link("ram", "disk", 1e-4, 3e9, 1e9, 0.1), Link("disk", "ram", 1e-4, 1.5e9, 1e9, 0.1)),
)
NAMES = sorted(path.name for path in FIXTURES.glob("*.json.gz"))


def test_there_are_fixtures() -> None:
    assert {"resnet50.json.gz", "gpt2.json.gz", "lstm.json.gz"} <= set(NAMES)


@pytest.mark.parametrize("name", NAMES)
def test_a_recorded_step_is_small_and_comes_back_whole(name: str, tmp_path: Path) -> None:
    step = Step.load(FIXTURES / name)
    assert (FIXTURES / name).stat().st_size < 2_000_000
    step.save(tmp_path / "again.json")
    assert (tmp_path / "again.json").stat().st_size < 2_000_000
    assert Step.load(tmp_path / "again.json") == step


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("fraction", [0.7, 0.4])
def test_a_recorded_step_is_planned_within_its_limit(name: str, fraction: float) -> None:
    step = Step.load(FIXTURES / name)
    limit = limit_at(step, fraction)
    refused: BudgetError | None = None
    try:
        plan = solve(step, MACHINE, limit)
    except BudgetError as error:
        refused = error
    if refused is not None:
        assert refused.reachable_bytes > limit
        assert step.ops[refused.tick].name == refused.op
        limit = refused.reachable_bytes
        plan = solve(step, MACHINE, limit)
    outcome = simulate(step, MACHINE, plan.decisions)
    assert outcome.peak_bytes == plan.peak_bytes <= limit
    assert outcome.seconds == pytest.approx(plan.seconds)
    assert any(isinstance(decision, (Offload, Recompute)) for decision in plan.decisions)
    assert plan.seconds < 2 * plan.plain_seconds
