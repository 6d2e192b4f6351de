"""How much RAM there is, and may still be taken: what the system has, or what a control group, such as a container's,
leaves of it.

A container sees the memory of the whole machine in ``/proc/meminfo``. Beyond the limit of its group it is killed, or,
with pinned memory, takes what its neighbours need.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import re
from collections.abc import Iterator
from pathlib import Path, PurePosixPath

PROC = Path("/proc")


@dataclasses.dataclass(frozen=True, slots=True)
class _Files:
    """Names of a control group's files, and of the lines of its statistics that count pages of files, which go first.

    The limits are those of the group; above the second one of version 2 its processes hardly run any more.
    """

    limits: tuple[str, ...]
    used: str
    reclaimable: tuple[str, ...]


_FILES = {
    "cgroup": _Files(("memory.limit_in_bytes",), "memory.usage_in_bytes", ("total_inactive_file", "total_active_file")),
    "cgroup2": _Files(("memory.max", "memory.high"), "memory.current", ("inactive_file", "active_file")),
}
"""By type of file system: versions 1 and 2."""


def available_bytes(proc: Path = PROC) -> int:
    """RAM that this process may still take: available, and within the limits of all control groups that it is in.

    Args:
        proc: where the system's ``/proc`` is.
    """
    try:
        lines = (proc / "meminfo").read_text().splitlines()
        least = next(int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:"))  # it says KiB
    except (OSError, StopIteration):  # a jail without it, or one that does not say; what is free is less than that
        least = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for directory, files in _groups(proc):
        with contextlib.suppress(OSError, ValueError):  # the root group has no such files, and not all may be read
            least = min(least, _left(directory, files))
    return max(0, least)


def capacity_bytes(proc: Path = PROC) -> int:
    """RAM that this process could have if no other took any: the system's, or the least limit of its control groups.

    Args:
        proc: where the system's ``/proc`` is.
    """
    least = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    for directory, files in _groups(proc):
        with contextlib.suppress(OSError, ValueError):  # the root group has no such files, and not all may be read
            least = min(least, _limit(directory, files))
    return least


def _limit(directory: Path, files: _Files) -> int:
    """A group's least limit. Raises `ValueError` if it has none."""
    said = [(directory / name).read_text().strip() for name in files.limits if (directory / name).exists()]
    return min(int(limit) for limit in said if limit != "max")


def _left(directory: Path, files: _Files) -> int:
    """What a group leaves below its least limit, when the pages of files that may go are gone."""
    limit = _limit(directory, files)
    statistics = dict(line.split() for line in (directory / "memory.stat").read_text().splitlines())
    reclaimable = sum(int(statistics.get(name, 0)) for name in files.reclaimable)
    return limit - int((directory / files.used).read_text()) + reclaimable


def _groups(proc: Path) -> Iterator[tuple[Path, _Files]]:
    """The directories of the control groups that limit this process's memory, from its own up to what it sees."""
    try:
        own = dict(_own_groups(proc))
        mounts = _lines(proc / "self" / "mountinfo")
    except OSError:
        return  # a kernel without control groups
    for line in mounts:
        where, _, what = line.partition(" - ")
        kind, _, options = what.split(" ", 2)
        if kind not in own or (kind == "cgroup" and "memory" not in options.split(",")):
            continue
        root, mount = (PurePosixPath(_unescaped(field)) for field in where.split()[3:5])
        # Outside its own namespace a group has a path that leads nowhere here; then the mount is all that can be seen.
        inside = own[kind].relative_to(root) if own[kind].is_relative_to(root) else PurePosixPath()
        for part in (inside, *inside.parents):
            yield Path(mount / part), _FILES[kind]


def _own_groups(proc: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """By version, the path of the group that this process is in."""
    for line in _lines(proc / "self" / "cgroup"):
        number, controllers, path = line.split(":", 2)
        if "memory" in controllers.split(","):
            yield "cgroup", PurePosixPath(path)
        elif number == "0":
            yield "cgroup2", PurePosixPath(path)


def _lines(path: Path) -> list[str]:
    """The lines of a file that has paths in it, which need not be text."""
    return os.fsdecode(path.read_bytes()).splitlines()


def _unescaped(field: str) -> str:
    """A path as it is: blanks are octal numbers in the table of mounts."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), field)
