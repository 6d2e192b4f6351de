"""What tests of the command line start from."""

from __future__ import annotations

import functools
import sys
from pathlib import Path

import pytest

from ebbtide.cli import main
from ebbtide.machine import Link, Machine, Tier
from ebbtide.plan import solve
from tests.cli.commands import SCRIPT, Failure
from tests.conftest import QUICK_SECONDS


@pytest.fixture
def failure(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Failure:
    """What is said on standard error by a command that must end with code 1."""

    def said(*arguments: str | Path) -> str:
        monkeypatch.setattr(sys, "argv", ["ebbtide", *map(str, arguments)])
        with pytest.raises(SystemExit) as ending:
            main()
        assert ending.value.code == 1
        return capsys.readouterr().err.strip()

    return said


@pytest.fixture
def quick_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Batches are planned for with a short search each."""
    quick = functools.partial(solve, seconds=QUICK_SECONDS)
    monkeypatch.setattr("ebbtide.plan.batch.solve", lambda step, machine, limit, seconds: quick(step, machine, limit))


@pytest.fixture
def script(tmp_path: Path) -> Path:
    path = tmp_path / "train.py"
    path.write_text(SCRIPT)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    links = (
        Link("ram", "disk", 1e-4, 4e9, 3e9, 0.02),
        Link("disk", "ram", 1e-4, 2e9, 1e9, 0.1),
    )
    path = tmp_path / "machine.json"
    Machine("a described machine", "ram", (Tier("ram", "device"), Tier("disk", "disk")), links).save(path)
    return path
