"""Files of named runs where the system fails for a moment, and runs that begin as others end."""

from __future__ import annotations

import errno
import fcntl
import itertools
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import SpillError
from ebbtide.run.tiers import DiskTier, queued
from ebbtide.run.tiers.lanes import Lane
from tests.sequence.test_named import Array, attempt, check_whole, killed_at, lines

pytestmark = pytest.mark.usefixtures("nothing_left")


def fail(fault: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise fault

    return call


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (DiskTier, "_preadv", OSError(errno.EIO, os.strerror(errno.EIO))),
        (queued, "take_memory", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
    ],
)
def test_what_cannot_be_read_now_is_not_taken_for_torn(
    owner: Any, name: str, fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All states were passed over, and the folder deleted in the end."""
    killed_at(tmp_path, 77)
    newest = lines(tmp_path)[-1]["step"]
    folder = re.escape(str(tmp_path / "ebbtide-wave"))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail(fault))
        with pytest.raises(SpillError, match=f"nothing in {folder} was touched: start the run again") as caught:
            attempt(tmp_path)
    assert str(fault.args[-1]) in str(caught.value)
    assert check_whole(tmp_path).resumed_step == newest > 50


def is_locked(directory: Path) -> bool:
    """Whether another process could not take up the run."""
    with (directory / "ebbtide-wave" / "journal").open() as journal:
        try:
            fcntl.flock(journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


def test_the_lock_is_held_until_the_last_write_has_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that went on from then had its states written over."""
    begun, closing, locked = threading.Event(), threading.Event(), list[bool]()
    write, close = DiskTier._pwrite, Lane.close

    def slow(disk: DiskTier, fd: int, view: memoryview, offset_bytes: int) -> int:
        begun.set()
        assert closing.wait(30)
        locked.append(is_locked(tmp_path))
        return write(disk, fd, view, offset_bytes)

    def closed(lane: Lane) -> None:
        closing.set()
        close(lane)

    def broken(u: Array, step: int) -> Array:
        assert begun.wait(30)
        raise ZeroDivisionError

    monkeypatch.setattr(DiskTier, "_pwrite", slow)
    monkeypatch.setattr(Lane, "close", closed)
    with pytest.raises(ZeroDivisionError):
        attempt(tmp_path, forward=broken)
    assert locked == [True]
    assert list(tmp_path.iterdir()) == []


def test_others_are_locked_out_until_all_is_deleted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One that had its own journal before that opened the states of this run, and lost what it added to them."""
    unlink, locked = Path.unlink, list[bool]()

    def deleted(path: Path, **options: Any) -> None:
        if path.name == "states":
            locked.append(is_locked(tmp_path))
        unlink(path, **options)

    monkeypatch.setattr(Path, "unlink", deleted)
    attempt(tmp_path)
    assert locked == [True]
    assert list(tmp_path.iterdir()) == []


def test_lines_that_are_written_a_part_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a disk is about to be full. Lines were torn, and what came after them was passed over."""
    write = os.write
    with monkeypatch.context() as patch:
        patch.setattr(os, "write", lambda fd, line: write(fd, line[: (len(line) + 1) // 2]))
        killed_at(tmp_path, 77)
    newest = lines(tmp_path)[-1]["step"]
    assert check_whole(tmp_path).resumed_step == newest > 50


@pytest.mark.parametrize("written", [0, 1])
def test_no_room_for_the_journal(written: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for its first line nor for that of the first state: there is nothing to go on from."""
    write, count = os.write, itertools.count()

    def full(fd: int, line: bytes) -> int:
        if next(count) >= written:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write(fd, line)

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(SpillError, match="No space left on device"):
            attempt(tmp_path)
    assert list(tmp_path.iterdir()) == []
