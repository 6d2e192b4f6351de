"""Runs that are killed, and go on: by SIGKILL at many points, and with files that are torn on top of it."""

from __future__ import annotations

import errno
import fcntl
import itertools
import json
import os
import signal
import zlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ebbtide.errors import ArgumentError, SequenceError, SpillError
from ebbtide.machine import Link
from ebbtide.run.tiers import DiskTier
from ebbtide.sequence import Outcome, SlowMemory, interval_control, planning, run
from ebbtide.sequence.schedules import (
    DISK,
    MEMORY,
    Advance,
    Drop,
    HRevolve,
    Level,
    Multistage,
    Schedule,
    Store,
    StoreAll,
    interpret,
)
from ebbtide.sequence.schedules.continued import resumed
from ebbtide.sequence.trial import StepCosts

pytestmark = pytest.mark.usefixtures("nothing_left")
Array = npt.NDArray[np.float64]
WIDTH = 700
START = np.linspace(0.1, 0.9, WIDTH)
N, INTERVAL = 120, 7
SCHEDULE = Multistage(N, 3, INTERVAL)


def forward(u: Array, step: int) -> Array:
    return np.asarray(np.sin(u + 0.01 * step) + 0.3 * np.roll(u, 1))


def reverse(u: Array, adjoint: Array, step: int) -> Array:
    return np.asarray(np.cos(u + 0.01 * step) * adjoint + 0.3 * np.roll(adjoint, -1))


def attempt(directory: Path, **changes: Any) -> Outcome:
    given: dict[str, Any] = {"forward": forward, "reverse": reverse, "n": N, "state": START, "turn": lambda u: 2 * u}
    options = {"memory": 4 * START.nbytes, "spill": directory, "name": "wave", "schedule": SCHEDULE}
    return run(**{**given, **options, **changes})


def die() -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def killed(call: Callable[[], object]) -> None:
    """Run ``call`` in another process, which must be killed by it."""
    process = os.fork()
    if process == 0:
        try:
            call()
        finally:
            os._exit(1)  # it was not
    _, status = os.waitpid(process, 0)
    assert os.WIFSIGNALED(status)
    assert os.WTERMSIG(status) == signal.SIGKILL


def killed_at(directory: Path, step: int, **changes: Any) -> None:
    """Kill a run when it first comes to ``step``."""

    def dying(u: Array, now: int) -> Array:
        if now == step:
            die()
        return forward(u, now)

    killed(lambda: attempt(directory, forward=dying, **changes))


def check_whole(directory: Path, **changes: Any) -> Outcome:
    """Run to the end; the result must be that of a run without interruption, and nothing may be left."""
    done = attempt(directory, **changes)
    whole = attempt(directory, name=None, spill=None, schedule=None, memory=(N + 1) * START.nbytes)
    assert done.adjoint.tobytes() == whole.adjoint.tobytes()
    assert done.final.tobytes() == whole.final.tobytes()
    assert list(directory.iterdir()) == []
    return done


def test_numbers_of_numpy(tmp_path: Path) -> None:
    changes = {"n": np.int64(N), "schedule": Multistage(np.int64(N), 3, np.int64(INTERVAL))}  # type: ignore[arg-type]
    killed_at(tmp_path, 30, **changes)
    assert check_whole(tmp_path, **changes).resumed_step > 0


def test_working_directory_that_changes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The files of a run in a relative directory stayed when it had ended; those without a name were made elsewhere."""
    (tmp_path / "spill").mkdir()
    for name in ("wave", None):
        monkeypatch.chdir(tmp_path)

        def moving(u: Array, step: int) -> Array:
            os.chdir("/")
            return forward(u, step)

        attempt(Path("spill"), forward=moving, name=name)
    assert list((tmp_path / "spill").iterdir()) == []


def test_arrays_that_share_memory_are_told_of(tmp_path: Path) -> None:
    """The one that lies in another is altered with it when the run goes on, too."""

    def halved(state: tuple[Array, Array], step: int) -> tuple[Array, Array]:
        if step == 60 and not done:
            die()
        state[1][:] = np.sin(state[0][::2] + 0.01 * step)
        return state

    field, done = START.copy(), False
    changes = {"state": (field, field[::2]), "turn": lambda u: u[0], "memory": 8 * START.nbytes}
    options = {"forward": halved, "reverse": lambda u, adjoint, step: adjoint + u[0] * u[1].sum(), **changes}
    killed(lambda: attempt(tmp_path, **options))
    done = True
    assert attempt(tmp_path, **options).resumed_step > 0 == len(list(tmp_path.iterdir()))


def test_killed_before_a_child_of_its_own(tmp_path: Path) -> None:
    """As a worker of a pool may be, which has all open files."""
    reading, writing = os.pipe()

    def dying(u: Array, step: int) -> Array:
        if step == 77:
            if os.fork() == 0:
                os.write(writing, b"%d" % os.getpid())  # what is done after a fork is done by then
                signal.pause()
            die()
        return forward(u, step)

    killed(lambda: attempt(tmp_path, forward=dying))
    child = int(os.read(reading, 20))
    try:
        assert check_whole(tmp_path).resumed_step > 0
    finally:
        os.kill(child, signal.SIGKILL)
        os.close(reading)
        os.close(writing)


@pytest.mark.parametrize("every", [1, 3])
def test_elements_in_another_order_than_those_of_state_0(every: int, tmp_path: Path) -> None:
    """All states after it, or some of them, lie in Fortran's order."""

    def ordered(u: Array, step: int) -> Array:
        return np.array(forward(u, step), order="F" if step % every == 0 else "C")

    def dying(u: Array, step: int) -> Array:
        if step == 77:
            die()
        return ordered(u, step)

    changes = {"forward": ordered, "state": START.reshape(7, 100)}
    killed(lambda: attempt(tmp_path, **{**changes, "forward": dying}))
    assert check_whole(tmp_path, **changes).resumed_step > 50


@pytest.mark.parametrize("step", [0, 1, 30, 77, N - 1])
def test_killed_in_the_forward_sweep(step: int, tmp_path: Path) -> None:
    killed_at(tmp_path, step)
    done = check_whole(tmp_path, check=True)
    assert done.resumed_step % INTERVAL == 0
    assert done.resumed_step <= step
    assert step < 30 or done.resumed_step >= step - 5 * INTERVAL
    assert done.forward_steps == SCHEDULE.forward_steps - done.resumed_step


@pytest.mark.parametrize("count", [16, 200])
def test_more_memory_than_before(count: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With so much, a run that begins leaves its last states in memory. Those that are there count nevertheless."""
    rate = START.nbytes / 9e-4
    disk = SlowMemory(DISK, Link("m", DISK, 0, rate, rate), Link(DISK, "m", 0, rate, rate))
    monkeypatch.setattr(planning, "time_transfers", lambda *_, **__: disk)
    monkeypatch.setattr(planning, "time_steps", lambda *_: StepCosts(1e-4, 0.0))
    monkeypatch.setattr(interval_control, "STEADY", 1e9)
    monkeypatch.setattr(interval_control, "LATE_SHARE", 1e9)
    killed_at(tmp_path, 110, schedule=None)
    newest = max(line["step"] for line in lines(tmp_path)[1:])
    assert newest > 80
    assert check_whole(tmp_path, schedule=None, memory=count * START.nbytes).resumed_step == newest


def test_killed_again_and_again(tmp_path: Path) -> None:
    for step in (40, 60, 61, 90):
        killed_at(tmp_path, step)
    assert check_whole(tmp_path).resumed_step > 50


def test_killed_while_steps_are_reversed(tmp_path: Path) -> None:
    """The states that are dropped on the way back are still there."""

    def dying(u: Array, adjoint: Array, step: int) -> Array:
        if step == 30:
            die()
        return reverse(u, adjoint, step)

    killed(lambda: attempt(tmp_path, reverse=dying))
    assert check_whole(tmp_path).resumed_step > 60


@pytest.mark.parametrize("write", [0, 3, 8])
def test_killed_in_a_write(write: int, tmp_path: Path) -> None:
    """Half of a state is in the file."""
    real, count = DiskTier._pwrite, 0

    def half(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
        nonlocal count
        count += 1
        if count > write:
            real(self, fd, view[: self.block_bytes], offset_bytes)
            die()
        return real(self, fd, view, offset_bytes)

    def call() -> None:
        DiskTier._pwrite = half  # type: ignore[method-assign]  # in that process alone
        attempt(tmp_path)

    killed(call)
    assert check_whole(tmp_path).resumed_step <= max(write - 1, 0) * INTERVAL


def lines(directory: Path) -> list[dict[str, Any]]:
    return [json.loads(line[9:]) for line in (directory / "ebbtide-wave" / "journal").read_text().splitlines()]


def flip(path: Path, offset: int) -> None:
    content = bytearray(path.read_bytes())
    content[offset] ^= 4
    path.write_bytes(content)


@pytest.mark.parametrize(
    "tear", ["state cut off", "state flipped", "line cut off", "line flipped", "states gone", "journal empty"]
)
def test_torn_files(tear: str, tmp_path: Path) -> None:
    """The last whole state is taken."""
    killed_at(tmp_path, 77)
    folder = tmp_path / "ebbtide-wave"
    states, journal = folder / "states", folder / "journal"
    steps = [line["step"] for line in lines(tmp_path)[1:]]
    last = lines(tmp_path)[-1]["offset_bytes"]
    expected = steps[-2]
    if tear == "state cut off":
        os.truncate(states, last + START.nbytes // 2)
    elif tear == "state flipped":
        flip(states, last + START.nbytes - 100)
    elif tear == "line cut off":
        os.truncate(journal, journal.stat().st_size - 5)
    elif tear == "line flipped":
        flip(journal, journal.stat().st_size - 5)
    elif tear == "states gone":
        states.unlink()
        expected = 0
    else:
        os.truncate(journal, 0)
        expected = 0
    assert check_whole(tmp_path).resumed_step == expected


def test_an_earlier_state_that_is_torn(tmp_path: Path) -> None:
    """It is found when it comes back, and told; nothing wrong is computed."""
    killed_at(tmp_path, 77)
    flip(tmp_path / "ebbtide-wave" / "states", lines(tmp_path)[3]["offset_bytes"] + 1000)
    with pytest.raises(SpillError, match="other than they were written"):
        attempt(tmp_path)


def test_another_run_of_the_same_name(tmp_path: Path) -> None:
    killed_at(tmp_path, 77)
    for changes, complaint in (
        ({"n": N - 1, "schedule": None}, f"its number of steps was {N}, now {N - 1}"),
        ({"state": START + 1}, "its state 0 was"),
        ({"state": START[1:]}, r"its state was \['the state: float64 of shape \(700,\)'\]"),
    ):
        with pytest.raises(SequenceError, match=complaint):
            attempt(tmp_path, **changes)
    assert check_whole(tmp_path).resumed_step > 50


def test_a_run_that_is_under_way(tmp_path: Path) -> None:
    killed_at(tmp_path, 77)
    with (tmp_path / "ebbtide-wave" / "journal").open() as journal:
        fcntl.flock(journal, fcntl.LOCK_EX)
        with pytest.raises(SequenceError, match="under way in another process"):
            attempt(tmp_path)
    assert check_whole(tmp_path).resumed_step > 50


@pytest.mark.parametrize("step", [0, 77])
def test_errors_of_the_user_keep_what_is_there(step: int, tmp_path: Path) -> None:
    def broken(u: Array, now: int) -> Array:
        if now == step:
            raise ZeroDivisionError
        return forward(u, now)

    with pytest.raises(ZeroDivisionError):
        attempt(tmp_path, forward=broken)
    assert len(list(tmp_path.iterdir())) == (step > 0)
    assert (check_whole(tmp_path).resumed_step > 50) == (step > 0)


def test_spill_directory_full(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One error; once there is room again, the run goes on."""
    real, count = DiskTier._pwrite, itertools.count()

    def fail(self: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
        if next(count) >= 8:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(self, fd, view, offset_bytes)

    with monkeypatch.context() as patch:
        patch.setattr(DiskTier, "_pwrite", fail)
        with pytest.raises(SpillError, match="is full"):
            attempt(tmp_path)
    assert check_whole(tmp_path).resumed_step == 7 * INTERVAL


@pytest.mark.parametrize(
    ("changes", "complaint"),
    [
        ({"spill": None}, "give one directory as spill"),
        ({"spill": ["/tmp", "/var/tmp"]}, "give one directory as spill"),
        ({"n": lambda state, step: step < N, "schedule": None}, "a known number of steps"),
    ],
)
def test_bad_input(changes: dict[str, Any], complaint: str, tmp_path: Path) -> None:
    with pytest.raises(SequenceError, match=complaint):
        attempt(tmp_path, **changes)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["a/b", ""])
def test_bad_names(name: str, tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="cannot be that of a folder"):
        attempt(tmp_path, name=name)
    assert list(tmp_path.iterdir()) == []


def test_spill_directory_missing(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="does not exist"):
        attempt(tmp_path / "none")


def test_chosen_schedule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The intervals of the run that was killed are kept, whatever is measured now."""

    def measured(write_steps: float) -> None:
        def slow(*_: Any, **__: Any) -> SlowMemory:
            rate = START.nbytes / (1e-4 * write_steps)
            return SlowMemory(DISK, Link("m", DISK, 0, rate, rate), Link(DISK, "m", 0, rate, rate))

        monkeypatch.setattr(planning, "time_transfers", slow)
        monkeypatch.setattr(planning, "time_steps", lambda *_: StepCosts(1e-4, 0.0))

    monkeypatch.setattr(interval_control, "STEADY", 1e9)  # the interval is not chosen again
    monkeypatch.setattr(interval_control, "LATE_SHARE", 1e9)
    measured(9)
    killed_at(tmp_path, 60, schedule=None)
    steps = [line["step"] for line in lines(tmp_path)[1:]]
    measured(25)
    done = check_whole(tmp_path, schedule=None)
    assert done.resumed_step == steps[-1] > 20
    assert done.choice is not None
    assert isinstance(done.choice.schedule, Multistage)
    assert done.choice.schedule.interval != steps[1]


@pytest.mark.parametrize(
    "schedule",
    [
        SCHEDULE,
        Multistage(N, 4, 5),
        StoreAll(N, tier=DISK),
        HRevolve(N, (Level(MEMORY, 3), Level(DISK, None, 2, 2))),
    ],
)
@pytest.mark.parametrize("there", [[], [0], [0, 7, 14], [0, 5, 10, 60], [0, 1, 2, 3], list(range(0, N, 3))])
def test_what_is_left_out_is_not_needed(schedule: Schedule, there: list[int]) -> None:
    """The judge follows the shortened records after those that put the states there."""
    slots = {MEMORY: None, DISK: None}
    records = list(resumed(schedule.records(), there, DISK))
    before: list[Any] = []
    for step, following in itertools.zip_longest(there, there[1:]):
        before.append(Store(step, DISK))
        before += [] if following is None else [Advance(step, following)]
    whole = [*before, *records]
    dropped = {record.step for record in records if isinstance(record, Drop) and record.tier == DISK}
    whole += [Drop(step, DISK) for step in there if step not in dropped]
    assert interpret(whole, N, slots).reversed_steps == N


def test_lines_are_as_documented(tmp_path: Path) -> None:
    killed_at(tmp_path, 30)
    for line in (tmp_path / "ebbtide-wave" / "journal").read_bytes().splitlines():
        assert int(line[:8], 16) == zlib.crc32(line[9:])
