"""Where what was measured and built on this machine is kept from one process to the next."""

from __future__ import annotations

import os
import stat
import tempfile
from pathlib import Path


def cache_path(name: str) -> Path | None:
    """Where the file ``name`` is kept or can be: in ``$XDG_CACHE_HOME/ebbtide``, or else in ``~/.cache/ebbtide``.

    In containers a process may run as a user who has no home, or none that can be written to. Then it is a directory
    among the temporary ones that nobody else can have put anything in; None if there is no such place either.
    """
    chosen = os.environ.get("XDG_CACHE_HOME", "")
    if os.path.isabs(chosen):  # any other is to be ignored, says the specification
        return Path(chosen) / "ebbtide" / name
    home = _home()
    if home is not None and (os.path.exists(home / name) or _can_write(home)):
        return home / name
    own = _own_temporary()
    return own / name if own is not None else None


def _home() -> Path | None:
    try:
        return Path.home() / ".cache" / "ebbtide"
    except RuntimeError:  # neither the environment nor the system knows one
        return None


def _can_write(directory: Path) -> bool:
    """Whether files can be made in a directory, which is made if need be."""
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError:
        return False
    return os.access(directory, os.W_OK | os.X_OK)


def _own_temporary() -> Path | None:
    """A directory of this user's own, or None: code is loaded from there, and anybody can make it beforehand."""
    try:
        path = Path(tempfile.gettempdir()) / f"ebbtide-{os.getuid()}"
        path.mkdir(mode=0o700, exist_ok=True)
        found = path.lstat()
    except OSError:  # nor can any temporary file be made, if it is the first line's
        return None
    is_own = stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid() and not found.st_mode & 0o022
    return path if is_own else None
