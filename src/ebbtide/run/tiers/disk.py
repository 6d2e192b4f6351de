"""A temporary file as slower memory: unlinked, readable by its owner only, and read and written without the page cache.

NOTE [Direct I/O without copies]
Direct I/O wants memory, length and file offset aligned to blocks (512 bytes on most disks), and tensors are aligned to
64. So the whole blocks inside a storage go straight from its memory to the file, and the less than one block before
and after them stays in the slot as Python bytes. On the way back, memory is taken that begins at the same address
modulo a block, so that the same whole blocks come straight to where they belong. What the file system's page cache
would do instead: one more copy of every byte, and the bytes that were to leave RAM still in RAM.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import errno
import fcntl
import functools
import logging
import mmap
import os
import resource
import tempfile
import warnings
import zlib
from collections.abc import Callable
from pathlib import Path

from ebbtide.errors import SpillError
from ebbtide.machine import TierKind
from ebbtide.run.tiers.memory import CONGRUENCE_BYTES, copy_memory, read_memory
from ebbtide.run.tiers.places import Places
from ebbtide.run.tiers.queued import QueuedTier
from ebbtide.run.tiers.transfers import QueuedLoad, Slot
from ebbtide.units import format_bytes, round_up

PLACE_ALIGNMENT_BYTES = 4096
"""Places begin at multiples of this: the largest block that disks in use ask for."""
PART_BYTES = 32 << 20
"""Each part wakes a thread where all cores compute. In parts of 8 MiB a gibibyte cost compute 15 ms here, in parts of
32 or 64 MiB 11 ms, and an LSTM's step within half its memory 1.048 times the plain one instead of 1.023."""
CHECKED_BYTES = 256 << 10
"""Checksums are made of copies of this size."""
READERS = 2
"""With one, the disk waits while new memory is faulted in: two read 10 to 40 % faster here, a third adds nothing."""
REFUSALS = {
    errno.ENOSPC: ("spill directory {} is full", "free some space there"),
    errno.EDQUOT: ("your quota in spill directory {} is used up", "delete files of yours there"),
    errno.EFBIG: ("the spill file in {} may not grow so far", "raise the limit on the size of a file (`ulimit -f`)"),
}
"""What errors of the system mean for a spill directory, and what to do about them besides choosing another."""
TOO_MANY_FILES = {
    errno.EMFILE: "this process has too many open; close some, or raise the limit (`ulimit -n`)",
    errno.ENFILE: "the system has too many open; end what has many, or raise its limit (fs.file-max)",
}
NOT_WRITABLE = "is not writable ({}); choose another with spill=..."
RAM_FILE_SYSTEMS = {0x01021994: "tmpfs", 0x858458F6: "ramfs"}
"""``f_type`` of statfs(2) for file systems that live in RAM."""

_log = logging.getLogger(__name__)


@dataclasses.dataclass(slots=True)
class DiskPlace:
    """Where a slot's bytes are: ``head``, then whole blocks in the file, then ``tail``.

    Attributes:
        offset_bytes, size_bytes: the place in the file.
        head_bytes: how many bytes come before the first whole block.
        checksums: the checksum of each part in the file, by where it starts, if wanted.
    """

    offset_bytes: int
    size_bytes: int
    head_bytes: int
    head: bytes = b""
    tail: bytes = b""
    checksums: dict[int, int] = dataclasses.field(default_factory=dict)


class DiskTier(QueuedTier):
    """A file in ``directory`` that is gone with the process.

    Args:
        directory: where the file is made.
        checksum: whether to compare what comes back with what was written, by CRC-32.
        name: how machines and plans name this tier.
        writers: how many threads write.

    Raises:
        SpillError: if the directory is missing, is none, is not writable or is full.

    Warns:
        UserWarning: if the directory is in RAM, where moving tensors frees nothing.
    """

    kind: TierKind = "disk"
    part_bytes = PART_BYTES

    def __init__(self, directory: str | Path, *, checksum: bool = False, name: str = "disk", writers: int = 1) -> None:
        self.directory = Path(directory)
        self.checksum = checksum
        _warn_if_ram(self.directory)
        self._fd = open_unlinked(self.directory)
        try:
            self.block_bytes = switch_to_direct(self._fd)
        except BaseException as fault:  # Ctrl-C, too: this waits for the disk
            os.close(self._fd)
            if not isinstance(fault, OSError):
                raise
            raise _refused(self.directory, fault, "cannot be used: {}; choose another with spill=...") from fault
        _log.info(
            "spill file in %s: blocks of %d bytes%s", self.directory, self.block_bytes, _caching(self.block_bytes)
        )
        self.congruence_bytes = max(CONGRUENCE_BYTES, self.block_bytes)
        self._places = Places()
        super().__init__(name, readers=READERS, writers=writers, release_all=functools.partial(os.close, self._fd))

    @property
    def file_bytes(self) -> int:
        """Size that the file has needed so far."""
        return self._places.end_bytes

    def _reserve(self, slot: Slot) -> None:
        head_bytes = min(-slot.pointer % self.block_bytes, slot.size_bytes)
        slot.payload_bytes = (slot.size_bytes - head_bytes) // self.block_bytes * self.block_bytes
        size_bytes = round_up(slot.payload_bytes, PLACE_ALIGNMENT_BYTES)
        slot.place = DiskPlace(self._places.take(size_bytes), size_bytes, head_bytes)

    def _release(self, place: DiskPlace) -> None:
        self._places.give_back(place.offset_bytes, place.size_bytes)

    def _store(self, slot: Slot, start: int, stop: int) -> None:
        place: DiskPlace = slot.place
        self._put(place, slot.pointer + place.head_bytes + start, start, stop)

    def _fetch(self, load: QueuedLoad, start: int, stop: int) -> None:
        place: DiskPlace = load.slot.place
        self._get(place, load.pointer + place.head_bytes + start, start, stop)

    def _put(self, place: DiskPlace, pointer: int, start: int, stop: int) -> None:
        """Write what is at ``pointer`` as a part of the whole blocks."""
        view = memory_view(pointer, stop - start)
        if self.checksum:
            place.checksums[start] = _checksum(pointer, stop - start)
        self._move(self._pwrite, view, place.offset_bytes + start)

    def _get(self, place: DiskPlace, pointer: int, start: int, stop: int) -> None:
        """Read a part of the whole blocks to ``pointer``."""
        view = memory_view(pointer, stop - start)
        self._move(self._preadv, view, place.offset_bytes + start)
        if self.checksum and zlib.crc32(view) != place.checksums[start]:
            raise SpillError(
                f"{format_bytes(stop - start)} came back from {self.directory} other than they were written; "
                "check that disk, and choose another directory with spill=..."
            )

    def _after_store(self, slot: Slot) -> None:
        place: DiskPlace = slot.place
        end = place.head_bytes + slot.payload_bytes
        place.head = read_memory(slot.pointer, place.head_bytes)
        place.tail = read_memory(slot.pointer + end, slot.size_bytes - end)

    def _after_fetch(self, load: QueuedLoad) -> None:
        place: DiskPlace = load.slot.place
        ctypes.memmove(load.pointer, place.head, len(place.head))
        ctypes.memmove(load.pointer + load.size_bytes - len(place.tail), place.tail, len(place.tail))

    def _move(self, call: Callable[[int, memoryview, int], int], view: memoryview, offset_bytes: int) -> None:
        """Read or write all of ``view``; the system may do less than it was asked to."""
        done = 0
        while done < len(view):
            count = call(self._fd, view[done:], offset_bytes + done)
            # After a short transfer, direct I/O can only go on at a whole block.
            count -= count % self.block_bytes
            if count <= 0:
                raise SpillError(
                    f"only {done} of {len(view)} bytes could be moved at offset {offset_bytes} of the spill file in "
                    f"{self.directory}; check that disk, or choose another directory with spill=..."
                )
            done += count

    def _pwrite(self, fd: int, view: memoryview, offset_bytes: int) -> int:
        return os.pwrite(fd, view, offset_bytes)

    def _preadv(self, fd: int, view: memoryview, offset_bytes: int) -> int:
        return os.preadv(fd, [view], offset_bytes)

    def _explain(self, fault: BaseException, transfer: Slot | QueuedLoad) -> str:
        return self.explain(fault, transfer.size_bytes, "writing" if isinstance(transfer, Slot) else "reading")

    def explain(self, fault: BaseException, size_bytes: int, doing: str) -> str:
        """Say what happened while ``doing`` something with so many bytes, and what to do about it."""
        size = format_bytes(size_bytes)
        code = fault.errno if isinstance(fault, OSError) else None
        if code == errno.EINVAL and self.file_bytes > resource.getrlimit(resource.RLIMIT_FSIZE)[0] >= 0:
            code = errno.EFBIG  # up to a limit within a block there is less to write than direct I/O takes
        if code in REFUSALS:
            what, advice = REFUSALS[code]
            free = ""
            if code == errno.ENOSPC:
                with contextlib.suppress(OSError):  # asked of the file: the directory may be gone by now, or the disk
                    free = f", {format_bytes(free_bytes(self._fd))} are free"
            return (
                f"{what.format(self.directory)} ({os.strerror(code)}): {doing} a tensor of {size} failed{free}; "
                f"{advice}, choose another directory with spill=..., or allow more memory"
            )
        text = fault.strerror if isinstance(fault, OSError) and fault.strerror else repr(fault)
        return (
            f"{doing} a tensor of {size} in spill directory {self.directory} failed: {text}; check that disk, or "
            "choose another directory with spill=..."
        )


def open_unlinked(directory: Path) -> int:
    """Descriptor of a new file in ``directory`` that has no name there.

    Raises:
        SpillError: if the directory is missing, is none, or no file can be made in it.
    """
    check_directory(directory)
    try:
        try:
            return os.open(directory, os.O_TMPFILE | os.O_RDWR | os.O_CLOEXEC, 0o600)
        except OSError as fault:
            if fault.errno not in (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT):
                raise
            _log.info("%s has no unnamed files (%s): a named one is made and unlinked", directory, fault.strerror)
            fd, path = tempfile.mkstemp(prefix="ebbtide-", dir=directory)
            os.unlink(path)
            return fd
    except OSError as fault:
        raise _refused(directory, fault, NOT_WRITABLE) from fault


def check_directory(directory: Path) -> None:
    """Raise `SpillError` if a directory is missing, is none, or is not writable."""
    try:
        found = directory.exists()
    except OSError as fault:  # a directory above it may not be looked into
        raise _refused(directory, fault, NOT_WRITABLE) from fault
    if not found:
        raise SpillError(f"spill directory {directory} does not exist; make it, or choose another with spill=...")
    if not directory.is_dir():
        raise SpillError(f"spill directory {directory} is not a directory; choose one with spill=...")
    if not os.access(directory, os.W_OK | os.X_OK):
        raise SpillError(f"spill directory {directory} {NOT_WRITABLE.format(os.strerror(errno.EACCES))}")


def _refused(directory: Path, fault: OSError, otherwise: str) -> SpillError:
    """What to say where no file can be made in ``directory``; ``otherwise`` for faults that are not known."""
    if fault.errno in TOO_MANY_FILES:
        return SpillError(f"no file can be opened in spill directory {directory}: {TOO_MANY_FILES[fault.errno]}")
    if fault.errno not in REFUSALS:
        return SpillError(f"spill directory {directory} {otherwise.format(fault.strerror)}")
    what, advice = REFUSALS[fault.errno]
    return SpillError(f"{what.format(directory)} ({fault.strerror}); {advice}, or choose another with spill=...")


def switch_to_direct(fd: int) -> int:
    """Switch a file to direct I/O and return the block size it wants: 1 if its file system refuses direct I/O.

    Raises:
        OSError: if nothing can be written for another reason.
    """
    flags = fcntl.fcntl(fd, fcntl.F_GETFL)
    with mmap.mmap(-1, 2 * PLACE_ALIGNMENT_BYTES) as page, memoryview(page) as view:
        for block_bytes in (512, PLACE_ALIGNMENT_BYTES):
            try:
                fcntl.fcntl(fd, fcntl.F_SETFL, flags | os.O_DIRECT)
                with view[block_bytes : 2 * block_bytes] as block:
                    os.pwrite(fd, block, block_bytes)
                    os.preadv(fd, [block], block_bytes)
                return block_bytes
            except OSError as fault:
                if fault.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
                    raise
    fcntl.fcntl(fd, fcntl.F_SETFL, flags)
    return 1


def free_bytes(where: Path | int) -> int:
    """Bytes that this user may still write where a directory, or a file of this descriptor, is."""
    state = os.statvfs(where)
    return state.f_bavail * state.f_frsize


def _caching(block_bytes: int) -> str:
    return ", through the page cache (no direct I/O there)" if block_bytes == 1 else ", direct I/O"


def _warn_if_ram(directory: Path) -> None:
    state = ctypes.create_string_buffer(256)  # struct statfs is smaller, and begins with f_type as a C long
    if ctypes.CDLL(None).statfs(os.fsencode(directory), state) != 0:
        return  # `open_unlinked` says what is wrong with it
    name = RAM_FILE_SYSTEMS.get(ctypes.c_long.from_buffer(state).value)
    if name is not None:
        warnings.warn(
            f"spill directory {directory} is in RAM ({name}): moving tensors there frees no memory; "
            "choose a directory on a disk with spill=...",
            stacklevel=1,  # one place, so that Python shows it once
        )


def _checksum(pointer: int, size_bytes: int) -> int:
    """CRC-32 of a storage that may get other memory meanwhile. Raises `OSError` as `copy_memory`."""
    checksum, copy = 0, ctypes.create_string_buffer(CHECKED_BYTES)
    for start in range(0, size_bytes, CHECKED_BYTES):
        count = min(CHECKED_BYTES, size_bytes - start)
        copy_memory(ctypes.addressof(copy), pointer + start, count)
        checksum = zlib.crc32(memoryview(copy)[:count], checksum)
    return checksum


def memory_view(pointer: int, size_bytes: int) -> memoryview:
    """Bytes at an address."""
    return memoryview((ctypes.c_char * size_bytes).from_address(pointer)).cast("B")
