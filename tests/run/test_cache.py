"""Where files are kept, for users with a home, without one, and with one that is of no use."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.errors import SpillError
from ebbtide.run.cache import cache_path
from ebbtide.run.native import find_compiler


@pytest.fixture(autouse=True)
def nothing_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory is named, and temporary files are made under ``tmp_path``."""
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))


@pytest.fixture(params=["none", "unwritable"])
def no_home(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """The user has no home, or one where nothing can be made."""

    def home() -> Path:
        if request.param == "none":
            raise RuntimeError("Could not determine home directory.")
        return Path("/proc")

    monkeypatch.setattr(Path, "home", home)


def own(tmp_path: Path) -> Path:
    """The user's own directory among the temporary ones."""
    return tmp_path / f"ebbtide-{os.getuid()}"


def test_the_directory_that_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "named"))
    assert cache_path("file") == tmp_path / "named" / "ebbtide" / "file"


def test_the_home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path / "me")
    assert cache_path("file") == tmp_path / "me" / ".cache" / "ebbtide" / "file"
    assert not own(tmp_path).exists()


@pytest.mark.usefixtures("no_home")
def test_without_a_home_it_is_a_directory_of_ones_own(tmp_path: Path) -> None:
    for _ in range(2):
        path = cache_path("file")
        assert path == own(tmp_path) / "file"
        path.write_text("kept")
    assert own(tmp_path).stat().st_mode & 0o777 == 0o700


@pytest.mark.usefixtures("no_home")
def test_directories_that_others_can_write_to_are_not_ones_own(tmp_path: Path) -> None:
    own(tmp_path).mkdir()
    own(tmp_path).chmod(0o777)
    assert cache_path("file") is None


@pytest.mark.usefixtures("no_home")
def test_links_are_not_ones_own(tmp_path: Path) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    own(tmp_path).symlink_to(tmp_path / "elsewhere")
    assert cache_path("file") is None


@pytest.mark.usefixtures("no_home")
def test_directories_of_others_are_not_ones_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    somebody = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: somebody)
    assert cache_path("file") is None


def test_what_is_kept_in_a_home_is_found_though_nothing_can_be_added(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    kept = tmp_path / ".cache" / "ebbtide" / "kept"
    kept.parent.mkdir(parents=True)
    kept.touch()
    monkeypatch.setattr(os, "access", lambda *_: False)
    assert cache_path("kept") == kept
    assert cache_path("new") == own(tmp_path) / "new"


@pytest.fixture
def no_temporary_files(monkeypatch: pytest.MonkeyPatch) -> None:
    """No directory for temporary files can be written, as in a container whose root is read-only."""

    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)


@pytest.mark.usefixtures("no_home", "no_temporary_files", "quick_plans")
def test_with_no_place_for_any_file_a_named_directory_is_enough(tmp_path: Path) -> None:
    """Nothing is remembered, and the budget is kept."""
    assert cache_path("file") is None
    weight = torch.ones(256, 256, requires_grad=True)
    with ebbtide.Budget("100%", spill=tmp_path) as memory:
        for _ in range(3):
            with memory.step():
                (weight * weight).sum().backward()
        assert memory.plan is not None


@pytest.mark.usefixtures("no_temporary_files")
def test_with_no_place_for_temporary_files_a_directory_must_be_named() -> None:
    message = r"^no directory for temporary files can be written; name one with spill=\.\.\.$"
    with pytest.raises(SpillError, match=message):
        ebbtide.Budget("50%")


def arena_built_by(compiler: str, cache: Path) -> str:
    """What a process says that builds the arena so."""
    done = subprocess.run(
        [sys.executable, "-c", "from ebbtide.run.native import arena_library; arena_library()"],
        env=os.environ | {"XDG_CACHE_HOME": str(cache), "CXX": compiler},
        stderr=subprocess.PIPE,
        text=True,
        check=True,
    )
    return done.stderr


@pytest.mark.skipif(find_compiler() is None, reason="the arena takes a C++ compiler")
def test_a_compiler_may_have_arguments(tmp_path: Path) -> None:
    assert arena_built_by(f"env {find_compiler()} -g0", tmp_path) == ""


def test_what_a_compiler_says_is_passed_on(tmp_path: Path) -> None:
    old = tmp_path / "old"
    old.write_text("#!/bin/sh\necho 'In file included from x' >&2\necho 'error: no such option' >&2\nexit 1\n")
    old.chmod(0o700)
    assert f"no CPU arena ({old}: error: no such option)" in arena_built_by(str(old), tmp_path)


def test_a_damaged_arena_is_built_again(tmp_path: Path) -> None:
    program = "import sys; from ebbtide.run.native import arena_library; sys.exit(arena_library() is None)"

    def run() -> str:
        done = subprocess.run(
            [sys.executable, "-c", program],
            env=os.environ | {"XDG_CACHE_HOME": str(tmp_path)},
            stderr=subprocess.PIPE,
            text=True,
            check=True,
        )
        return done.stderr

    assert run() == ""
    (kept,) = (tmp_path / "ebbtide").glob("arena-*.so")
    kept.write_bytes(b"half")
    assert "built again" in run()
    assert run() == ""


def test_a_directory_that_is_named_relative_to_another_counts_for_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "relative")
    monkeypatch.setattr(Path, "home", lambda: tmp_path)
    assert cache_path("machine.json") == tmp_path / ".cache" / "ebbtide" / "machine.json"
