"""How surely each missing wait shows: ``python -m tests.run.backends.mutations [SEEDS]``."""

from __future__ import annotations

import sys
import tempfile
from pathlib import Path

import pytest

from ebbtide.run.tiers import StagedTier
from tests.run.backends.rig import SIZE, host_tier
from tests.run.backends.scenarios import SCENARIOS
from tests.run.backends.test_hazards import Make, run, waits


def show(title: str, make: Make, seeds: int) -> None:
    """For each wait: the seeds for which each scenario goes wrong without it."""
    print(f"{title}, of {seeds} seeds")
    for where in ("(all waits there)", *waits(make)):
        counts = {
            scenario.__name__: sum(bool(run(scenario, seed, make, where)[0]) for seed in range(seeds))
            for scenario in SCENARIOS
        }
        shown = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        print(f"  {where}: {shown or 'none'}")


def main(seeds: int) -> None:
    show("host memory", host_tier, seeds)
    with tempfile.TemporaryDirectory() as directory, pytest.MonkeyPatch.context() as patch:
        patch.setattr(StagedTier, "part_bytes", SIZE // 4)
        show("disk by two hops", lambda device: StagedTier(Path(directory), device), seeds)


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
