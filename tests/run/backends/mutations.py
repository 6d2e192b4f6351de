"""How surely each missing wait shows: ``python -m tests.run.backends.mutations [SEEDS]``."""

from __future__ import annotations

import sys

from tests.run.backends.rig import host_tier
from tests.run.backends.scenarios import SCENARIOS
from tests.run.backends.test_hazards import run, waits


def main(seeds: int) -> None:
    print(f"seeds of {seeds} for which a scenario goes wrong without the wait")
    for where in ("(all waits there)", *waits(host_tier)):
        counts = {
            scenario.__name__: sum(bool(run(scenario, seed, host_tier, where)[0]) for seed in range(seeds))
            for scenario in SCENARIOS
        }
        shown = ", ".join(f"{name} {count}" for name, count in counts.items() if count)
        print(f"{where}: {shown or 'none'}")


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 20)
