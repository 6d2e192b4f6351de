"""What is said of a function in a file of the user's that fails, or that runs no step."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ebbtide.step import Step
from tests.cli.commands import Failure, run

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
STILL_TO_RUN = """
import torch

def yielding():
    yield torch.ones(3, requires_grad=True).sum().backward()

async def waiting():
    torch.ones(3, requires_grad=True).sum().backward()

def making():
    return lambda: torch.ones(3, requires_grad=True).sum().backward()

def idle():
    pass
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


@both
@pytest.mark.filterwarnings("ignore:coroutine.*was never awaited:RuntimeWarning")
@pytest.mark.parametrize(
    ("function", "expected"),
    [
        ("yielding", "it returned a generator, which is not run: run it inside yielding, or name a function that"),
        ("waiting", "it returned a coroutine, which is not run: run it inside waiting, or name a function that"),
        ("making", "it returned a function, which is not run: run it inside making, or name a function that"),
        ("idle", "observe one that runs forward and backward"),
    ],
)
def test_a_function_that_runs_nothing_is_no_step(
    fake: tuple[str, ...], function: str, expected: str, tmp_path: Path, failure: Failure
) -> None:
    """It was written as an empty one, and refused only by what read that."""
    script, step = tmp_path / "train.py", tmp_path / "step.json"
    script.write_text(STILL_TO_RUN)
    said = failure("observe", f"{script}:{function}", *fake, "-o", step)
    assert said.startswith(f"ebbtide: {script}:{function} ran nothing, and has no ops; {expected}")
    assert len(said.splitlines()) == 1
    assert not step.exists()


def test_a_step_without_a_backward_pass_is_written_with_a_warning(script: Path, tmp_path: Path) -> None:
    step = tmp_path / "step.json"
    assert f"ebbtide: warning: {script}:forward_only has no backward pass" in run(
        "observe", f"{script}:forward_only", "-o", step
    )
    assert Step.load(step).ops
    assert "warning" not in run("observe", f"{script}:one_step", "-o", step)


@pytest.mark.parametrize("fake", [(), ("--fake", "--machine", "h200")], ids=["real", "fake"])
def test_a_notebook_is_there_but_is_no_python_file(fake: tuple[str, ...], failure: Failure, tmp_path: Path) -> None:
    notebook = tmp_path / "train.ipynb"
    notebook.write_text("{}")
    said = failure("observe", f"{notebook}:one_step", *fake, "-o", tmp_path / "step.json")
    expected = "it is no Python file, by its name; put the function into one that ends in .py"
    assert said == f"ebbtide: {notebook}: {expected}"
