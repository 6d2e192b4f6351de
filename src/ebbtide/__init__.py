"""Training steps within a memory budget, with bit-identical gradients."""

from ebbtide import sequence
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
from ebbtide.run.budget import Budget
from ebbtide.run.meter import PeakMeter
from ebbtide.run.observing import observe_step
from ebbtide.sequence import scan
from ebbtide.step import Step

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
