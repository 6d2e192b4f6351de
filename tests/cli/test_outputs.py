"""The files that commands write: there before anything is printed, and alone where they go to standard output."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console
from typer.testing import CliRunner

from ebbtide.cli import app
from ebbtide.machine import Machine
from tests.cli.commands import Failure
from tests.plan.random_steps import network_step

FEW = ("--points", "2", "--seconds", "0", "--policies", "none")


@pytest.fixture
def commands(machine: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Sequence[str]]:
    """Commands, each without the name of the file at its end; what takes long is not done."""
    network_step(3).save(tmp_path / "step.json")
    monkeypatch.setattr("ebbtide.run.calibrate.calibrate", lambda *_, **__: Machine.load(machine))
    monkeypatch.setattr("ebbtide.demo.run.run_demo", lambda *_, **__: [])
    given = str(tmp_path / "step.json"), "--machine", str(machine)
    return {
        "frontier": ["frontier", *given, *FEW, "-o"],
        "plan": ["plan", *given, "--budget", "100%", "-o"],
        "calibrate": ["calibrate", "-o"],
        "demo": ["demo", "--json"],
    }


@pytest.mark.parametrize("name", ["frontier", "plan", "calibrate", "demo"])
def test_files_are_there_though_nobody_reads_what_is_printed(
    name: str, commands: dict[str, Sequence[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As where ``| less`` was left: Rich ends the process as it prints."""

    def left(*_: Any, **__: Any) -> None:
        raise SystemExit(1)

    monkeypatch.setattr(Console, "print", left)
    file = tmp_path / "written.html"
    assert CliRunner().invoke(app, [*commands[name], str(file)]).exit_code == 1
    assert file.read_bytes()


@pytest.mark.parametrize("name", ["frontier", "plan", "calibrate", "demo"])
def test_what_goes_to_standard_output_goes_there_alone(
    name: str, commands: dict[str, Sequence[str]], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whoever reads it wants the file; what is printed goes to standard error."""
    link = tmp_path / "page.html"
    link.symlink_to("/dev/stdout")
    result = CliRunner().invoke(app, [*commands[name], str(link)], catch_exceptions=False)
    assert (result.exit_code, result.stdout) == (0, "")
    assert result.stderr
    written = capfd.readouterr().out
    if name == "frontier":
        assert written.lower().lstrip().startswith("<!doctype html>")
        assert written.rstrip().endswith("</html>")
    else:
        json.loads(written)


@pytest.mark.parametrize("command", [["calibrate"], ["demo", "--models", "gpt2"]], ids=lambda command: command[0])
def test_with_no_place_for_temporary_files_a_directory_must_be_named(
    command: list[str], failure: Failure, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nowhere() -> str:
        raise FileNotFoundError("No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr(tempfile, "gettempdir", nowhere)
    assert failure(*command) == "ebbtide: no directory for temporary files can be written; name one with --spill DIR"
