"""Training steps within a memory budget, with bit-identical gradients.

What needs PyTorch is imported when it is first asked for: that takes seconds, and who reads a step or a machine, or
the help of a command, has no use for it.
"""

from typing import TYPE_CHECKING

from ebbtide.decisions import Keep, Offload, Plan, Recompute
from ebbtide.errors import (
    ArgumentError,
    BudgetError,
    EbbtideError,
    OutOfMemoryError,
    PlanError,
    PolicyError,
    RecipeError,
    RecordError,
    SequenceError,
    SpillError,
    StepError,
)
from ebbtide.machine import Link, Machine, Tier
from ebbtide.step import Step

if TYPE_CHECKING:
    from ebbtide import sequence
    from ebbtide.run.budget import Budget
    from ebbtide.run.meter import PeakMeter
    from ebbtide.run.observing import observe_step
    from ebbtide.sequence import scan
else:  # a type checker that saw it would take any name for one of ebbtide's

    def __getattr__(name: str) -> object:
        """What ``ebbtide.name`` is, when it is first asked for; from then on it is there."""
        import importlib

        homes = {
            "Budget": "ebbtide.run.budget",
            "PeakMeter": "ebbtide.run.meter",
            "observe_step": "ebbtide.run.observing",
            "scan": "ebbtide.sequence",
        }
        if name in homes:
            found = getattr(importlib.import_module(homes[name]), name)
        elif name in {"observe", "place", "plan", "run", "sequence"}:  # packages, as if each had been imported
            found = importlib.import_module(f"ebbtide.{name}")
        else:
            raise AttributeError(f"module 'ebbtide' has no attribute {name!r}")
        globals()[name] = found
        return found

    def __dir__() -> list[str]:
        return sorted({*globals(), *__all__})


__version__ = "0.1.0"
__all__ = [
    "ArgumentError",
    "Budget",
    "BudgetError",
    "EbbtideError",
    "Keep",
    "Link",
    "Machine",
    "Offload",
    "OutOfMemoryError",
    "PeakMeter",
    "Plan",
    "PlanError",
    "PolicyError",
    "RecipeError",
    "Recompute",
    "RecordError",
    "SequenceError",
    "SpillError",
    "Step",
    "StepError",
    "Tier",
    "observe_step",
    "scan",
    "sequence",
]
