"""What a new user turns to: the examples run, and `help(ebbtide)` lists what there is."""

from __future__ import annotations

import os
import pydoc
import re
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide

ROOT = Path(__file__).parent.parent
EXAMPLES = ROOT / "examples"


@pytest.mark.parametrize("path", sorted(EXAMPLES.glob("*.py")), ids=lambda path: path.name)
def test_example(path: Path) -> None:
    done = subprocess.run([sys.executable, "-W", "error", path], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "iB" in done.stdout


def test_the_guide_to_long_sequences(tmp_path: Path) -> None:
    """Its blocks run one after another as they are, so that each import comes before its use."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "docs" / "sequences.md").read_text(), re.DOTALL)
    script = tmp_path / "guide.py"
    script.write_text("".join(blocks).replace('"/tmp"', repr(str(tmp_path))))
    command, environment = [sys.executable, "-W", "error", str(script)], os.environ | {"XDG_CACHE_HOME": str(tmp_path)}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert re.fullmatch(r"\[.*\]\n\w+: 1000000 steps, .* in memory.*\n", done.stdout, re.DOTALL)


def test_help_lists_what_there_is() -> None:
    text = pydoc.plain(pydoc.render_doc(ebbtide))
    for name in ("Budget", "PeakMeter", "BudgetError"):
        assert f"class {name}(" in text
    for name in ("scan", "observe_step"):
        assert f"{name}(" in text
