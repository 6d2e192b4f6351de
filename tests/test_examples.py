"""What a new user turns to: the examples run, and `help(ebbtide)` lists what there is."""

from __future__ import annotations

import pydoc
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide

EXAMPLES = Path(__file__).parent.parent / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example(path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "iB" in done.stdout


def test_help_lists_what_there_is() -> None:
    text = pydoc.plain(pydoc.render_doc(ebbtide))
    for name in ("Budget", "PeakMeter", "BudgetError"):
        assert f"class {name}(" in text
    for name in ("scan", "observe_step"):
        assert f"{name}(" in text
