"""What `--help` shows of a command: whole sentences, and whole defaults."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.cli.commands import run
from tests.plan.random_steps import network_step


def test_lines_are_broken_by_the_terminal_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")

    assert "others are told from these. The answer is observed too, and taken back if it" in run("batch", "--help")
    assert "`ebbtide observe train.py:one_step -o step.json`, where one_step()" in run("observe", "--help")


def test_paragraphs_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "1000")

    lines = [line.strip() for line in run("observe", "--help").splitlines()]
    assert any(line.endswith("It is called twice.") for line in lines)
    assert any(line.startswith("With --fake the model") for line in lines)


@pytest.mark.parametrize("name", ["offload-all", "capuchin", "rotor", "pofo"])
def test_default_policies_are_named_in_full(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.setenv("COLUMNS", "100")

    assert name in run("frontier", "--help")


def test_policies_may_have_spaces(machine: Path, tmp_path: Path) -> None:
    step, numbers = tmp_path / "step.json", tmp_path / "frontier.json"
    network_step(3).save(step)

    options = ["--machine", str(machine), "--points", "2", "--seconds", "0", "--policies", "offload-all, rotor"]
    output = run("frontier", step, "-o", numbers, *options)

    assert "rotor" in output


def test_it_is_whole_without_docstrings() -> None:
    command = [sys.executable, "-OO", "-m", "ebbtide", "--help"]
    environment = os.environ | {"COLUMNS": "200", "PYTHONDONTWRITEBYTECODE": "1"}
    said = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout
    for begin in ("Train PyTorch models within", "Train three models", "Measure how fast", "Draw what memory costs"):
        assert begin in said
