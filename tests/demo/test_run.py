"""The demo's cases, small, from end to end; and what its table and verdict say."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import subprocess
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from ebbtide.demo import run as demo
from ebbtide.demo.case import CaseResult
from ebbtide.demo.process import CaseProcess
from ebbtide.demo.run import Row, demo_notes, demo_table, faults, limit_for, run_demo
from ebbtide.errors import EbbtideError, SpillError

PLAIN = CaseResult(peak_bytes=1100, resting_bytes=100, rss_bytes=1050, seconds=2.0, loss=1.5, digest="a")
WITHIN = dataclasses.replace(PLAIN, peak_bytes=590, seconds=2.1)


def text_of(rows: list[Row]) -> str:
    text = io.StringIO()
    Console(width=100, file=text).print(demo_table(rows))
    return text.getvalue()


def test_limit_is_a_share_of_what_is_above_rest() -> None:
    assert limit_for(PLAIN, 0.5) == 600


def test_good_rows_have_no_faults() -> None:
    rows = [Row("m", None, None, True, PLAIN), Row("m", 0.5, 600, True, WITHIN)]
    assert faults(rows) == []
    text = text_of(rows)
    assert "1.05" in text
    assert "yes" in text
    assert len(demo_notes(rows)) == 4
    assert all(len(note) <= 100 for note in demo_notes(rows))


def test_a_peak_above_the_limit_and_other_numbers_are_faults() -> None:
    wrong = dataclasses.replace(WITHIN, peak_bytes=601, digest="b")
    rows = [Row("m", None, None, True, PLAIN), Row("m", 0.5, 600, True, wrong)]
    assert len(faults(rows)) == 2
    assert "NO" in text_of(rows)


def test_an_unreachable_budget_is_shown_as_such() -> None:
    rows = [Row("m", None, None, True, PLAIN), Row("m", 0.25, 600, False, WITHIN)]
    assert "50%*" in text_of(rows)
    assert any(note.startswith("* m cannot run within 25%") for note in demo_notes(rows))


def test_unknown_model() -> None:
    with pytest.raises(EbbtideError, match="no model 'lenet'"):
        run_demo(Console(stderr=True), models=["lenet"])


def test_a_case_that_fails_says_why() -> None:
    complaint = r"gpt2: the case ended early, after 0 steps: .*/proc/nowhere"
    with CaseProcess("gpt2", 1, "/proc/nowhere", lambda: None) as process:
        process.wait()
        with pytest.raises(EbbtideError, match=complaint):
            process.begin(10**9)


def test_a_case_finds_no_modules_in_the_working_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor does the command: a project may have a ``statistics.py``."""
    start = subprocess.Popen

    def imports_alone(command: list[str], **more: Any) -> subprocess.Popen[str]:
        return start([*command[: command.index("-m")], "-c", "import statistics"], **more)

    (tmp_path / "statistics.py").write_text("raise RuntimeError('of the user')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("PYTHONPATH", raising=False)  # it may have the working directory
    monkeypatch.setattr(subprocess, "Popen", imports_alone)
    with (
        CaseProcess("gpt2", 1, None, lambda: None) as process,
        pytest.raises(EbbtideError, match="after 0 steps: it said nothing"),
    ):
        process.wait()


def test_processes_of_a_case_end_together() -> None:
    with contextlib.ExitStack() as stack:
        cases = demo._Cases(stack, functools.partial(CaseProcess, "gpt2", 1, None, lambda: None), 1)
        started = [cases.begin(None), cases.begin(None)]
        assert all(process.step() == {"settled": False} for process in started)
    assert all(process._process.poll() == 0 for process in started)


def test_small_demo_from_end_to_end(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demo, "BATCH_SIZES", {"gpt2": 1})
    monkeypatch.setattr(demo, "FRACTIONS", (0.6, 0.01))
    rows = run_demo(Console(stderr=True), models=["gpt2"], steps=8)
    assert [row.fraction for row in rows] == [None, 0.6, 0.01]
    assert faults(rows) == []
    assert [row.reachable for row in rows] == [True, True, False]
    for row in rows[1:]:
        assert row.result.loss == rows[0].result.loss
        assert row.result.peak_bytes < rows[0].result.peak_bytes


def test_a_directory_that_is_not_there_is_missed_at_once(tmp_path: Path) -> None:
    with pytest.raises(SpillError, match="does not exist"):
        run_demo(Console(file=io.StringIO()), spill=str(tmp_path / "none"))
