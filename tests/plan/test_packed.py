"""What a plan takes if its blocks have fixed places: never less than it holds, and hardly more for being relaxed."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest

from ebbtide.plan import NO_CAUTION, Caution, solve
from ebbtide.plan.follow import Course, Moves
from ebbtide.plan.packed import packed_bytes
from ebbtide.plan.search import Search
from ebbtide.step import Step
from tests.plan.limits import limit_at
from tests.plan.random_steps import KIB, disk_machine, network_step

solving = importlib.import_module("ebbtide.plan.solve")
FIXTURES = sorted((Path(__file__).parents[1] / "fixtures").glob("*.json.gz"))
MACHINE = disk_machine(2.9e9, 1.3e9, slowdown=0.16)


class Watched:
    """Plans, and keeps the moves of the search, those that come out, and what both take packed."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._spend = solving.spend_unused_memory
        monkeypatch.setattr(solving, "spend_unused_memory", self._watch)

    def _watch(self, search: Search) -> Moves:
        assert search.best is not None
        self.resting_bytes = search.problem.resting_bytes
        self.before, self.after = search.best.moves, self._spend(search)
        self.courses = search.best.course, search.follower.follow(self.after)
        moves = self.before, self.after
        self.packed = [self._packed(search, *pair) for pair in zip(moves, self.courses, strict=True)]
        return self.after

    def _packed(self, search: Search, moves: Moves, course: Course) -> int:
        packed = packed_bytes(search.problem, search.follower.scene, moves, course)
        assert packed is not None
        return packed


@pytest.mark.parametrize("fraction", [0.7, 0.5, 0.3])
def test_never_less_than_is_held(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = network_step(24)
    small = sum(value.size_bytes for value in step.values if value.size_bytes < 32 * KIB)
    watched = Watched(monkeypatch)
    solve(step, MACHINE, limit_at(step, fraction))
    for course, packed in zip(watched.courses, watched.packed, strict=True):
        assert int(course.physical.max()) - watched.resting_bytes - small <= packed
        assert packed <= 1.3 * (int(course.physical.max()) - watched.resting_bytes)


@pytest.mark.parametrize("fraction", [0.7, 0.5])
@pytest.mark.parametrize("path", FIXTURES, ids=lambda path: path.name.partition(".")[0])
def test_hardly_more_for_being_relaxed(path: Path, fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step.load(path)
    watched = Watched(monkeypatch)
    solve(step, MACHINE, limit_at(step, fraction), caution=Caution())  # plans for disks leave little to relax
    assert (watched.after.rows() != watched.before.rows()).any()
    assert watched.packed[1] <= 1.02 * watched.packed[0]


@pytest.mark.parametrize("fraction", [0.45, 0.5, 0.6])
def test_where_blocks_do_not_pack_less_time_is_left_free(fraction: float, monkeypatch: pytest.MonkeyPatch) -> None:
    step = Step.load(next(path for path in FIXTURES if path.name.startswith("resnet50")))
    machine = disk_machine(0.7e9, 0.7e9, slowdown=0.1)
    watched = Watched(monkeypatch)
    solve(step, machine, limit_at(step, fraction), caution=Caution.of(machine, timed=True))
    before, after = watched.courses
    assert after.seconds <= before.seconds + 1e-9
    assert watched.packed[1] < watched.packed[0]
    assert watched.packed[1] <= 1.06 * (int(after.physical.max()) - watched.resting_bytes)


def test_on_paper_nothing_is_relaxed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = network_step(24)
    watched = Watched(monkeypatch)
    solve(step, MACHINE, limit_at(step, 0.5), caution=NO_CAUTION)
    assert watched.after is watched.before


def test_too_many_blocks_are_not_placed(monkeypatch: pytest.MonkeyPatch) -> None:
    step = network_step(24)
    monkeypatch.setattr("ebbtide.plan.packed.MOST_BLOCKS", 10)
    plan = solve(step, MACHINE, limit_at(step, 0.5))
    assert plan.peak_bytes <= plan.limit_bytes
