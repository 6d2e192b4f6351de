"""Copies to and from a file that the C library makes, in threads of its own: aio(7).

NOTE [The interpreter's lock]
A thread of Python takes the interpreter's lock before and after each read and write, and compute stands still while it
has it: for a small state that costs more than the transfer takes. The C library's threads know of no such lock. To
compute, a copy is a few microseconds for asking, and less than one for looking whether it is done.

NOTE [Fork]
Threads do not survive a fork, and the C library does not notice: a process whose parent has asked for copies must not
(see `is_there`). A fork waits for the copies under way, as `ebbtide.run.tiers.lanes` explains.
"""

from __future__ import annotations

import ctypes
import errno
import functools
import itertools
import os
import threading
import weakref
from collections.abc import Callable
from typing import Any

import torch


class _Control(ctypes.Structure):
    """``struct aiocb`` of glibc on machines of 64 bits, from its <bits/types/...> and <aio.h>."""

    _fields_ = (
        ("fd", ctypes.c_int),
        ("opcode", ctypes.c_int),
        ("priority", ctypes.c_int),
        ("pointer", ctypes.c_void_p),
        ("size_bytes", ctypes.c_size_t),
        ("signal_value", ctypes.c_void_p),
        ("signal_number", ctypes.c_int),
        ("notify", ctypes.c_int),
        ("signal_rest", ctypes.c_byte * 48),
        ("internal", ctypes.c_byte * 32),
        ("offset_bytes", ctypes.c_int64),
        ("reserved", ctypes.c_byte * 32),
    )

    def __init__(self) -> None:
        super().__init__(notify=1)  # SIGEV_NONE: nobody is told
        self.address = ctypes.addressof(self)
        self.alone = (ctypes.c_void_p * 1)(self.address)  # as aio_suspend wants it


@functools.lru_cache(maxsize=1)
def _library() -> Any:
    """The C library with its asynchronous transfers; None where they are not as this module knows them."""
    try:
        known = (os.confstr("CS_GNU_LIBC_VERSION") or "").startswith("glibc") and ctypes.sizeof(ctypes.c_void_p) == 8
    except (ValueError, OSError):
        known = False
    if not known:
        return None
    for name in (None, "librt.so.1"):  # the latter before glibc 2.34
        try:
            library = ctypes.CDLL(name, use_errno=True)
            for function in (library.aio_write, library.aio_read, library.aio_error, library.aio_return):
                function.argtypes = [ctypes.c_void_p]
            library.aio_suspend.argtypes = [ctypes.c_void_p, ctypes.c_int, ctypes.c_void_p]
            library.aio_return.restype = ctypes.c_ssize_t
        except (OSError, AttributeError):
            continue
        return library
    return None


def is_there() -> bool:
    """Whether this process can have copies made so."""
    return not _is_inherited and _library() is not None


class AioCopy:
    """A copy of a storage's bytes, maybe still under way. Who asked for it must `wait` before the bytes are used.

    Attributes:
        place: what it was given.
        storage: the storage; None once it is not needed any more.
        is_write: which way it goes.
    """

    __slots__ = ("_control", "_file", "is_write", "place", "storage")

    def __init__(
        self, file: AsyncFile, control: _Control, storage: torch.UntypedStorage, place: Any, is_write: bool
    ) -> None:
        self.place = place
        self.storage: torch.UntypedStorage | None = storage
        self.is_write = is_write
        self._file = file
        self._control: _Control | None = control

    @property
    def ready(self) -> bool:
        """Whether `wait` would return at once."""
        return self._control is None or self._file.library.aio_error(self._control.address) != errno.EINPROGRESS

    def settle(self) -> None:
        """Wait until nothing is under way, whatever came of it."""
        control, library = self._control, self._file.library
        while control is not None and library.aio_error(control.address) == errno.EINPROGRESS:
            library.aio_suspend(control.alone, 1, None)

    def wait(self) -> None:
        """Wait until the copy is done. Raises what the file's ``amend`` raises if not all bytes were copied."""
        control = self._control
        if control is None:
            return
        self.settle()
        library = self._file.library
        fault = library.aio_error(control.address)
        moved_bytes = library.aio_return(control.address)
        wanted_bytes = control.size_bytes
        self._control = None
        self._file._end(self, control)
        if moved_bytes != wanted_bytes:
            self._file.amend(self, max(moved_bytes, 0), fault)
        self.storage = None


class AsyncFile:
    """An open file; copies out are made one after another, those back beside them.

    Args:
        fd: descriptor of the file, which stays the caller's.
        readers: how many copies back are made at a time.
        amend: called with a copy of which not all bytes were moved, how many were, and the system's error number or 0.
            It moves the rest, or raises.

    Attributes:
        amend: see above.
        library: the C library.

    Raises:
        OSError: if there are too few descriptors; none is left open then.
    """

    def __init__(self, fd: int, readers: int, amend: Callable[[AioCopy, int, int], None]) -> None:
        self.amend = amend
        self.library = _library()
        # For each descriptor the C library makes one copy at a time.
        self._fds: list[int] = []
        self._free: list[_Control] = []
        self._under_way: set[AioCopy] = set()
        self._shut = weakref.finalize(self, _shut, self._under_way, self._fds)
        try:
            for _ in range(1 + readers):
                self._fds.append(os.dup(fd))
        except OSError:
            self._shut()
            raise
        self._readers = itertools.cycle(self._fds[1:])
        _files.add(self)

    def write(self, storage: torch.UntypedStorage, offset_bytes: int, place: Any) -> AioCopy:
        """Begin to copy ``storage`` to an offset in the file. Raises `OSError` if that cannot even begin."""
        return self._begin(self.library.aio_write, self._fds[0], storage, offset_bytes, place, True)

    def read(self, storage: torch.UntypedStorage, offset_bytes: int, place: Any) -> AioCopy:
        """Begin to fill ``storage`` from an offset in the file. Raises `OSError` if that cannot even begin."""
        return self._begin(self.library.aio_read, next(self._readers), storage, offset_bytes, place, False)

    def _begin(
        self, call: Any, fd: int, storage: torch.UntypedStorage, offset_bytes: int, place: Any, is_write: bool
    ) -> AioCopy:
        global _was_used
        control = self._free.pop() if self._free else _Control()
        control.fd, control.pointer = fd, storage.data_ptr()
        control.size_bytes, control.offset_bytes = storage.nbytes(), offset_bytes
        copy = AioCopy(self, control, storage, place, is_write)
        with _gate:
            _was_used = True
            self._under_way.add(copy)
            if call(control.address) != 0:
                self._under_way.discard(copy)
                raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
        return copy

    def _end(self, copy: AioCopy, control: _Control) -> None:
        self._under_way.discard(copy)
        self._free.append(control)

    def drain(self) -> None:
        """Wait until nothing is under way. What came of it is for those who wait for the copies."""
        for copy in list(self._under_way):
            copy.settle()

    def close(self) -> None:
        """Drain, and give the descriptors back. Closing twice does nothing."""
        self._shut()

    def abandon(self) -> None:
        """In a child process: close what was inherited. A fork waits for what is under way."""
        if self._shut.detach() is not None:
            _close(self._fds)


def _shut(under_way: set[AioCopy], fds: list[int]) -> None:
    interrupts: list[BaseException] = []
    for copy in list(under_way):
        while not copy.ready:  # Ctrl-C or not: the C library is at work with its memory
            try:
                copy.settle()
            except BaseException as fault:
                interrupts.append(fault)
    under_way.clear()
    _close(fds)
    if interrupts:
        raise interrupts[0]


def _close(fds: list[int]) -> None:
    while fds:
        os.close(fds.pop())


_files: weakref.WeakSet[AsyncFile] = weakref.WeakSet()
_gate = threading.RLock()
"""Held while a copy is asked for, and while the process forks."""
_was_used = False
_is_inherited = False


def _before_fork() -> None:
    _gate.acquire()
    for file in list(_files):
        file.drain()


def _after_fork_in_parent() -> None:
    _gate.release()


def _after_fork_in_child() -> None:
    global _gate, _is_inherited
    _gate = threading.RLock()
    _is_inherited = _was_used
    for file in list(_files):
        file.abandon()


os.register_at_fork(before=_before_fork, after_in_parent=_after_fork_in_parent, after_in_child=_after_fork_in_child)
