"""The house has floors (CONTRIBUTING.md): none imports what is above it; records and planners know no torch."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import ebbtide

SOURCE = Path(ebbtide.__file__).parent
FLOORS = (
    {"observe", "place"},
    {"plan"},
    {"run"},
    {"sequence", "report", "demo"},
    {"cli", "options", "named_steps", "timed_steps", "__main__", "__init__"},
)
"""From below; what is in none of them is what all need: records, and the modules beside them."""
FOR_CONVENIENCE = {("run/budget.py", "ebbtide.report.summary")}
"""`Budget.report()`."""
WITHOUT_TORCH = ("step.py", "step_checks.py", "machine.py", "decisions.py", "measured.py", "bundle.py", "plan", "place")
WITHIN = ("run.native", "run.backends", "run.tiers", "sequence.schedules")
"""Packages that are a floor below the modules beside them. (`plan/published/` is one above: policies use the planner.)
"""
MODULES = sorted(SOURCE.rglob("*.py"))


def name_of(path: Path) -> str:
    parts = path.relative_to(SOURCE.parent).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


BY_NAME = {name_of(path): path for path in MODULES}


def imports(path: Path) -> Iterator[str]:
    """Everything that a module imports, wherever in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module is not None:
            assert node.level == 0, f"{path} imports by dots"
            yield node.module
            yield from (name for alias in node.names if (name := f"{node.module}.{alias.name}") in BY_NAME)


def floor_of(name: str) -> int:
    part = name.split(".")[1] if "." in name else "__init__"
    return next((number for number, parts in enumerate(FLOORS, 1) if part in parts), 0)


@pytest.mark.parametrize("path", MODULES, ids=name_of)
def test_no_module_looks_up(path: Path) -> None:
    own, place = floor_of(name_of(path)), path.relative_to(SOURCE).as_posix()
    above = [
        name
        for name in imports(path)
        if name.startswith("ebbtide.") and floor_of(name) > own and (place, name) not in FOR_CONVENIENCE
    ]
    assert not above, f"{place} imports {', '.join(above)}"


@pytest.mark.parametrize("package", WITHIN)
def test_no_package_within_looks_up(package: str) -> None:
    """Of the modules beside it, it may import those that import nothing beside them."""
    own, around = f"ebbtide.{package}.", f"ebbtide.{package.partition('.')[0]}."
    below = tuple(f"ebbtide.{other}." for other in WITHIN)
    modules = {name: path for name, path in BY_NAME.items() if f"{name}.".startswith(own)}
    assert modules
    beside = {
        (name, other)
        for name, path in modules.items()
        for other in imports(path)
        if other.startswith(around) and other in BY_NAME and not f"{other}.".startswith(below)
    }
    leaves = {other for _, other in beside if not any(name.startswith(around) for name in imports(BY_NAME[other]))}
    above = sorted((name, other) for name, other in beside if other not in leaves)
    assert not above, f"{package} looks up: {above}"


def test_records_and_planners_know_no_torch() -> None:
    """Nor does what they import of ours, however far down."""
    waiting = [path for path in MODULES if path.relative_to(SOURCE).parts[0] in WITHOUT_TORCH]
    assert len(waiting) > 40
    seen: set[Path] = set()
    while waiting:
        path = waiting.pop()
        if path in seen:
            continue
        seen.add(path)
        for name in imports(path):
            assert name.partition(".")[0] != "torch", f"{path.relative_to(SOURCE)} imports {name}"
            if name.startswith("ebbtide.") and name in BY_NAME:
                waiting.append(BY_NAME[name])
