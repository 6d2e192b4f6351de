"""Decisions and plans. Plain records, no torch."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path
from typing import Any

from ebbtide.documents import check_document, read_json, write_json
from ebbtide.errors import RecordError
from ebbtide.fields import typed

FORMAT = "ebbtide-plan"
VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Keep:
    """The value stays in memory through its absence."""


@dataclasses.dataclass(frozen=True, slots=True)
class Offload:
    """The value goes to ``tier`` and comes back.

    ``Offload("disk", out=12, release=15, load=80)`` is read as: at tick 12 queue its copy to the disk; at tick 15
    wait until that copy is done and free its bytes; at tick 80 take its bytes again and queue the copy back. Whoever
    needs it waits until that copy is done. If ``load`` is the tick at which it is needed, the load is queued when it
    is asked for. In a final absence nothing comes back, whatever it says.
    """

    tier: str
    out: int
    release: int
    load: int


@dataclasses.dataclass(frozen=True, slots=True)
class Recompute:
    """The value is dropped and computed again when autograd asks for it.

    ``Recompute(ops=(7, 8))`` is read as: its bytes are free as soon as nothing else holds it; when it is needed, run
    ops 7 and 8 again, in this order, from values that are there (or are brought back first). Every value that its own
    ops do not make is a value that a plan keeps, brings back or recomputes itself, or an external one.
    """

    ops: tuple[int, ...]


Decision = Keep | Offload | Recompute


@dataclasses.dataclass(frozen=True, slots=True)
class Plan:
    """One decision for each absence of a step, and what is expected of it.

    Attributes:
        decisions: in the order of `Step.absences`.
        limit_bytes: the budget it was made for.
        peak_bytes, seconds: predicted by the simulator.
        physical_peak_bytes: the predicted peak including the workspaces of ops.
        plain_peak_bytes, plain_seconds: the same step without a plan.
        resting_bytes: bytes that the step touches but did not make.
        bound_seconds: a time that no plan can beat, or None if not computed.
        method: the planner that made it.
    """

    decisions: tuple[Decision, ...]
    limit_bytes: int
    peak_bytes: int
    seconds: float
    physical_peak_bytes: int
    plain_peak_bytes: int
    plain_seconds: float
    resting_bytes: int
    bound_seconds: float | None = None
    method: str = ""

    @property
    def binds(self) -> bool:
        """Whether the plan does anything at all."""
        return any(not isinstance(decision, Keep) for decision in self.decisions)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON; gzip-compressed if the name ends in ``.gz``.

        Raises:
            OSError: if the file cannot be written.
        """
        write_json(path, self.document())

    def document(self) -> dict[str, Any]:
        """The plan as what its JSON says."""
        fields = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        fields["decisions"] = [_encoded(decision) for decision in self.decisions]
        return {"format": FORMAT, "version": VERSION, **fields}

    @classmethod
    def load(cls, path: str | Path) -> Plan:
        """Read a plan that `save` wrote.

        Raises:
            RecordError: if the file is missing, malformed or of another version.
        """
        return cls.from_document(read_json(path, FORMAT, VERSION), str(path))

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str) -> Plan:
        """The plan that `document` described; ``name`` is what errors call it. Raises `RecordError` as `load`."""
        check_document(document, name, FORMAT, VERSION)
        try:
            fields = {field.name: document[field.name] for field in dataclasses.fields(cls)}
            fields["decisions"] = tuple(_decoded(row) for row in document["decisions"])
            plan = typed(cls(**fields))
        except (KeyError, TypeError, ValueError, IndexError, RecursionError) as fault:
            raise RecordError(f"{name}: not a whole plan: {fault!r}; make it again") from fault
        _check_numbers(plan, name)
        return plan


def _check_numbers(plan: Plan, name: str) -> None:
    """Raises `RecordError` for numbers that no plan can have."""
    for field in dataclasses.fields(plan):
        number = getattr(plan, field.name)
        if isinstance(number, (int, float)) and not 0 <= number <= sys.float_info.max:
            raise RecordError(f"{name}: its {field.name} is {number}; it must be >= 0 and finite")


def _encoded(decision: Decision) -> list[Any]:
    match decision:
        case Keep():
            return ["keep"]
        case Offload(tier, out, release, load):
            return ["offload", tier, out, release, load]
        case Recompute(ops):
            return ["recompute", list(ops)]


def _decoded(row: list[Any]) -> Decision:
    match row:
        case ["keep"]:
            return Keep()
        case ["offload", str(tier), int(out), int(release), int(load)]:
            return Offload(tier, out, release, load)
        case ["recompute", list(ops)] if all(type(op) is int for op in ops):
            return Recompute(tuple(ops))
    raise ValueError(f"unknown decision {row!r}")
