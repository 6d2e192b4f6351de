"""A plan together with the step and the machine it was made for, in one file."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from ebbtide.decisions import Plan
from ebbtide.documents import check_document, read_document, write_json
from ebbtide.errors import RecordError
from ebbtide.machine import Machine
from ebbtide.step import Step

FORMAT = "ebbtide-bundle"
VERSION = 1


@dataclasses.dataclass(frozen=True, slots=True)
class Bundle:
    """What `ebbtide plan` writes and `ebbtide report` reads."""

    step: Step
    machine: Machine
    plan: Plan

    def save(self, path: str | Path) -> None:
        """Write the bundle as JSON; gzip-compressed if the name ends in ``.gz``."""
        parts = {name: getattr(self, name).document() for name in ("step", "machine", "plan")}
        write_json(path, {"format": FORMAT, "version": VERSION, **parts})

    @classmethod
    def load(cls, path: str | Path) -> Bundle:
        """Read a bundle that `save` wrote.

        Raises:
            RecordError: if the file, or a part of it, is missing, malformed or of another version.
        """
        return cls.from_document(read_document(path), str(path))

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str) -> Bundle:
        """The bundle that `document` described; ``name`` is what errors call it. Raises `RecordError` as `load`."""
        check_document(document, name, FORMAT, VERSION)
        for part in ("step", "machine", "plan"):
            if part not in document:
                raise RecordError(f"{name}: has no {part}; make it again with `ebbtide plan`")
        step = Step.from_document(document["step"], f"{name}, step")
        machine = Machine.from_document(document["machine"], f"{name}, machine")
        plan = Plan.from_document(document["plan"], f"{name}, plan")
        if len(plan.decisions) != len(step.absences):
            found = f"{len(plan.decisions)} decisions for {len(step.absences)} absences"
            raise RecordError(f"{name}: its plan is for another step: {found}")
        return cls(step, machine, plan)


def load_step(path: str | Path) -> tuple[Step, Machine | None]:
    """The step in a file of `Step.save`, or the step and the machine in one of `Bundle.save`.

    Raises:
        RecordError: if the file is neither, or malformed.
    """
    document = read_document(path)
    if document.get("format") == FORMAT:
        bundle = Bundle.from_document(document, str(path))
        return bundle.step, bundle.machine
    return Step.from_document(document, str(path)), None
