"""`run` against a loop that keeps every state, under each schedule and with every fault."""

from __future__ import annotations

import array
import collections
import errno
import itertools
import os
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ebbtide.errors import ArgumentError, SequenceError, SpillError
from ebbtide.machine import Link
from ebbtide.run.tiers import DiskTier
from ebbtide.sequence import SlowMemory, planning, run, spill
from ebbtide.sequence.blocks import bytes_on_disk
from ebbtide.sequence.interval_control import IntervalController
from ebbtide.sequence.schedules import (
    DISK,
    MEMORY,
    DiskCosts,
    DiskRevolve,
    HRevolve,
    Level,
    Mixed,
    Multistage,
    PeriodicDiskRevolve,
    Revolve,
    Schedule,
    StoreAll,
)
from ebbtide.sequence.trial import StepCosts

pytestmark = pytest.mark.usefixtures("nothing_left")
Array = npt.NDArray[np.float64]
WIDTH = 600
STATE_BYTES = WIDTH * 8
START = np.linspace(0.1, 0.9, WIDTH)


def forward(u: Array, step: int) -> Array:
    """A map without any symmetry, different in each step, that leaves its argument alone."""
    return np.asarray(np.sin(u + 0.01 * step) + 0.3 * np.roll(u, 1))


def forward_in_place(u: Array, step: int) -> Array:
    """The same, written over its argument."""
    u[:] = forward(u, step)
    return u


def reverse(u: Array, adjoint: Array, step: int) -> Array:
    return np.asarray(np.cos(u + 0.01 * step) * adjoint + 0.3 * np.roll(adjoint, -1))


def turn(u: Array) -> Array:
    return 2 * u


def plain(n: int) -> tuple[Array, Array]:
    """Adjoint and last state, by a loop that keeps all states."""
    states = [START]
    for step in range(n):
        states.append(forward(states[-1], step))
    adjoint = turn(states[-1])
    for step in reversed(range(n)):
        adjoint = reverse(states[step], adjoint, step)
    return adjoint, states[-1]


def schedules(n: int) -> list[Schedule]:
    costs = DiskCosts(write=2, read=2)
    return [
        StoreAll(n),
        StoreAll(n, tier=DISK),
        Revolve(n, 3),
        DiskRevolve(n, 2, costs),
        PeriodicDiskRevolve(n, 2, costs),
        HRevolve(n, (Level(MEMORY, 3), Level(DISK, None, 2, 2))),
        Multistage(n, 3, 1),
        Multistage(n, 4, 7),
        Multistage(n, 2, 5),
    ]


@pytest.mark.parametrize("n", [1, 2, 3, 40])
@pytest.mark.parametrize("step", [forward, forward_in_place])
def test_every_schedule_gives_the_same_bits(n: int, step: Callable[..., Array], tmp_path: Path) -> None:
    adjoint, final = plain(n)
    for schedule in schedules(n):
        memory = (max(schedule.slots.get(MEMORY, 1), 4) + 1) * STATE_BYTES
        done = run(step, reverse, n, START, turn=turn, memory=memory, spill=tmp_path, schedule=schedule, check=True)
        assert done.adjoint.tobytes() == adjoint.tobytes(), schedule
        assert done.final.tobytes() == final.tobytes()
        assert (done.steps, done.forward_steps) == (n, schedule.forward_steps)
    assert np.array_equal(START, np.linspace(0.1, 0.9, WIDTH))


@pytest.mark.parametrize("states", [2, 3, 5, 12, 60])
@pytest.mark.parametrize("spilled", [True, False])
def test_chosen_schedule(states: int, spilled: bool, tmp_path: Path) -> None:
    adjoint, _ = plain(50)
    spill = tmp_path if spilled else None
    done = run(forward, reverse, 50, START, turn=turn, memory=states * STATE_BYTES, spill=spill, check=True)
    assert done.adjoint.tobytes() == adjoint.tobytes()
    assert done.choice is not None
    if states == 60:
        assert done.recompute_factor == 1.0
    assert done.choice.memory_bytes <= states * STATE_BYTES


@pytest.mark.parametrize("states", [2, 3, 6])
@pytest.mark.parametrize("n", [1, 2, 37])
@pytest.mark.parametrize("spilled", [True, False])
def test_unknown_length(states: int, n: int, spilled: bool, tmp_path: Path) -> None:
    """A condition on the state, and an iterator that ends when it ends; no step is run more often for that."""
    adjoint, final = plain(n)
    calls: collections.Counter[int] = collections.Counter()

    def counted(u: Array, step: int) -> Array:
        calls[step] += 1
        return forward_in_place(u, step)

    ticks = iter(range(n - 1))
    done = run(
        counted,
        reverse,
        lambda state, step: state.shape == (WIDTH,) and next(ticks, None) is not None,
        START,
        turn=turn,
        memory=states * STATE_BYTES,
        spill=tmp_path if spilled else None,
    )
    assert done.adjoint.tobytes() == adjoint.tobytes()
    assert done.final.tobytes() == final.tobytes()
    assert done.steps == n
    assert done.choice is None
    assert calls[n - 1] == 1 or n == 1
    assert sum(calls.values()) <= done.forward_steps + 1 + 6  # step 0 is tried, and gives a sample


def test_states_that_the_operators_keep() -> None:
    """Memory that is used again is none that somebody else has: what a step was given stays as it was."""
    kept: list[tuple[Array, Array]] = []

    def keeping(u: Array, step: int) -> Array:
        kept.append((u, u.copy()))
        return forward(u, step)

    done = run(keeping, reverse, 50, START, turn=turn, memory=5 * STATE_BYTES)
    assert done.adjoint.tobytes() == plain(50)[0].tobytes()
    assert all(u.tobytes() == copy.tobytes() for u, copy in kept)


def test_states_that_are_passed_on() -> None:
    """A leapfrog that gives the array that it was given as a part of what comes next."""

    def leap(state: tuple[Array, Array], step: int) -> tuple[Array, Array]:
        now, before = state
        return forward(now, step) - 0.1 * before, now

    def leap_back(state: tuple[Array, Array], adjoint: tuple[Array, Array], step: int) -> tuple[Array, Array]:
        return reverse(state[0], adjoint[0], step) + adjoint[1], -0.1 * adjoint[0]

    found = [
        run(leap, leap_back, 50, (START, START), turn=lambda u: (2 * u[0], u[1]), memory=count * 2 * STATE_BYTES)
        for count in (3, 5, 60)
    ]
    assert len({tuple(part.tobytes() for part in done.adjoint) for done in found}) == 1


def test_a_short_chain_needs_no_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(spill, "StateDisk", None)
    done = run(forward, reverse, 30, START, turn=turn, memory=5 * STATE_BYTES, spill=tmp_path)
    assert done.choice is not None
    assert done.choice.schedule == Revolve(30, 4)
    assert done.adjoint.tobytes() == plain(30)[0].tobytes()


def test_states_without_elements_go_to_a_disk(tmp_path: Path) -> None:
    empty, schedule = np.zeros((0, 3)), Multistage(30, 3, 4)
    done = run(forward, reverse, 30, empty, turn=turn, memory=8, spill=tmp_path, schedule=schedule)
    assert done.adjoint.shape == empty.shape


THREE_LEVELS = (Level(MEMORY, 2), Level(DISK, 4, 1, 1), Level("disk2", None, 6, 6))


@pytest.mark.parametrize("n", [2, 40, 90])
def test_three_levels(n: int, tmp_path: Path) -> None:
    """Two disks, as H-Revolve wants them: both are used, and it is right."""
    near, far = tmp_path / "near", tmp_path / "far"
    near.mkdir()
    far.mkdir()
    schedule = HRevolve(n, THREE_LEVELS, 1, 2)
    options: dict[str, Any] = {"turn": turn, "memory": 3 * STATE_BYTES, "check": True}
    done = run(forward_in_place, reverse, n, START, spill=[near, far], schedule=schedule, **options)
    assert done.adjoint.tobytes() == plain(n)[0].tobytes()
    assert done.forward_steps == schedule.forward_steps
    if n == 90:
        assert min(schedule.slots.values()) > 0
    with pytest.raises(SequenceError, match=r"in a tier called 'disk2', but spill=... is called 'disk'"):
        run(forward, reverse, 90, START, spill=near, schedule=HRevolve(90, THREE_LEVELS, 1, 2), **options)


def test_three_levels_are_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Disks so slow that no transfer can be hidden; the nearer one is small."""

    def measured(disk: DiskTier, *_: Any, **__: Any) -> SlowMemory:
        seconds, room = (40.0, 1) if disk.name == DISK else (150.0, None)
        rate = STATE_BYTES / seconds
        links = Link("m", disk.name, 0, rate, rate), Link(disk.name, "m", 0, rate, rate)
        return SlowMemory(disk.name, *links, None if room is None else room * bytes_on_disk(STATE_BYTES))

    monkeypatch.setattr(planning, "time_steps", lambda *_: StepCosts(1.0, 0.0))
    monkeypatch.setattr(planning, "time_transfers", measured)
    done = run(forward, reverse, 400, START, turn=turn, memory=3 * STATE_BYTES, spill=[tmp_path, tmp_path])
    assert done.choice is not None
    assert isinstance(done.choice.schedule, HRevolve)
    assert min(done.choice.schedule.slots.values()) > 0
    assert done.forward_steps == done.choice.forward_steps
    assert done.adjoint.tobytes() == plain(400)[0].tobytes()


def test_state_of_many_parts(tmp_path: Path) -> None:
    """A tuple, list and dict of arrays of several types; one is not contiguous, one is no NumPy array."""
    Pair = collections.namedtuple("Pair", "u v")
    start: dict[str, Any] = {
        "pair": Pair(START.reshape(20, 30).T, array.array("d", [1.0, 2.0, 3.0])),
        "count": [np.arange(5, dtype=np.int32), np.float32(1.5)],
    }

    def step_forward(state: dict[str, Any], step: int) -> dict[str, Any]:
        u, v = state["pair"]
        count, scale = state["count"]
        return {"pair": Pair(np.sin(u) * scale, v + step), "count": [count + 1, scale]}

    def step_reverse(state: dict[str, Any], adjoint: float, step: int) -> float:
        assert isinstance(state["pair"], Pair)
        assert state["count"][0].tolist() == [step + k for k in range(5)]
        assert state["pair"].v.tolist() == [1.0 + step * (step - 1) // 2 + k for k in range(3)]
        return adjoint + float(state["pair"].u.sum())

    n = 30
    done = run(step_forward, step_reverse, n, start, turn=lambda _: 0.0, memory="24KiB", spill=tmp_path)
    u, total = START.reshape(20, 30).T, []
    for _ in range(n):
        total.append(float(u.sum()))
        u = np.sin(u) * np.float32(1.5)
    assert done.adjoint == sum(reversed(total), start=0.0) or done.adjoint == pytest.approx(sum(total), rel=1e-12)


def test_loaded_states_cannot_be_written_to() -> None:
    def spoiling(u: Array, adjoint: Array, step: int) -> Array:
        u += 1
        return adjoint

    with pytest.raises(ValueError, match="read-only"):
        run(forward, spoiling, 20, START, turn=turn, memory=4 * STATE_BYTES)


class TestBackPressure:
    @pytest.mark.usefixtures("queued_copies")
    def test_a_late_disk_makes_compute_wait(self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        """Never more blocks than slots: at most so many copies are under way at once."""
        under_way: list[int] = []
        real = DiskTier._pwrite

        def slow(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
            under_way.append(len(self._under_way))
            time.sleep(0.001)  # some hundred steps
            return real(self, fd, view, offset_bytes)

        monkeypatch.setattr(DiskTier, "_pwrite", slow)
        n, states = 60, 3
        schedule = Multistage(n, states, 1)
        done = run(
            forward,
            reverse,
            n,
            START,
            turn=turn,
            memory=(states + 1) * STATE_BYTES,
            spill=tmp_path,
            schedule=schedule,
        )
        assert done.adjoint.tobytes() == plain(n)[0].tobytes()
        assert done.slow_bytes == schedule.slots[DISK] * bytes_on_disk(STATE_BYTES)
        assert max(under_way) <= states
        assert done.waited_seconds > 0

    def test_the_interval_follows_the_steps(self) -> None:
        controller = IntervalController(10, 1.0, least=2)
        assert controller.interval(0) == 10
        for seconds, interval in ((1.2, 10), (8.0, 2), (0.1, 100)):
            for _ in range(20):
                controller.steps_took(10, 10 * seconds)
                found = controller.interval(0)
            assert found == interval
        for _ in range(20):
            assert controller.interval(0) == 100
            controller.steps_took(10, 1e4 if _ == 10 else 1.0)  # once is nothing

    def test_the_interval_follows_the_disk(self) -> None:
        """It takes twice as long as planned for: until the interval does, compute waits for the rest."""
        controller = IntervalController(10, 1.0)
        for _ in range(200):
            controller.was_late(max(20.0 - controller.interval(0), 0.0))
        assert 18 <= controller.interval(0) <= 22


class TestBadInput:
    def attempt(self, **changes: Any) -> None:
        given: dict[str, Any] = {"forward": forward, "reverse": reverse, "n": 30, "state": START, "turn": turn}
        run(**{**given, "memory": 5 * STATE_BYTES, **changes})

    @pytest.mark.parametrize(
        ("changes", "complaint"),
        [
            ({"n": 0}, "at least 1"),
            ({"n": -3}, "at least 1"),
            ({"memory": 2 * STATE_BYTES - 1}, "give at least 9.38 KiB"),
            ({"state": None}, "is None"),
            ({"state": []}, "no arrays"),
            ({"state": {"a": np.array([{}])}}, "plain numbers"),
            ({"state": np.ma.MaskedArray(START, START > 0.5)}, "a state is of the class MaskedArray"),
            ({"forward": lambda u, step: np.ma.MaskedArray(u, u > 0.5)}, "is of the class MaskedArray"),
            ({"forward": lambda u, step: u[:-1]}, r"state 1 is not like state 0: .*\(600,\).*got.*\(599,\)"),
            ({"forward": lambda u, step: u.astype(np.float32)}, "float32"),
            ({"forward": lambda u, step: (u, u)}, "state 1 is not like state 0"),
            ({"forward": lambda u, step: None}, "must return the next state"),
            ({"schedule": Revolve(29, 3)}, "for 29 steps"),
            ({"schedule": Revolve(30, 3), "n": lambda state, step: step < 30}, "not for any number"),
            ({"schedule": Revolve(30, 9)}, "give at least 46.9 KiB"),
            ({"schedule": Multistage(30, 3, 3)}, "spill=... is not given"),
            ({"schedule": Mixed(30, 3)}, "tapes cannot be stored"),
        ],
    )
    def test_one_clear_error(self, changes: dict[str, Any], complaint: str) -> None:
        with pytest.raises(SequenceError, match=complaint):
            self.attempt(**changes)

    def test_a_number_of_steps_that_is_not_whole(self) -> None:
        with pytest.raises(ArgumentError, match=r"n=30.0: it must be a whole number"):
            self.attempt(n=30.0)

    @pytest.mark.parametrize("n", [2, 30, lambda _, step: step < 30])
    def test_forward_that_returns_one_array_again_and_again(self, n: Any) -> None:
        """What does not change may be one, of course."""
        kept, fixed = np.empty_like(START), np.ones(3)

        def into(u: tuple[Array, Array], step: int) -> tuple[Array, Array]:
            return np.sin(u[0], out=kept), fixed

        with pytest.raises(SequenceError, match=r"has put state \d+ where it had put state \d+"):
            self.attempt(forward=into, state=(START, fixed), n=n)
        self.attempt(
            forward=lambda u, step: (np.sin(u[0]), fixed), state=(START, fixed), n=n, reverse=lambda u, a, _: a
        )

    @pytest.mark.parametrize("n", [3, 30, lambda _, step: step < 30])
    @pytest.mark.parametrize("altered", [False, True])
    def test_forward_that_exchanges_its_arrays(self, altered: bool, n: Any) -> None:
        """Each step puts what is new over what was before that, and maybe over its argument, too."""
        kept = [np.empty_like(START) for _ in range(2)]

        def exchange(state: tuple[Array, Array], step: int) -> tuple[Array, Array]:
            now, before = state
            now, before = now.copy(), np.sin(before, out=before if altered else None)
            kept[step % 2][:], kept[1 - step % 2][:] = before, now
            return kept[step % 2], kept[1 - step % 2]

        with pytest.raises(SequenceError, match=r"has put state \d+ where it had put state \d+"):
            self.attempt(forward=exchange, state=(START, START + 1), n=n)

    @pytest.mark.parametrize("n", [3, 30])
    def test_forward_that_puts_one_of_two_arrays_over_the_other(self, n: int) -> None:
        kept = [np.empty_like(START) for _ in range(2)]

        def leap(state: tuple[Array, Array], step: int) -> tuple[Array, Array]:
            now, before = state
            return np.subtract(2 * now, before, out=kept[step % 2]), now

        with pytest.raises(SequenceError, match=r"has put state \d+ where it had put state \d+"):
            self.attempt(forward=leap, state=(START, START + 1), n=n)

    @pytest.mark.parametrize("n", [3, 30, lambda _, step: step < 30])
    def test_forward_that_alters_its_argument_and_returns_one_array(self, n: Any) -> None:
        kept = np.empty_like(START)

        def into(u: Array, step: int) -> Array:
            u *= 0.5
            kept[:] = u
            return kept

        with pytest.raises(SequenceError, match=r"has put state \d+ where it had put state \d+"):
            self.attempt(forward=into, n=n)

    def test_forward_that_differs_when_run_again(self, tmp_path: Path) -> None:
        calls = itertools.count()
        with pytest.raises(SequenceError, match="another state when it was run again"):
            self.attempt(forward=lambda u, step: forward(u, step) + 1e-9 * next(calls), check=True)

    def test_shape_that_changes_late(self, tmp_path: Path) -> None:
        with pytest.raises(SequenceError, match="state 18 is not like state 0"):
            self.attempt(forward=lambda u, step: forward(u, step)[: WIDTH - (step == 17)], spill=tmp_path)

    def test_spill_directory_missing(self, tmp_path: Path) -> None:
        with pytest.raises(SpillError, match="does not exist"):
            self.attempt(spill=tmp_path / "none")

    @pytest.mark.usefixtures("queued_copies")
    @pytest.mark.parametrize("call", ["_pwrite", "_preadv"])
    def test_spill_directory_full_or_broken(self, call: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        calls = itertools.count()
        real = getattr(DiskTier, call)

        def fail(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
            if next(calls) > 4:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return int(real(self, fd, view, offset_bytes))

        monkeypatch.setattr(DiskTier, call, fail)
        with pytest.raises(SpillError, match="is full"):
            self.attempt(spill=tmp_path, schedule=Multistage(30, 3, 2))
        assert list(tmp_path.iterdir()) == []

    @pytest.mark.parametrize("fault", [ZeroDivisionError, KeyboardInterrupt])
    @pytest.mark.parametrize("where", ["forward", "reverse"])
    def test_errors_of_the_user_pass(self, fault: type[BaseException], where: str, tmp_path: Path) -> None:
        def broken(*arguments: Any) -> Array:
            if arguments[-1] == 12:
                raise fault
            return forward(*arguments) if where == "forward" else reverse(*arguments)

        with pytest.raises(fault):
            self.attempt(**{where: broken}, spill=tmp_path, schedule=Multistage(30, 3, 2))
        assert list(tmp_path.iterdir()) == []
