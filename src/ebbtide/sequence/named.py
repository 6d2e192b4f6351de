"""A spill file with a name, from which a run that was killed can go on.

NOTE [What is on the disk]
In the spill directory a named run has a folder of its own with two files: ``states``, which only grows while the chain
is run forward, and ``journal``. The journal's first line says what run it is; each further one, where a state lies, the
checksums of its bytes and the order of its elements, and is written once these are in ``states``. Every line begins
with its own checksum. So whenever the process is killed, the lines up to the first that is torn tell of whole states.

Nothing is synced: what a killed process has written is safe. After a crash of the whole machine some of it may be
missing; then checksums differ, and an earlier state is the last whole one.

States that are in the journal stay until the run ends: one that is killed while steps are reversed goes on from the
last of them, too.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import re
import zlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch

from ebbtide.errors import ArgumentError, SequenceError, SpillError
from ebbtide.run.tiers.disk import PLACE_ALIGNMENT_BYTES, DiskPlace
from ebbtide.run.tiers.memory import take_memory
from ebbtide.sequence.blocks import whole_bytes
from ebbtide.sequence.codec import Codec
from ebbtide.sequence.disk import StateDisk, StatePlace
from ebbtide.sequence.layout import Orders

Identity = Mapping[str, Any]
"""What must be the same for a run to go on: by name, as JSON takes it."""


class NamedDisk(StateDisk):
    """A `StateDisk` whose file is kept until `remove`.

    Args:
        directory: the spill directory.
        run: name of the run.
        identity: what must be the same for this run to go on.
        state_bytes: size of a state.
        codec: see `StateDisk`.

    Attributes:
        there: by step, ascending, the states of a run that was killed.
        orders: by the same steps, how the elements of these states lie.

    Raises:
        ArgumentError: if the name cannot be one of a folder.
        SequenceError: if the run is under way elsewhere, or it was another one.
        SpillError: if the directory cannot be used, or what is there cannot be read now.
    """

    def __init__(
        self, directory: str | Path, run: str, identity: Identity, state_bytes: int, codec: Codec | None
    ) -> None:
        if not isinstance(run, str) or not re.fullmatch(r"[\w.-]+", run):
            raise ArgumentError(f"name={run!r} cannot be that of a folder; take letters, digits, '-', '_' and '.'")
        super().__init__(directory, checksum=True, codec=codec)
        self.folder = Path(directory) / f"ebbtide-{run}"
        self.there: dict[int, StatePlace] = {}
        self.orders: dict[int, Orders] = {}
        self._newest = -1
        self._kept_bytes = 0  # the file up to here is not given back
        self._is_empty = False  # whether there is surely nothing to go on from
        self._journal = -1
        try:
            self.folder.mkdir(mode=0o700, exist_ok=True)
            self._journal = os.open(self.folder / "journal", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
            self._lock_run(run)
            self._is_empty = not os.fstat(self._journal).st_size
            self._take_file()
            self._take_up(run, identity, state_bytes)
        except OSError as fault:
            self.close()
            raise SpillError(f"{self.folder} cannot be used: {fault.strerror}") from fault
        except BaseException:
            self.close()
            raise

    def note(self, step: int, place: StatePlace, orders: Orders) -> None:
        """Write into the journal that a state is there, and how it lies. Only states of the forward sweep, in order.

        Raises:
            SpillError: if the journal cannot be written.
        """
        if step <= self._newest:
            return
        entry = {
            "step": int(step),  # a schedule's may be one of NumPy's
            "offset_bytes": place.offset_bytes,
            "size_bytes": place.size_bytes,
            "checksums": list(place.checksums.items()),
            "packed": list(place.packed.items()),
            "orders": orders,
        }
        self._take_in(step, place)
        try:
            self._write(entry)
        except OSError as fault:
            raise SpillError(f"the journal in {self.folder} cannot be written: {fault.strerror}") from fault
        self._is_empty = False

    def _write(self, content: Any) -> None:
        """Add a line to the journal. The system may write less at a time than it was asked to."""
        left = memoryview(_line(content))
        while left:
            left = left[os.write(self._journal, left) :]

    def _take_in(self, step: int, place: StatePlace) -> None:
        self._newest = step
        self._kept_bytes = max(self._kept_bytes, place.offset_bytes + place.size_bytes)

    def _release(self, place: DiskPlace) -> None:
        if place.offset_bytes >= self._kept_bytes:  # what is in the journal stays
            super()._release(place)

    def remove(self) -> None:
        """Delete the files: the run has ended."""
        for name in ("states", "journal"):  # in this order: while there is a journal, others are locked out
            with contextlib.suppress(FileNotFoundError):
                (self.folder / name).unlink()
        with contextlib.suppress(OSError):  # the user's own files, if there are some
            self.folder.rmdir()

    def close(self) -> None:
        """See `SlowTier.close`. A folder in which there is no state goes, too."""
        try:
            super().close()
        finally:
            if self._journal >= 0:  # last: with it goes the lock, and a copy out may have been under way
                if self._is_empty:
                    self.remove()
                os.close(self._journal)
                self._journal = -1

    def abandon(self) -> None:
        """See `QueuedTier.abandon`. The lock is the parent's alone: a child may outlive it."""
        super().abandon()
        if self._journal >= 0:
            os.close(self._journal)
            self._journal = -1

    def _lock_run(self, run: str) -> None:
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise SequenceError(f"the run {run!r} is under way in another process; take another name=...") from None
        if os.fstat(self._journal).st_nlink == 0:
            raise SequenceError(f"the run {run!r} has just ended in another process; start it again")

    def _take_file(self) -> None:
        """Put the named file in the place of the unnamed one, which has the same descriptor from then on."""
        flags = fcntl.fcntl(self._fd, fcntl.F_GETFL)
        named = os.open(self.folder / "states", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.fcntl(named, fcntl.F_SETFL, flags)  # direct I/O, if it works there
            os.dup2(named, self._fd, inheritable=False)
        finally:
            os.close(named)

    def _take_up(self, run: str, identity: Identity, state_bytes: int) -> None:
        """Find the states of a run that was killed, or begin the journal."""
        lines = list(_whole_lines(os.pread(self._journal, os.fstat(self._journal).st_size, 0)))
        if lines and lines[0][1] != identity:
            raise SequenceError(_difference(run, self.folder, lines[0][1], identity))
        places = [(end, entry, self._place_of(entry)) for end, entry in lines[1:]]
        self._places.take(max((place.offset_bytes + place.size_bytes for _, _, place in places), default=0))
        while places and not self._is_whole(places[-1][2], state_bytes):
            places.pop()
        self._is_empty = not places
        end = places[-1][0] if places else lines[0][0] if lines else 0
        os.ftruncate(self._journal, end)
        os.lseek(self._journal, end, os.SEEK_SET)
        if not lines:
            self._write(identity)
        for _, entry, place in places:
            self.there[entry["step"]] = place
            self.orders[entry["step"]] = tuple(map(tuple, entry["orders"]))
            self._take_in(entry["step"], place)

    def _place_of(self, entry: Any) -> StatePlace:
        if entry["packed"] and self.codec is None:
            raise SequenceError(
                f"the states in {self.folder} are compressed, and zstandard is not installed; install it, or delete "
                "that folder to begin anew"
            )
        place = StatePlace(entry["offset_bytes"], entry["size_bytes"], 0)
        place.checksums.update(entry["checksums"])
        place.packed.update(entry["packed"])
        return place

    def _is_whole(self, place: StatePlace, state_bytes: int) -> bool:
        """Whether a state is whole. If not, its place is given back.

        Raises:
            SpillError: if it cannot be read now, which does not say that it is torn.
        """
        slot = self.recall(place, self._like(state_bytes))
        try:
            self.read(slot).wait()
        except SpillError as fault:
            self.free(slot)
            if fault.__cause__ is None:  # the checksum differs, or the file ends before
                return False
            raise SpillError(
                f"{fault}; nothing in {self.folder} was touched: start the run again once it can be read, or delete "
                "that folder to begin anew"
            ) from fault.__cause__
        return self.park(slot) is not None

    def _like(self, state_bytes: int) -> torch.UntypedStorage:
        return take_memory(whole_bytes(state_bytes, PLACE_ALIGNMENT_BYTES), 0, PLACE_ALIGNMENT_BYTES)


def _line(content: Any) -> bytes:
    text = json.dumps(content).encode()
    return b"%08x %s\n" % (zlib.crc32(text), text)


def _whole_lines(journal: bytes) -> Iterator[tuple[int, Any]]:
    """What each line says, up to the first that is torn, with where the line ends."""
    end = 0
    for line in journal.splitlines(keepends=True):
        checksum, _, text = line.rstrip(b"\n").partition(b" ")
        if not line.endswith(b"\n") or checksum != b"%08x" % zlib.crc32(text):
            return
        end += len(line)
        yield end, json.loads(text)


def _difference(run: str, folder: Path, found: Any, identity: Identity) -> str:
    names = [name for name in identity if not isinstance(found, dict) or found.get(name) != identity[name]]
    told = "; ".join(
        f"its {name} was {found.get(name) if isinstance(found, dict) else found}, now {identity[name]}"
        for name in names
    )
    return (
        f"the run {run!r} that was interrupted is another one: {told}; give name=... another name, or delete {folder}"
    )
