"""How much RAM is available, on made-up systems with control groups of both versions."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from ebbtide.run.available import available_bytes, capacity_bytes

GIB = 1 << 30


class System:
    """A made-up ``/proc`` with 64 GiB available, and control groups under it."""

    def __init__(self, root: Path) -> None:
        self.proc, self.groups = root / "proc", root / "sys fs"
        (self.proc / "self").mkdir(parents=True)
        (self.proc / "meminfo").write_text(f"MemTotal: {200 << 20} kB\nMemAvailable: {64 << 20} kB\n")

    def join(self, own: str, kind: str, options: str, mounted: str = "/") -> None:
        """Be in the groups of ``own``, of which those from ``mounted`` on can be seen."""
        where = str(self.groups).replace(" ", "\\040")
        (self.proc / "self" / "cgroup").write_text(own)
        (self.proc / "self" / "mountinfo").write_text(
            f"22 1 0:20 / /proc rw - proc proc rw\n30 22 0:26 {mounted} {where} rw shared:9 - {kind} group {options}\n"
        )

    def group(self, path: str, **files: object) -> None:
        """Make a group; underscores stand for dots."""
        directory = self.groups / path
        directory.mkdir(parents=True, exist_ok=True)
        for name, text in files.items():
            (directory / name.replace("_", ".", 1)).write_text(f"{text}\n")

    def gib(self) -> float:
        """What is available, in GiB."""
        return available_bytes(self.proc) / GIB


@pytest.fixture
def system(tmp_path: Path) -> System:
    """One whose groups are of version 2, in a directory with a blank in its name."""
    system = System(tmp_path)
    system.join("0::/pod/step\n", "cgroup2", "rw")
    return system


def test_without_groups(tmp_path: Path) -> None:
    assert System(tmp_path).gib() == 64


def test_without_proc(tmp_path: Path) -> None:
    assert 0 < available_bytes(tmp_path / "proc") <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_system_that_does_not_say(tmp_path: Path) -> None:
    proc = System(tmp_path).proc
    (proc / "meminfo").write_text("MemTotal: 100 kB\nMemFree: 50 kB\n")
    assert 0 < available_bytes(proc) <= os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_a_group_without_a_limit(system: System) -> None:
    system.group("pod/step", memory_max="max", memory_high="max", memory_current=5 * GIB, memory_stat="anon 1")
    assert system.gib() == 64


def test_a_limit_counts_less_what_is_used_but_for_pages_of_files(system: System) -> None:
    statistics = f"anon {3 * GIB}\ninactive_file {GIB}\nactive_file {GIB // 2}"
    system.group("pod/step", memory_max=8 * GIB, memory_current=5 * GIB, memory_stat=statistics)
    assert system.gib() == 4.5


@pytest.mark.parametrize("name", ["memory_max", "memory_high"])
def test_the_limit_of_a_group_above(system: System, name: str) -> None:
    system.group("pod/step", memory_max=32 * GIB, memory_current=GIB, memory_stat="anon 1")
    system.group("pod", **{name: 4 * GIB}, memory_current=3 * GIB, memory_stat="anon 1")
    assert system.gib() == 1


def test_more_is_used_than_the_limit(system: System) -> None:
    system.group("pod/step", memory_high=2 * GIB, memory_current=3 * GIB, memory_stat="anon 1")
    assert system.gib() == 0


def test_a_limit_above_what_the_system_has(system: System) -> None:
    system.group("pod/step", memory_max=500 * GIB, memory_current=GIB, memory_stat="anon 1")
    assert system.gib() == 64


def test_version_1(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.join("5:cpu,cpuacct:/other\n4:memory:/docker/ab\n0::/\n", "cgroup", "rw,memory", mounted="/docker/ab")
    statistics = f"cache 7\ninactive_file 1\ntotal_inactive_file {GIB}\ntotal_active_file 0"
    system.group("", memory_limit_in_bytes=6 * GIB, memory_usage_in_bytes=4 * GIB, memory_stat=statistics)
    assert system.gib() == 3


def test_another_controller_of_version_1(tmp_path: Path) -> None:
    system = System(tmp_path)
    system.join("4:memory:/ab\n", "cgroup", "rw,cpu")
    system.group("ab", memory_limit_in_bytes=GIB, memory_usage_in_bytes=0, memory_stat="cache 7")
    assert system.gib() == 64


@pytest.mark.parametrize("own", ["/../elsewhere", "/elsewhere"])
def test_a_group_that_cannot_be_seen_from_here(system: System, own: str) -> None:
    system.join(f"0::{own}\n", "cgroup2", "rw", mounted="/docker")
    system.group("", memory_max=3 * GIB, memory_current=GIB, memory_stat="anon 1")
    assert system.gib() == 2


@pytest.mark.parametrize("damage", ["memory.current", "memory.stat"])
def test_a_group_that_says_too_little_counts_for_nothing(system: System, damage: str) -> None:
    system.group("pod/step", memory_max=8 * GIB, memory_current=5 * GIB, memory_stat="anon 1")
    (system.groups / "pod" / "step" / damage).unlink()
    assert system.gib() == 64


def test_this_system() -> None:
    assert 0 < available_bytes() < os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")


def test_names_that_are_no_text(system: System) -> None:
    """Of a mount point, say, as the kernel writes its bytes."""
    before = system.gib()
    mounts = system.proc / "self" / "mountinfo"
    mounts.write_bytes(b"36 22 8:17 / /mnt/f\xfcr rw shared:9 - vfat /dev/sdb1 rw\n" + mounts.read_bytes())
    assert system.gib() == before


def test_capacity_is_the_least_limit(system: System) -> None:
    """Whatever is in use."""
    system.group("pod", memory_max=3 * GIB, memory_current=2 * GIB, memory_stat="inactive_file 0")
    system.group("pod/step", memory_max="max", memory_current=GIB, memory_stat="inactive_file 0")
    assert capacity_bytes(system.proc) == 3 * GIB


def test_capacity_without_groups(tmp_path: Path) -> None:
    assert capacity_bytes(tmp_path / "proc") == os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
