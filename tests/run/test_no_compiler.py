"""Without a C++ compiler there is no arena: a warning in the log, the same numbers, and planned steps all the same."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

_PROGRAM = """
import sys, torch, ebbtide
from ebbtide.run.native import arena_library
from tests.run.harness import FAST_DISK, STEPS, compare, run_plain
from tests.run.programs import Chain

expected = run_plain(Chain)
program = Chain(0)
with ebbtide.Budget("60%", spill=sys.argv[1], machine=FAST_DISK) as memory:
    for index, record in enumerate(expected):
        compare(record, program.run(index, memory.step), f"step {index}")
    print(arena_library(), memory.state)
"""


@pytest.mark.parametrize("compiler", ["/bin/false", 'c++ "-O2'])
def test_a_budget_works_without_a_compiler(tmp_path: Path, compiler: str) -> None:
    environment = os.environ | {"CXX": compiler, "XDG_CACHE_HOME": str(tmp_path / "cache")}
    done = subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(tmp_path)],
        env=environment,
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split() == ["None", "planned"]
    assert "no CPU arena" in done.stderr
