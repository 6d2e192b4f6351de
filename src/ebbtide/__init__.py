"""Training steps within a memory budget, with bit-identical gradients."""

from ebbtide import sequence as sequence
from ebbtide.decisions import Keep as Keep
from ebbtide.decisions import Offload as Offload
from ebbtide.decisions import Plan as Plan
from ebbtide.decisions import Recompute as Recompute
from ebbtide.errors import BudgetError as BudgetError
from ebbtide.errors import EbbtideError as EbbtideError
from ebbtide.errors import OutOfMemoryError as OutOfMemoryError
from ebbtide.errors import PlanError as PlanError
from ebbtide.errors import PolicyError as PolicyError
from ebbtide.errors import RecipeError as RecipeError
from ebbtide.errors import RecordError as RecordError
from ebbtide.errors import SequenceError as SequenceError
from ebbtide.errors import SpillError as SpillError
from ebbtide.errors import StepError as StepError
from ebbtide.machine import Link as Link
from ebbtide.machine import Machine as Machine
from ebbtide.machine import Tier as Tier
from ebbtide.run.budget import Budget as Budget
from ebbtide.run.meter import PeakMeter as PeakMeter
from ebbtide.run.observing import observe_step as observe_step
from ebbtide.sequence import scan as scan
from ebbtide.step import Step as Step
