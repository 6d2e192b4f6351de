"""By which plan steps are begun where kinds come in no order."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal

import pytest

import ebbtide
from ebbtide.run.beginning import kind_to_begin_with
from ebbtide.run.covering import Room, room_to_begin
from ebbtide.run.kinds import Kind
from tests.run.harness import FAST_DISK, SLOW_DISK
from tests.run.inside import kinds_of
from tests.run.test_kept_graphs import Sort, run
from tests.run.test_kinds import EVERY, plain_peak

PARTS: list[Sort] = ["part"] * 7
ONES: list[Sort] = ["one"] * 6
Name = Literal["large", "small", "other", "new"]


class Rooms:
    """Stands in for a library: the small plan cannot run steps of the large one, and so on."""

    def __init__(self, rooms: dict[tuple[Name, Name], Room]) -> None:
        self._rooms = rooms

    def covers(self, script: Any, other: Any, event: int) -> bool:
        assert event == 0
        return script.name == other.name or (script.name, other.name) == ("large", "small")

    def room_to_begin(self, script: Any, other: Any) -> Room:
        return self._rooms.get((script.name, other.name), Room(0, 0))


class Known:
    """Stands in for a kind."""

    def __init__(self, name: Name, saved: int, state: str = "planned") -> None:
        self.script, self.state = SimpleNamespace(name=name), state
        self.step = SimpleNamespace(saved=[None] * saved)


NO_ROOM, LIKELY_ROOM = Room(-2, -1), Room(-1, 0)


@pytest.mark.parametrize(
    ("rooms", "expected", "in_order"),
    [
        ({}, "large", False),
        ({("large", "other"): NO_ROOM}, "small", False),
        ({("large", "other"): LIKELY_ROOM}, "small", False),
        ({("large", "other"): LIKELY_ROOM, ("small", "other"): NO_ROOM, ("other", "small"): NO_ROOM}, "large", False),
        ({("large", "other"): NO_ROOM, ("small", "other"): NO_ROOM}, "other", False),
        ({("large", "other"): NO_ROOM, ("small", "other"): NO_ROOM, ("other", "small"): NO_ROOM}, "large", False),
        ({}, "small", True),
        ({("small", "other"): NO_ROOM}, "large", True),
        ({("small", "other"): NO_ROOM, ("large", "other"): NO_ROOM}, "other", True),
        ({("small", "other"): NO_ROOM, ("large", "other"): NO_ROOM, ("other", "small"): NO_ROOM}, "small", True),
    ],
)
def test_the_largest_or_likely_one_is_begun_with_that_has_room_for_all(
    rooms: dict[tuple[Name, Name], Room], expected: Name, in_order: bool
) -> None:
    large, small, other, new = Known("large", 3), Known("small", 1), Known("other", 2), Known("new", 4, "verify")
    library: Any = Rooms(rooms)
    kinds: list[Any] = [other, new, small, large]
    found: Any = kind_to_begin_with(kinds[2], kinds, [kinds[0], kinds[2], kinds[0]], library, in_order=in_order)
    assert found.script.name == expected


@pytest.mark.usefixtures("nothing_left", "quick_plans", "plans_stay")
@pytest.mark.parametrize("machine", [FAST_DISK, SLOW_DISK], ids=["moves", "recomputes"])
@pytest.mark.parametrize("other", ["part", "one"])
def test_room_is_what_steps_of_others_leave(
    other: Literal["part", "one"], machine: ebbtide.Machine, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of what is held until a part ends, and until it turns out to be none."""
    planned: Literal["part", "one"] = "one" if other == "part" else "part"
    with ebbtide.Budget(int(0.7 * plain_peak(EVERY)), spill=tmp_path, machine=machine, verify=False) as memory:
        run(memory, [*PARTS, *ONES, *[*PARTS[:1], *ONES[:1]] * 4])
        kinds: list[Kind] = sorted(kinds_of(memory), key=lambda kind: -len(kind.step.events))
        one, part = (kind.script for kind in kinds)
        assert one is not None
        assert part is not None
        script, others = (one, part) if planned == "one" else (part, one)
        room = room_to_begin(script, others)
        assert room.sure_bytes <= room.likely_bytes
        monkeypatch.setattr(type(memory._loop), "expected", next(kind for kind in kinds if kind.script is script))
        peaks = [seen.peak_bytes for seen in run(memory, [other] * 3)]
        assert max(peaks) <= (memory.limit_bytes or 0) - min(0, room.sure_bytes)
        if planned == "one" and machine is FAST_DISK:
            assert max(peaks) == (memory.limit_bytes or 0) - room.likely_bytes
