"""Copies that the C library makes: what comes back, and whatever may go wrong."""

from __future__ import annotations

import errno
import os
import resource
import signal
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from ebbtide.errors import SpillError
from ebbtide.run.tiers.memory import take_memory
from ebbtide.sequence import aio, run
from ebbtide.sequence.disk import StateDisk
from ebbtide.sequence.schedules import Multistage
from tests.sequence.test_run import START, STATE_BYTES, forward, plain, reverse, turn

pytestmark = [
    pytest.mark.usefixtures("nothing_left"),
    pytest.mark.skipif(not aio.is_there(), reason="needs the GNU C library"),
]
SIZE = 1 << 16


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[StateDisk]:
    disk = StateDisk(tmp_path)
    yield disk
    disk.close()


def filled(disk: StateDisk, number: int) -> torch.UntypedStorage:
    storage = take_memory(SIZE, 0, disk.congruence_bytes)
    torch.empty(0, dtype=torch.uint8).set_(storage).fill_(number)
    return storage


def content(storage: torch.UntypedStorage) -> set[int]:
    return set(torch.empty(0, dtype=torch.uint8).set_(storage).tolist())


def test_many_at_once(disk: StateDisk) -> None:
    """Each comes back as it was, in any order; places that were given back are taken again."""
    copies = [disk.store(filled(disk, number)) for number in range(20)]
    for copy in copies:
        assert isinstance(copy, aio.AioCopy)
        copy.wait()
        assert copy.ready
        assert copy.storage is None  # not held any more
    back = [filled(disk, 99) for _ in copies]
    loads = [disk.bring(copies[number].place, back[number]) for number in reversed(range(20))]
    for load in loads:
        load.wait()
    assert [content(storage) for storage in back] == [{number} for number in range(20)]
    end = disk.file_bytes
    for copy in copies:
        disk.forget(copy.place)
    disk.store(filled(disk, 1)).wait()
    assert disk.file_bytes == end == 20 * SIZE


def test_what_was_not_waited_for_is_done_at_the_end(tmp_path: Path) -> None:
    disk = StateDisk(tmp_path)
    fd = os.dup(disk._fd)
    for number in range(5):
        disk.store(filled(disk, number))
    disk.close()
    assert os.fstat(fd).st_size == 5 * SIZE
    os.close(fd)
    with pytest.raises(SpillError, match="closed"):
        disk.store(filled(disk, 0))


def limited(size_bytes: int) -> None:
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes, resource.RLIM_INFINITY))


@pytest.mark.parametrize("room", [0, SIZE + SIZE // 2])
def test_no_room(room: int, disk: StateDisk) -> None:
    """For a state, or for a part of one: the C library has written half of it then."""
    limited(room)
    try:
        copies = [disk.store(filled(disk, number)) for number in range(2)]
        if room:
            copies[0].wait()
        with pytest.raises(SpillError, match=r"may not grow so far \(File too large\).*`ulimit -f`"):
            copies[1].wait()
    finally:
        limited(resource.RLIM_INFINITY)


def test_a_run_without_room(tmp_path: Path) -> None:
    """One clear error, and nothing is left."""
    schedule = Multistage(60, 3, 2)
    limited(8 * STATE_BYTES)
    try:
        with pytest.raises(SpillError, match=r"may not grow so far \(File too large\).*`ulimit -f`"):
            run(forward, reverse, 60, START, turn=turn, memory=4 * STATE_BYTES, spill=tmp_path, schedule=schedule)
    finally:
        limited(resource.RLIM_INFINITY)
    assert list(tmp_path.iterdir()) == []


def test_too_few_descriptors(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of the three that the C library needs there is one. It is given back."""
    before, dup, left = set(os.listdir("/proc/self/fd")), os.dup, iter([True])

    def dup_once(fd: int) -> int:
        if next(left, False):
            return dup(fd)
        raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

    monkeypatch.setattr(os, "dup", dup_once)
    schedule = Multistage(60, 3, 2)
    with pytest.raises(SpillError, match=r"cannot be opened once more.*`ulimit -n`"):
        run(forward, reverse, 60, START, turn=turn, memory=4 * STATE_BYTES, spill=tmp_path, schedule=schedule)
    assert set(os.listdir("/proc/self/fd")) == before


def test_file_cut_off(disk: StateDisk) -> None:
    copy = disk.store(filled(disk, 3))
    copy.wait()
    os.ftruncate(disk._fd, SIZE // 2)
    with pytest.raises(SpillError, match="bytes could be moved"):
        disk.bring(copy.place, filled(disk, 4)).wait()


def test_rest_of_a_short_copy(disk: StateDisk) -> None:
    """Of a state that was read in part, what is missing is read."""
    copy = disk.store(filled(disk, 3))
    copy.wait()
    storage = filled(disk, 4)
    file = disk._file
    assert file is not None
    load = file.read(storage, 0, copy.place)
    load.settle()
    torch.empty(0, dtype=torch.uint8).set_(storage)[SIZE // 4 :].fill_(9)
    file.amend(load, SIZE // 4 + 100, 0)
    assert content(storage) == {3}
    load.wait()


def test_fork(tmp_path: Path) -> None:
    """A fork waits for what is under way; the child goes by threads of its own, and a disk of the parent is refused."""
    disk = StateDisk(tmp_path)
    storage = filled(disk, 9)
    copies = [disk.store(filled(disk, number)) for number in range(5)]
    process = os.fork()
    if process == 0:
        signal.alarm(20)
        try:
            os._exit(0 if all(copy.ready for copy in copies) and _can_run(disk, storage, tmp_path) else 1)
        finally:
            os._exit(2)
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    for copy in copies:
        copy.wait()
    disk.close()


def _can_run(disk: StateDisk, storage: torch.UntypedStorage, directory: Path) -> bool:
    with pytest.raises(SpillError, match="another process"):
        disk.store(storage)
    schedule = Multistage(60, 3, 4)
    done = run(forward, reverse, 60, START, turn=turn, memory=4 * STATE_BYTES, spill=directory, schedule=schedule)
    return not aio.is_there() and done.adjoint.tobytes() == plain(60)[0].tobytes()


def test_an_interrupt_while_close_waits() -> None:
    """Memory that the C library works with is kept until it is done, and descriptors are given back."""
    source, sink = os.pipe()
    file = aio.AsyncFile(source, 1, lambda *_: None)
    descriptors = list(file._fds)
    file.read(take_memory(SIZE, 0, 4096), 0, None)
    feeding = threading.Timer(0.6, lambda: os.write(sink, bytes(SIZE)))
    former = signal.signal(signal.SIGALRM, signal.default_int_handler)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.2)
        feeding.start()
        with pytest.raises(KeyboardInterrupt):
            file.close()
    finally:
        signal.signal(signal.SIGALRM, former)
        feeding.join()
    file.close()
    assert not file._under_way
    for descriptor in descriptors:
        with pytest.raises(OSError, match="Bad file descriptor"):
            os.fstat(descriptor)
    os.close(source)
    os.close(sink)


def test_a_child_keeps_no_descriptors(disk: StateDisk, tmp_path: Path) -> None:
    """Or the file would take its space for as long as the child lives."""
    disk.store(filled(disk, 3)).wait()
    process = os.fork()
    if process == 0:
        links = [os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()]
        os._exit(sum(link.startswith(f"{tmp_path.resolve()}/") for link in links))
    _, status = os.waitpid(process, 0)
    assert os.waitstatus_to_exitcode(status) == 0
