"""The spill files of a chain, which are made when they are first wanted: that takes longer than many a short chain."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

from ebbtide.errors import SequenceError
from ebbtide.run.tiers.disk import check_directory
from ebbtide.sequence.codec import codec_for
from ebbtide.sequence.disk import StateDisk, StatePlace
from ebbtide.sequence.named import Identity, NamedDisk
from ebbtide.sequence.schedules import DISK

Spill = str | os.PathLike[str] | Sequence[str | os.PathLike[str]] | None
"""What users give as ``spill``: a directory, several or none."""


class SpillFiles:
    """Spill files that are there from the first call of `open` on.

    Args:
        names: what schedules call the files.
        make: makes the files.
        named: the file of a named run, which is there already.

    Attributes:
        names: what schedules call the files.
        named: the file of a named run; None if the run has no name.
    """

    def __init__(
        self, names: Sequence[str], make: Callable[[], Sequence[StateDisk]], named: NamedDisk | None = None
    ) -> None:
        self.names = tuple(names)
        self.named = named
        self._make = make
        self._made: tuple[StateDisk, ...] | None = None

    @property
    def there(self) -> Mapping[int, StatePlace]:
        """States of a run that was killed, by step."""
        return {} if self.named is None else self.named.there

    def open(self) -> tuple[StateDisk, ...]:
        """All files, fastest first. Raises `SpillError` if one cannot be used."""
        if self._made is None:
            self._made = tuple(self._make())
        return self._made

    def tiers(self) -> dict[str, StateDisk]:
        """All files, by name. Raises `SpillError` if one cannot be used."""
        return {disk.name: disk for disk in self.open()}

    def drain(self) -> None:
        """Wait for everything under way."""
        for disk in self._made or ():
            disk.drain()


@contextlib.contextmanager
def open_spill(directories: Sequence[Path], *, checksum: bool, item_bytes: int) -> Iterator[SpillFiles]:
    """A spill file in each directory while the context lasts; called ``disk``, ``disk2``, ...

    Raises:
        SpillError: if a directory cannot be used.
    """
    for directory in directories:
        check_directory(directory)
    names = [DISK if number == 1 else f"{DISK}{number}" for number in range(1, len(directories) + 1)]
    with contextlib.ExitStack() as stack:

        def make() -> Iterator[StateDisk]:
            codec = codec_for(item_bytes)
            for directory, name in zip(directories, names, strict=True):
                disk = StateDisk(directory, checksum=checksum, name=name, codec=codec)
                yield stack.enter_context(contextlib.closing(disk))

        yield SpillFiles(names, lambda: list(make()))


@contextlib.contextmanager
def open_named(
    directories: Sequence[Path], run: str, identity: Identity, *, state_bytes: int, item_bytes: int
) -> Iterator[SpillFiles]:
    """The spill file of a named run. It is deleted at the end of the context, unless that is an error.

    Raises:
        SequenceError: if there is not one directory, or the run cannot go on.
        SpillError: if the directory cannot be used.
    """
    if len(directories) != 1:
        raise SequenceError(f"name={run!r} keeps states in the spill directory; give one directory as spill=...")
    disk = NamedDisk(directories[0], run, identity, state_bytes, codec_for(item_bytes))
    with contextlib.closing(disk):
        yield SpillFiles((disk.name,), lambda: (disk,), disk)
        disk.remove()
