"""The kinds of errors that ebbtide raises.

One base class, a few named kinds; some modules raise subclasses of their own. Each message says what happened, with
the numbers, and what to do about it.
"""

from __future__ import annotations

from typing import Any


class EbbtideError(Exception):
    """Base class of all errors raised by ebbtide. They go from one process to another."""

    def __reduce__(self) -> tuple[Any, ...]:
        # What they are made with besides their message is in their attributes.
        return _made_again, (type(self), self.args), vars(self)


def _made_again(kind: type[EbbtideError], args: tuple[Any, ...]) -> EbbtideError:
    return kind.__new__(kind, *args)


class ArgumentError(EbbtideError, ValueError):
    """An argument has the wrong type or an impossible value, such as a size that cannot be parsed."""


class RecordError(EbbtideError):
    """A step, machine or plan file cannot be read, or describes something impossible."""


class BudgetError(EbbtideError):
    """No plan keeps the step within its budget.

    Attributes:
        limit_bytes: the budget that was asked for.
        reachable_bytes: the least peak that the planner can reach for this step.
        tick: index of the op at which that peak occurs.
        op: name of that op, as in ``aten.convolution_backward.default``.
        module: path of the module that the op belongs to, or an empty string.
    """

    def __init__(
        self, message: str, *, limit_bytes: int, reachable_bytes: int, tick: int, op: str, module: str
    ) -> None:
        super().__init__(message)
        self.limit_bytes = limit_bytes
        self.reachable_bytes = reachable_bytes
        self.tick = tick
        self.op = op
        self.module = module


class OutOfMemoryError(EbbtideError, RuntimeError, MemoryError):
    """A step asked for more memory than there was. On a device it is a `torch.OutOfMemoryError`, too.

    Attributes:
        planned_bytes: the peak that was planned, or None where there was no plan.
        asked_bytes: what was asked for, or None if PyTorch does not say.
        fits_bytes: the largest budget that could fit on the device, or None where its allocator does not count.
    """

    def __init__(
        self, message: str, *, planned_bytes: int | None, asked_bytes: int | None, fits_bytes: int | None
    ) -> None:
        super().__init__(message)
        self.planned_bytes = planned_bytes
        self.asked_bytes = asked_bytes
        self.fits_bytes = fits_bytes


class PlanError(EbbtideError):
    """A plan does not fit the step or the machine it is used with, or breaks a rule."""


class PolicyError(EbbtideError):
    """A published policy does not suit the step or the machine, as where it needs a chain and there is none."""


class SpillError(EbbtideError):
    """The slower memory cannot be used: missing, not writable, full, or it returned an error."""


class StepError(EbbtideError):
    """A step, or what is done in it, cannot be observed or run: one that is nested, say, or left in another thread."""


class RecipeError(EbbtideError, RuntimeError):
    """A value that was to be computed again cannot be, because something it depends on was changed.

    Where autograd refuses that itself, it raises a `RuntimeError`, and so this is one.
    """


class SequenceError(EbbtideError):
    """A chain of steps cannot be reversed as asked: too little memory, a broken schedule, or steps that misbehave."""
