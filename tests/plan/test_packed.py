"""What a plan takes if its blocks have fixed places: never less than it holds, and hardly more for being relaxed."""

from __future__ import annotations

import importlib
import statistics
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
    """Plans, and keeps the moves of the search, those that come out, and what both take packed.

    Looseness is how many times the bytes alive at once blocks take: of what comes out, and of what would if no less
    time were left free.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._finished, self._monkeypatch = solving.finished, monkeypatch
        monkeypatch.setattr(solving, "finished", self._watch)

    def _watch(self, search: Search) -> Moves:
        assert search.best is not None
        self.resting_bytes = search.problem.resting_bytes
        self.before, self.after = search.best.moves, self._finished(search)
        self.courses = search.best.course, search.follower.follow(self.after)
        moves = self.before, self.after
        self.packed = [self._packed(search, *pair) for pair in zip(moves, self.courses, strict=True)]
        with self._monkeypatch.context() as patch:
            patch.setattr("ebbtide.plan.finish.EASED", ())
            uneased = self._finished(search)
        self.looseness, self.looseness_uneased = self._looseness(search, self.after), self._looseness(search, uneased)
        return self.after

    def _looseness(self, search: Search, moves: Moves) -> float:
        course = search.follower.follow(moves)
        return self._packed(search, moves, course) / (int(course.physical.max()) - self.resting_bytes)

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


@pytest.mark.parametrize("seed", [0, 1])
def test_where_blocks_do_not_pack_less_time_is_left_free(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """How well the blocks of one plan pack is a matter of luck: of three plans it shows."""
    step = Step.load(next(path for path in FIXTURES if path.name.startswith("resnet50")))
    machine = disk_machine(0.7e9, 0.7e9, slowdown=0.1)
    watched, loose = Watched(monkeypatch), []
    for fraction in (0.45, 0.5, 0.6):
        solve(step, machine, limit_at(step, fraction), caution=Caution.of(machine, timed=True), seed=seed)
        before, after = watched.courses
        assert after.seconds <= before.seconds + 1e-9
        loose.append((watched.looseness_uneased, watched.looseness))
        assert loose[-1][1] <= min(loose[-1][0], 1.1)
    uneased, eased = (statistics.mean(of_all) for of_all in zip(*loose, strict=True))
    assert eased <= uneased - 0.015


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
