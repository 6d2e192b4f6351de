"""What a recorder writes down while a step runs, and how it becomes the records of a `Step`."""

from __future__ import annotations

import bisect
from collections.abc import Iterator, Mapping, Sequence

from ebbtide.observe.clock import Span
from ebbtide.observe.schema import OperatorInfo
from ebbtide.step import EXTERNAL, NEVER, Absence, Op, Phase, Saved, Value


class SeenStorage:
    """What the recorder knows of one storage over the whole step.

    Attributes:
        number: among the storages of the step, in the order in which they were seen.
        size_bytes, cdata: its size and, while it lives, the address of PyTorch's object.
        dies: the moment at which it does; -1 while it lives.
        alone: moments from which on only autograd held it: the first such, and one after each time it was asked for.
        aliases, views: how many tensors of it holdings have, and how many saved tensors show it.
        evicted: whether it is moved out under the safe policy.
        is_garbage: whether it would be in the hands of garbage, in steps in which that is not collected.
        is_resized: whether it has the memory that somebody gave it by no op, after that which it was made with.
        versions: its values, as places in the recorder's list of them.
    """

    __slots__ = (
        "aliases",
        "alone",
        "cdata",
        "dies",
        "evicted",
        "is_garbage",
        "is_resized",
        "number",
        "size_bytes",
        "versions",
        "views",
    )

    def __init__(self, number: int, size_bytes: int, cdata: int) -> None:
        self.number = number
        self.size_bytes = size_bytes
        self.cdata = cdata
        self.dies = -1
        self.alone: list[int] = []
        self.aliases = 0
        self.views = 0
        self.evicted = self.is_garbage = self.is_resized = False
        self.versions: list[int] = []


class OpDraft:
    """An op that runs, or has run; its ``spans`` are marks of a clock that are read at the end, ``workspace`` is bytes,
    all else is as in `Op`."""

    __slots__ = ("info", "inputs", "module", "mutated", "outputs", "phase", "replay", "spans", "workspace")

    def __init__(self, info: OperatorInfo, inputs: tuple[int, ...], phase: Phase, module: str) -> None:
        self.info = info
        self.replay = info.replay
        self.inputs = inputs
        self.outputs: tuple[int, ...] = ()
        self.mutated: tuple[tuple[int, int], ...] = ()
        self.spans: list[Span] = []
        self.workspace = 0
        self.phase = phase
        self.module = module

    def op(self, seconds: float) -> Op:
        """The op, which took ``seconds``."""
        return Op(
            name=self.info.name,
            inputs=self.inputs,
            outputs=self.outputs,
            mutated=self.mutated,
            duration_seconds=round(seconds, 9),
            workspace_bytes=self.workspace,
            replay=self.replay,
            phase=self.phase,
            module=self.module,
        )


class ValueDraft:
    """A version of a storage, made by the op ``maker`` used at the ticks ``uses``; when it dies is known in the end.

    Attributes:
        seen_version: the version that the tensor had which was used last; -1 if none was since it came to where it is.
        stays: whether it is never away, nor read by what runs again: tensors that show it count versions each by
            itself, and not alike, or it is saved as something that the runtime does not move, or its storage was
            resized.
        is_counted_twice: whether the version of what its maker wrote in place went up by more than one, as where a
            custom Function marks it as dirty. The runtime, which sees the call alone, would not know it again.
    """

    __slots__ = ("is_counted_twice", "maker", "seen_version", "stays", "storage", "uses")

    def __init__(self, storage: SeenStorage, maker: int) -> None:
        self.storage = storage
        self.maker = maker
        self.uses: list[int] = []
        self.seen_version = -1
        self.stays, self.is_counted_twice = storage.is_resized, False

    def value(self, moments: int) -> Value:
        """The value, in a step of ``moments`` moments."""
        storage = self.storage
        return Value(
            size_bytes=storage.size_bytes,
            storage=storage.number,
            maker=self.maker,
            uses=tuple(self.uses),
            dies=storage.dies if storage.dies >= 0 else moments,
            exclusive=storage.alone[0] if storage.alone else NEVER,
        )


def absences_of(
    all_saved: Sequence[Saved], values: Sequence[ValueDraft], passes: Mapping[int, int], events: Sequence[int], end: int
) -> tuple[Absence, ...]:
    """For each saved value the gaps, in moments, from when only autograd held it to when autograd asked for it.

    The first gap of a value lies before it is first asked for, others between backward passes. A value that one pass
    asks for several times comes back for the first of them and stays until the last. After that it has a final gap if
    it lives on to some event: in a step without a backward pass, too, such as that of a batch that is skipped. A value
    that is written to after it was saved has no gaps, nor has one that stays: see `ValueDraft`. One whose storage was
    emptied meanwhile has none that end later: what autograd then asks for is what somebody has filled that with.

    Args:
        all_saved: all saved tensors of a step.
        values: drafts of its values; saved tensors name them by place.
        passes: by moment at which something was asked for, the number of the backward pass that did.
        events, end: the moments of the events, ascending, and the one after the last of the step.
    """
    asked: dict[int, set[int]] = {}
    written_later: set[int] = set()
    for saved in all_saved:
        storage = values[saved.value].storage
        if storage.versions[-1] != saved.value:
            written_later.add(storage.number)
        asked.setdefault(saved.value, set()).update(saved.unpacked)
    absences = []
    for value, requests in sorted(asked.items()):
        storage = values[value].storage
        external = values[storage.versions[0]].maker == EXTERNAL
        if not external and storage.number not in written_later and not values[value].stays:
            opens, dies = storage.alone[-1] if storage.alone else NEVER, storage.dies if storage.dies >= 0 else end
            gaps = _gaps(storage.alone, sorted(moment for moment in requests if moment < dies), passes)
            absences += [Absence(value, opens, closes) for opens, closes in gaps]
            if opens > max(requests, default=NEVER) and _any_between(events, opens, dies):
                absences.append(Absence(value, opens, dies))
    return tuple(absences)


def _any_between(moments: Sequence[int], begin: int, end: int) -> bool:
    return bisect.bisect_left(moments, begin) < bisect.bisect_left(moments, end)


def _gaps(alone: Sequence[int], asked: Sequence[int], passes: Mapping[int, int]) -> Iterator[tuple[int, int]]:
    """Where a value that autograd asks for at these moments may be away: from when to when."""
    former, was_away = -1, False
    for moment in asked:
        opens = next((one for one in alone if former < one < moment), None)
        if opens is not None and not (was_away and passes[former] == passes[moment]):
            was_away = True
            yield opens, moment
        former = moment
