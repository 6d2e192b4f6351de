"""What was observed of one training step: ops, values, saved tensors, absences. Plain records, no torch.

NOTE [The clock]
Ops are numbered in program order; an op's index is its *tick*. Autograd's saves ("pack") and requests ("unpack") are
*events*; ``Event.tick`` is the number of ops that ran before it, so an event of tick ``t`` happens just before op
``t``. Ops and events together, in order, are the *moments* of a step:

    moment of op k    = k + number of events with tick <= k
    moment of event j = j + events[j].tick

A storage occupies memory during the moments ``[born, dies)``, ``born`` being the moment of the op that made it.
Whatever a plan does "at tick t" happens at the last event whose tick is ``t``, just before op ``t`` runs.
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Iterable
from pathlib import Path
from typing import Any, Literal

from ebbtide.documents import check_document, read_json, write_json
from ebbtide.errors import RecordError
from ebbtide.fields import check_fields, checks_of

FORMAT = "ebbtide-step"
VERSION = 1

Phase = Literal["forward", "backward"]
Replay = Literal["pure", "in_place", "batch_norm", "view", "random", "opaque"]
EventKind = Literal["pack", "unpack"]

EXTERNAL = -1
"""`Value.maker` of a value that no op of the step made: a parameter, a buffer, an input."""
NEVER = -1
"""`Value.exclusive` of a value that something besides autograd holds for as long as it lives."""
MOST_BYTES = 1 << 60
"""More than all values of a step take together, and than an op's workspace: sums of bytes stay numbers of 64 bits."""
MOST_SECONDS = 1e12
"""More than an op or a transfer takes: sums of times stay finite numbers."""


@dataclasses.dataclass(frozen=True, slots=True)
class Op:
    """One ATen call.

    Attributes:
        name: qualified name, as in ``aten.convolution.default``.
        inputs: values read, in argument order, each once.
        outputs: values made: new storages, and new versions of storages written in place. Views make no value.
        mutated: pairs ``(old, new)`` of values for each storage written in place.
        duration_seconds: time until the next op could start, without the observer's own work.
        workspace_bytes: memory taken inside the op and given back before it ended, as the system sees it.
        replay: how the op can be run again: ``pure`` as it is; ``in_place`` on a fresh copy; ``batch_norm`` without
            touching running statistics; ``view`` makes no value; ``random`` and ``opaque`` never.
        phase: ``backward`` if the op ran inside a backward pass.
        module: path of the module it belongs to, as in ``ResNet.body.3.conv1``; empty if unknown.
    """

    name: str
    inputs: tuple[int, ...]
    outputs: tuple[int, ...]
    mutated: tuple[tuple[int, int], ...] = ()
    duration_seconds: float = 0.0
    workspace_bytes: int = 0
    replay: Replay = "opaque"
    phase: Phase = "forward"
    module: str = ""


@dataclasses.dataclass(frozen=True, slots=True)
class Value:
    """One version of one storage.

    Attributes:
        size_bytes: bytes of the storage; on CUDA, bytes that the allocator hands out for it on the training device.
        storage: number of the storage; versions of one storage share it, and its bytes count once.
        maker: tick of the op that made this version, or `EXTERNAL`.
        uses: ticks of the ops that read it, ascending.
        dies: moment from which the storage is gone; the number of moments if it outlives the step.
        exclusive: first moment from which nothing but autograd's saved tensors holds the storage, or `NEVER`.
    """

    size_bytes: int
    storage: int
    maker: int
    uses: tuple[int, ...]
    dies: int
    exclusive: int = NEVER


@dataclasses.dataclass(frozen=True, slots=True)
class Saved:
    """One tensor that autograd saved, in the order of saving: a view of a value.

    Attributes:
        value: the value it shows.
        dtype: as in ``float32``.
        shape: sizes, elements; -1 for those of nested tensors that are not one number.
        stride: strides, elements; none where it has no storage of its own, as if sparse: its value then has no bytes.
        offset: storage offset, elements.
        unpacked: moments at which autograd asked for it, ascending.
    """

    value: int
    dtype: str
    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int
    unpacked: tuple[int, ...]


@dataclasses.dataclass(frozen=True, slots=True)
class Event:
    """A save ("pack") or a request ("unpack") of saved tensor number ``saved``, after ``tick`` ops; ``phase`` is
    ``backward`` if it happened inside a backward pass; ``between`` says of a save that no op was under way: of others,
    op ``tick`` may have been."""

    kind: EventKind
    tick: int
    saved: int
    phase: Phase = "forward"
    between: bool = False


@dataclasses.dataclass(frozen=True, slots=True)
class Absence:
    """A gap in which nothing but autograd holds a value and nothing needs it.

    This is read as: value ``value`` may leave at any event at or after moment ``opens`` and must be there again at
    moment ``closes``, the event at which autograd asks for it. Where a graph is kept for several backward passes, a
    value has a gap before each of them that asks for it.

    A *final* absence closes as the value dies, which may be after the step's last moment: a graph holds it until then,
    and nothing asks for it any more.
    """

    value: int
    opens: int
    closes: int


@dataclasses.dataclass(frozen=True, slots=True)
class Step:
    """One observed training step. See NOTE [The clock].

    Attributes:
        ops, values, saved, events: the records described above.
        absences: the gaps that a plan decides about, ordered by value.
        device: the training device's type, ``cpu`` or ``cuda``.
    """

    ops: tuple[Op, ...]
    values: tuple[Value, ...]
    saved: tuple[Saved, ...]
    events: tuple[Event, ...]
    absences: tuple[Absence, ...]
    device: str = "cpu"

    def __repr__(self) -> str:
        return f"<Step on {self.device}: {len(self.ops)} ops, {len(self.values)} values, {len(self.absences)} absences>"

    @property
    def moments(self) -> int:
        """Number of moments: ops and events together."""
        return len(self.ops) + len(self.events)

    @property
    def resting_bytes(self) -> int:
        """Bytes of the storages that the step touches but did not make."""
        sizes = {value.storage: value.size_bytes for value in self.values if value.maker == EXTERNAL}
        return sum(sizes.values())

    @property
    def plain_seconds(self) -> float:
        """Duration of the step without a plan: the sum over its ops."""
        return math.fsum(op.duration_seconds for op in self.ops)

    @property
    def has_backward_pass(self) -> bool:
        """Whether any op of a backward pass runs in it."""
        return any(op.phase == "backward" for op in self.ops)

    @property
    def next_storage(self) -> int:
        """A number that no storage of the step has."""
        return 1 + max((value.storage for value in self.values), default=-1)

    def is_final(self, absence: Absence) -> bool:
        """Whether nothing asks for the value of ``absence`` any more."""
        return absence.closes >= self.values[absence.value].dies

    def values_of(self, absences: Iterable[int]) -> set[int]:
        """The values of the absences with these numbers."""
        return {self.absences[number].value for number in absences}

    def event_ticks(self) -> list[int]:
        """Tick of each event, by index."""
        return [event.tick for event in self.events]

    def op_moments(self) -> list[int]:
        """Moment of each op, by tick."""
        ticks = self.event_ticks()
        return [tick + bisect.bisect_right(ticks, tick) for tick in range(len(self.ops))]

    def event_moments(self) -> list[int]:
        """Moment of each event, by index."""
        return [index + event.tick for index, event in enumerate(self.events)]

    def save(self, path: str | Path) -> None:
        """Write the step as JSON; gzip-compressed if the name ends in ``.gz``.

        Raises:
            OSError: if the file cannot be written.
        """
        write_json(path, self.document())

    def document(self) -> dict[str, Any]:
        """The step as what its JSON says."""
        tables = {name: _table(getattr(self, name)) for name in RECORD_TYPES}
        return {"format": FORMAT, "version": VERSION, "device": self.device, **tables}

    @classmethod
    def load(cls, path: str | Path) -> Step:
        """Read a step that `save` wrote.

        Raises:
            RecordError: if the file is missing, malformed, of another version, or describes an impossible step.
        """
        return cls.from_document(read_json(path, FORMAT, VERSION), str(path))

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str) -> Step:
        """The step that `document` described; ``name`` is what errors call it. Raises `RecordError` as `load`."""
        from ebbtide.step_checks import check_agreement, check_step  # made of what is defined here

        check_document(document, name, FORMAT, VERSION)
        try:
            parts = {part: tuple(_records_of(kind, document[part])) for part, kind in RECORD_TYPES.items()}
            step = cls(device=str(document["device"]), **parts)
        except (KeyError, TypeError, ValueError, RecursionError) as fault:
            raise RecordError(f"{name}: not a whole step: {fault!r}; observe the step again") from fault
        check_step(step, name)
        check_agreement(step, name)
        return step


RECORD_TYPES: dict[str, type] = {"ops": Op, "values": Value, "saved": Saved, "events": Event, "absences": Absence}
"""The tables of a step, and what their rows are."""


def _table(records: Iterable[Any]) -> dict[str, list[Any]]:
    """Records as rows of their fields, without the names of these, which keeps the file small."""
    return {"rows": [list(dataclasses.astuple(record)) for record in records]}


def _records_of(kind: type, table: dict[str, list[Any]]) -> Iterable[Any]:
    """The records of a table. Raises `TypeError` if a field is not of its type."""
    checks = checks_of(kind)
    rows = table["rows"]
    if not isinstance(rows, list):
        raise TypeError(f"the rows of {kind.__name__} are {rows!r}")
    for number, row in enumerate(rows):
        record = kind(*[_frozen(item) for item in row])
        check_fields(record, checks, f"{kind.__name__} {number}")
        yield record


def _frozen(item: Any) -> Any:
    return tuple(_frozen(part) for part in item) if isinstance(item, list) else item
