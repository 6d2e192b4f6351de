"""What is said of a function in a file of the user's that fails."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests.cli.commands import Failure

FAULTY = """
import torch
import beside

def one_step():
    return helper(torch.randn(3, 4))

def helper(x):
    return torch.nn.Sequential(beside.Layer())(x)

def looking():
    if torch.randn(1) > 0:
        return helper(torch.ones(1))

def forever():
    forever()
"""
BESIDE = """
import torch

class Layer(torch.nn.Module):
    def forward(self, x):
        return x @ x
"""
FAKE = ("--fake", "--machine", "h200")
both = pytest.mark.parametrize("fake", [(), FAKE], ids=["real", "fake"])


@pytest.fixture
def faulty(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delitem(sys.modules, "beside", raising=False)
    (tmp_path / "beside.py").write_text(BESIDE)
    path = tmp_path / "train.py"
    path.write_text(FAULTY)
    return path


@both
def test_an_error_says_where_in_the_users_files_it_was(
    fake: tuple[str, ...], faulty: Path, tmp_path: Path, failure: Failure
) -> None:
    """And in none of PyTorch's or ebbtide's."""
    said = failure("observe", faulty, *fake, "-o", tmp_path / "step.json")
    assert said.startswith(f"ebbtide: {faulty}: RuntimeError: ")
    assert said.endswith(" (train.py:6 in one_step, train.py:9 in helper, beside.py:6 in forward)")


def test_an_error_of_ebbtides_says_so_too(faulty: Path, tmp_path: Path, failure: Failure) -> None:
    said = failure("observe", f"{faulty}:looking", *FAKE, "-o", tmp_path / "step.json")
    assert "fake tensors have no values" in said
    assert said.endswith(" (train.py:12 in looking)")


def test_an_error_while_a_script_is_imported_says_where(tmp_path: Path, failure: Failure) -> None:
    script = tmp_path / "train.py"
    script.write_text("def look_up(key):\n    return {}[key]\n\n\nlook_up('rate')\n")
    said = failure("observe", script, "-o", tmp_path / "step.json")
    assert said == (
        f"ebbtide: {script}: cannot be imported: KeyError: 'rate' (train.py:5 in <module>, train.py:2 in look_up)"
    )


def test_an_error_deep_down_is_said_shortly(faulty: Path, tmp_path: Path, failure: Failure) -> None:
    said = failure("observe", f"{faulty}:forever", "-o", tmp_path / "step.json")
    assert said.endswith("(train.py:16 in forever, ..." + 8 * ", train.py:16 in forever" + ")")
