"""Builds and loads the CPU arena, `arena.cpp`, for the PyTorch that is installed.

It is compiled once for each version of PyTorch, in a few seconds, and kept in the user's cache (`cache`). Without a
C++ compiler, or where it cannot be built, there is no arena, and the C library's allocator serves: the same results,
with more page faults.
"""

from __future__ import annotations

import ctypes
import hashlib
import logging
import os
import platform
import shlex
import shutil
import subprocess
import tempfile
from functools import lru_cache
from pathlib import Path

import torch

from ebbtide.run.cache import cache_path

_SOURCE = Path(__file__).with_name("arena.cpp")
_COMPILE_SECONDS = 120
_log = logging.getLogger(__name__)


@lru_cache(maxsize=1)
def arena_library() -> ctypes.CDLL | None:
    """The arena, built if need be; None where it cannot be had, which is logged once."""
    try:
        library = _loaded()
    except (OSError, subprocess.SubprocessError) as fault:
        _log.warning("no CPU arena (%s): the C library's allocator is used, which costs page faults", fault)
        return None
    library.ebbtide_arena_take.restype = ctypes.c_void_p
    library.ebbtide_arena_take.argtypes = [ctypes.c_size_t, ctypes.c_size_t, ctypes.c_size_t]
    library.ebbtide_arena_let_resize.restype = None
    library.ebbtide_arena_let_resize.argtypes = [ctypes.c_void_p]
    library.ebbtide_arena_recorded.restype = ctypes.c_size_t
    library.ebbtide_arena_recorded.argtypes = [ctypes.c_void_p] * 4 + [ctypes.c_size_t]
    library.ebbtide_arena_new_region.restype = ctypes.c_size_t
    library.ebbtide_arena_new_region.argtypes = [ctypes.c_size_t]
    library.ebbtide_arena_count.restype = ctypes.c_int64
    library.ebbtide_arena_most_counted.argtypes = [ctypes.c_int64, *[ctypes.POINTER(ctypes.c_size_t)] * 2]
    library.ebbtide_arena_follow.restype = None
    library.ebbtide_arena_follow.argtypes = [ctypes.c_void_p] * 3 + [ctypes.c_size_t] * 3
    for name in ("unfollow", "mark", "most", "left_outside"):
        getattr(library, f"ebbtide_arena_{name}").restype = ctypes.c_size_t
    return library


def find_compiler() -> str | None:
    """The C++ compiler that the arena is built with, ``$CXX`` if that is set, with whatever arguments; None if there is
    none."""
    return os.environ.get("CXX") or shutil.which("c++") or shutil.which("g++") or shutil.which("clang++")


def _loaded() -> ctypes.CDLL:
    """The compiled arena. Raises `OSError` or `SubprocessError` if there is none and none can be made."""
    source = b"".join(path.read_bytes() for path in (_SOURCE, *sorted(_SOURCE.parent.glob("*.h"))))
    what = [torch.__version__, torch.__file__, platform.machine()]  # a home may be that of machines of several kinds
    name = hashlib.sha256(source + "".join(what).encode()).hexdigest()[:16]
    path = cache_path(f"arena-{name}.so")
    if path is None:
        raise FileNotFoundError("no directory to keep it in")
    if path.exists():
        try:
            return ctypes.CDLL(str(path))
        except OSError as fault:
            _log.warning("%s cannot be loaded (%s): built again", path, fault)
    _build(path)
    return ctypes.CDLL(str(path))


def _build(path: Path) -> None:
    """Compile it to ``path``."""
    compiler = find_compiler()
    if compiler is None:
        raise FileNotFoundError("no C++ compiler found")
    try:
        command = shlex.split(compiler)
    except ValueError as fault:
        raise FileNotFoundError(f"$CXX is no command: {compiler}: {fault}") from fault
    path.parent.mkdir(parents=True, exist_ok=True)
    root = Path(torch.__file__).parent
    with tempfile.TemporaryDirectory(dir=path.parent) as directory:
        built = Path(directory) / path.name
        done = subprocess.run(
            [
                *(*command, "-std=c++20", "-O2", "-shared", "-fPIC", str(_SOURCE), "-o", str(built)),
                f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}",
                *("-I", str(root / "include"), f"-L{root / 'lib'}", "-lc10"),
            ],
            check=False,
            capture_output=True,
            timeout=_COMPILE_SECONDS,
        )
        if done.returncode:
            lines = done.stderr.decode(errors="replace").splitlines()
            said = next((line for line in lines if "error" in line), f"it ended with {done.returncode}")
            raise OSError(f"{compiler}: {said}")
        with built.open("rb") as file:
            os.fsync(file.fileno())  # a machine that stops now must not leave half of it under the final name
        built.replace(path)  # at once, so that another process never loads half a file
