"""What needs PyTorch is imported when it is first asked for, wherever in a program that is."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import ebbtide

TRAINED = """
import ebbtide, torch

{place}

from ebbtide.run.versions import nothing
assert type(nothing(torch.device("cpu"))) is torch.Tensor and not nothing(torch.device("cpu")).is_inference()
weight = torch.eye(4, requires_grad=True)
state, ys = ebbtide.scan(lambda u, x: (torch.tanh(u @ weight + x),) * 2, torch.ones(1, 4), torch.ones(9, 4))
state.sum().backward()
assert weight.grad is not None
"""
PLACES = {
    "inference_mode": "with torch.inference_mode(): ask()",
    "fake tensors": "from torch._subclasses import FakeTensorMode\nwith FakeTensorMode(): ask()",
    "a transform": "torch.func.grad(lambda x: (ask(), x.sum())[1])(torch.ones(3))",
}
ASK = "def ask():\n    ebbtide.Budget, ebbtide.scan\n"


def said(program: str) -> str:
    """What a process prints that runs ``program``, which must end well."""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.parametrize("place", PLACES)
def test_it_may_be_asked_for_first_in(place: str) -> None:
    said(TRAINED.format(place=ASK + PLACES[place]))


def test_what_needs_no_torch_imports_none() -> None:
    program = "import sys, ebbtide.bundle, ebbtide.machines\nprint('torch' in sys.modules, hasattr(ebbtide, 'Step'))"
    assert said(program) == "False True\n"


@pytest.mark.parametrize("option", ["--version", "--help"])
def test_the_command_imports_no_torch_to_tell_of_itself(option: str) -> None:
    program = f"""
import sys
from ebbtide.cli import main
sys.argv = ["ebbtide", {option!r}]
try:
    main()
finally:
    print("torch" in sys.modules)
"""
    assert said(program).endswith("\nFalse\n")


def test_each_public_name_is_what_type_checkers_take_it_for() -> None:
    tree = ast.parse(Path(ebbtide.__file__).read_text())
    homes = {
        alias.name: node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names
    }
    del homes["TYPE_CHECKING"]
    assert sorted(homes) == sorted(ebbtide.__all__)
    lines = [f"from {home} import {name} as meant\nassert ebbtide.{name} is meant" for name, home in homes.items()]
    said("import ebbtide\nassert set(ebbtide.__all__) <= set(dir(ebbtide))\n" + "\n".join(lines))


def test_star_and_packages() -> None:
    said("from ebbtide import *\nassert Budget and scan and sequence.run and Step")
    said(
        "import ebbtide, pickle\nassert pickle.loads(pickle.dumps(ebbtide.scan)) is ebbtide.scan and ebbtide.plan.solve"
    )


def test_other_names_are_none() -> None:
    with pytest.raises(AttributeError, match=r"^module 'ebbtide' has no attribute 'Bugdet'$"):
        ebbtide.Bugdet  # type: ignore[attr-defined] # noqa: B018
