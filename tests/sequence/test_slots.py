"""How many slots `memory` has room for, and what they take."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest

from ebbtide.sequence import blocks, choose, planning, run
from ebbtide.sequence.schedules import Revolve
from tests.sequence.test_run import START, forward, reverse, turn

pytestmark = pytest.mark.usefixtures("nothing_left")


class TestSmallStates:
    """What pads them, and Python's objects, take more than they do."""

    def test_they_take_fewer_slots(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocks, "SPARE_BYTES", 0)
        monkeypatch.setattr(planning, "WORTHWHILE_SECONDS", math.inf)  # a busy machine may find the disk worth a try
        for options, slot_bytes in (({}, 64 + 2368), ({"spill": tmp_path}, 4096 + 2368)):
            done = run(forward, reverse, 300, START[:8], turn=turn, memory=100_000, **options)  # type: ignore[arg-type]
            assert done.choice is not None
            assert done.choice.schedule == Revolve(300, 100_000 // slot_bytes - 1)

    def test_they_are_not_padded_where_all_fit(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        sizes: list[int] = []
        made = blocks.Blocks._map

        def noting(self: blocks.Blocks, count: int) -> Any:
            sizes.append(self.block_bytes)
            return made(self, count)

        monkeypatch.setattr(blocks.Blocks, "_map", noting)
        run(forward, reverse, 30, START[:8], turn=turn, memory=31 * 64, spill=tmp_path)
        assert sizes == [64]

    def test_a_schedule_that_was_given_has_its_slots(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(blocks, "SPARE_BYTES", 0)
        schedule = choose(300, 64, 1.0, 2.0, 100 * 64).schedule
        done = run(forward, reverse, 300, START[:8], turn=turn, memory=100 * 64, schedule=schedule)
        assert done.forward_steps == schedule.forward_steps
