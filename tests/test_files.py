"""Files that are written for users: whole, or as they were before."""

from __future__ import annotations

import errno
import os
import resource
import stat
from pathlib import Path

import pytest

from ebbtide.files import is_standard_output, write_whole


def test_a_file_is_replaced_with_its_permissions_and_through_links(tmp_path: Path) -> None:
    file, link = tmp_path / "plan.json", tmp_path / "latest.json"
    write_whole(file, b"first")
    file.chmod(0o640)
    link.symlink_to("plan.json")
    write_whole(str(link), b"second")
    assert link.is_symlink()
    assert file.read_bytes() == b"second"
    assert stat.S_IMODE(file.stat().st_mode) == 0o640
    assert sorted(os.listdir(tmp_path)) == ["latest.json", "plan.json"]


def test_what_cannot_be_written_leaves_the_former_file(tmp_path: Path) -> None:
    file = tmp_path / "plan.json"
    write_whole(file, b"first")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, hard))
    try:
        with pytest.raises(OSError, match=r"plan\.json") as raised:
            write_whole(file, bytes(8192))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert raised.value.errno == errno.EFBIG
    assert file.read_bytes() == b"first"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_errors_name_what_was_given(tmp_path: Path) -> None:
    missing = tmp_path / "none" / "plan.json"
    with pytest.raises(FileNotFoundError, match=r"none/plan\.json"):
        write_whole(missing, b"")
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        write_whole(tmp_path, b"")
    with pytest.raises(OSError, match="/dev/full"):
        write_whole("/dev/full", b"some")


def test_names_of_standard_output(tmp_path: Path) -> None:
    link, file = tmp_path / "page.html", tmp_path / "1"
    link.symlink_to("/dev/stdout")
    file.write_bytes(b"")
    assert all(is_standard_output(name) for name in ("/dev/stdout", "/dev/fd/1", "/proc/self/fd/1", link))
    assert not any(is_standard_output(name) for name in ("/dev/stderr", "/dev/fd/2", file, tmp_path / "none"))


@pytest.mark.parametrize("name", ["/dev/fd", "/proc/self/fd"])
def test_pipes_of_this_process_are_written_to(name: str) -> None:
    """As bash names them for ``-o >(gzip)``, and what ``/dev/stdout`` may be."""
    reading, writing = os.pipe()
    write_whole(f"{name}/{writing}", b"first")
    write_whole(f"{name}/{writing}", b" second")
    os.close(writing)
    with os.fdopen(reading, "rb") as file:
        assert file.read() == b"first second"


def test_a_file_that_is_open_is_gone_on_with(tmp_path: Path) -> None:
    """``-o /dev/stdout >> log``: what the log held stays, and what is printed next comes behind."""
    log = tmp_path / "log"
    log.write_bytes(b"before, ")
    with log.open("ab") as file:
        write_whole(f"/dev/fd/{file.fileno()}", b"whole, ")
        file.write(b"behind")
    assert log.read_bytes() == b"before, whole, behind"


def test_a_descriptor_that_is_not_open() -> None:
    with pytest.raises(OSError, match="/dev/fd/999999"):
        write_whole("/dev/fd/999999", b"some")


@pytest.mark.parametrize("code", [errno.EBUSY, errno.EPERM])
def test_a_file_that_nothing_can_take_the_place_of(code: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """As one that something is mounted on, in a container say, is written to itself."""
    file = tmp_path / "plan.json"
    file.write_bytes(b"first, and longer")

    def replace(path: Path, target: Path) -> None:
        raise OSError(code, os.strerror(code), str(path), None, str(target))

    monkeypatch.setattr(Path, "replace", replace)
    write_whole(file, b"second")
    assert file.read_bytes() == b"second"
    assert os.listdir(tmp_path) == ["plan.json"]
