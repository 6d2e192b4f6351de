"""Files that are written for users."""

from __future__ import annotations

from pathlib import Path


def write_whole(path: str | Path, data: bytes) -> None:
    """Write ``data`` to a file, and leave no part of one where that fails. Raises `OSError`, which names the file."""
    target = Path(path)
    file = target.open("wb")
    try:
        with file:
            file.write(data)
    except BaseException as fault:
        if target.is_file():
            target.unlink()
        if isinstance(fault, OSError):
            fault.filename = str(path)
        raise
