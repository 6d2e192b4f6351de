"""Files that are written for users."""

from __future__ import annotations

import contextlib
import os
import secrets
import stat
from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> None:
    """Write ``data`` to a file: all of it, or none, and then what was there before stays as it was.

    A new file takes the place of the former one, at once and with the same permissions. Devices and pipes are written
    to, as are files in directories that are not to be written to. Raises `OSError`, which names the file as given.
    """
    try:
        target = Path(os.path.realpath(path))  # a link stays one
        if target.exists() and not (target.is_file() and os.access(target.parent, os.W_OK)):
            target.write_bytes(data)
        else:
            _replace(target, data)
    except OSError as fault:
        raise OSError(fault.errno, fault.strerror, str(path)) from fault  # which may name two


def _replace(target: Path, data: bytes) -> None:
    beside = target.with_name(f".ebbtide-{secrets.token_hex(8)}")
    try:
        with beside.open("xb") as file:
            if target.exists():
                os.fchmod(file.fileno(), stat.S_IMODE(target.stat().st_mode))
            file.write(data)
        beside.replace(target)
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            beside.unlink()
        raise
