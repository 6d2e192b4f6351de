"""Files that are written for users."""

from __future__ import annotations

import contextlib
import errno
import os
import secrets
import stat
import sys
from pathlib import Path

_MOST_LINKS = 40
"""As many as Linux follows."""
_STANDARD_OUTPUT = 1
"""Its descriptor in every process."""


def write_whole(path: str | Path, data: bytes) -> None:
    """Write ``data`` to a file: all of it, or none, and then what was there before stays as it was.

    A new file takes the place of the former one, at once and with the same permissions. Devices and pipes are written
    to, as are files in directories that are not to be written to; what is open in this process, such as
    ``/dev/stdout``, is appended to. Raises `OSError`, which names the file as given.
    """
    try:
        descriptor = _open_descriptor(Path(path))
        if descriptor is not None:
            _append(descriptor, data)
            return
        target = Path(os.path.realpath(path))  # a link stays one
        if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
            target.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as fault:
        raise OSError(fault.errno, fault.strerror, str(path)) from fault  # which may name two


def is_standard_output(path: str | Path) -> bool:
    """Whether what is written to ``path`` goes where this process prints."""
    return _open_descriptor(Path(path)) == _STANDARD_OUTPUT


def _open_descriptor(path: Path) -> int | None:
    """The open file that ``path`` stands for: of ``/dev/stdout``, ``/dev/fd/63``; None if it is another's name."""
    descriptors = f"/proc/{os.getpid()}/fd"
    for _ in range(_MOST_LINKS):
        if os.path.realpath(path.parent) == descriptors:
            return int(path.name) if path.name.isdecimal() else None
        if not path.is_symlink():
            return None
        path = path.parent / path.readlink()
    return None


def _append(descriptor: int, data: bytes) -> None:
    """Write ``data`` where the next bytes of an open file go, behind what was printed before."""
    if sys.stdout is not None:
        sys.stdout.flush()
    with os.fdopen(os.dup(descriptor), "wb") as file:
        file.write(data)


def _replace(target: Path, data: bytes) -> None:
    beside = target.with_name(f".ebbtide-{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(data)
        try:
            beside.replace(target)
        except OSError as fault:
            if fault.errno not in (errno.EBUSY, errno.EPERM):
                raise
            target.write_bytes(data)  # where something is mounted, or others' files are protected, none is replaced
            beside.unlink()
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        raise
