"""Settings shared by all tests: hypothesis profiles, and the check that a test leaves nothing behind."""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

# Small steps on busy cores: threads of OpenMP that spin while they wait would make them ten times slower. Read by
# PyTorch when it is imported.
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import hypothesis
import pytest
import torch
from torch.utils._python_dispatch import _get_current_dispatch_mode_stack, _pop_mode

from ebbtide.decisions import Plan
from ebbtide.plan import solve

hypothesis.settings.register_profile(
    "ci",
    max_examples=60,
    derandomize=True,
    deadline=None,
    database=None,
    print_blob=True,
    phases=[phase for phase in hypothesis.Phase if phase is not hypothesis.Phase.explain],
    suppress_health_check=list(hypothesis.HealthCheck),
)
hypothesis.settings.register_profile(
    "long", hypothesis.settings.get_profile("ci"), max_examples=2000, derandomize=False
)
hypothesis.settings.load_profile(os.environ.get("EBBTIDE_HYPOTHESIS", "ci"))


QUICK_SECONDS = 0.05
"""A search for plans that is good enough where only their effects matter."""
_MANY_MODULES = 50
_modules_at_freeze = 0


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup() -> None:
    """Let the garbage collector leave alone what imports have made, now and then.

    Observed steps call it, and tests do, thousands of times in all: it would look at a million objects each time.
    """
    global _modules_at_freeze
    if len(sys.modules) >= _modules_at_freeze + _MANY_MODULES:
        _modules_at_freeze = len(sys.modules)
        gc.collect()
        gc.freeze()


def open_files() -> set[str]:
    """The open file descriptors of this process, each as number and target.

    Not the one that ebbtide keeps, once for the whole process, to read its resident size.
    """
    found = set()
    for entry in Path("/proc/self/fd").iterdir():
        with contextlib.suppress(FileNotFoundError):  # the descriptor of the directory that is being listed
            found.add(f"{entry.name} -> {entry.readlink()}")
    return {line for line in found if not line.endswith("/statm")}


def runtime_threads() -> list[str]:
    """Names of the threads that ebbtide has started and that still live."""
    return [thread.name for thread in threading.enumerate() if thread.name.startswith("ebbtide-")]


def hooks_left() -> int:
    """Takes saved-tensor hooks that are left off autograd's stack, so that later tests can pass; says how many."""
    count = 0
    while torch._C._autograd._top_saved_tensors_default_hooks(True) is not None:
        torch._C._autograd._pop_saved_tensors_default_hooks()
        count += 1
    return count


def modes_left() -> int:
    """Takes dispatch modes that are left off their stack, so that later tests can pass; says how many."""
    modes = _get_current_dispatch_mode_stack()
    for _ in modes:
        _pop_mode()
    return len(modes)


@pytest.fixture
def quick_plans(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Plan]:
    """What plans now."""
    quick = functools.partial(solve, seconds=QUICK_SECONDS)
    monkeypatch.setattr("ebbtide.run.solving.solve", quick)
    return quick


@pytest.fixture
def plans_stay(monkeypatch: pytest.MonkeyPatch) -> None:
    """No plan is replaced by one for durations as they are known later, which is a matter of how busy a machine is."""
    monkeypatch.setattr("ebbtide.run.kinds.WORTH_SECONDS", math.inf)


@pytest.fixture
def nothing_left() -> Iterator[None]:
    """Fails a test that leaves a thread, a file, a saved-tensor hook or a dispatch mode behind."""
    before = open_files()
    yield
    hooks, modes = hooks_left(), modes_left()
    if runtime_threads() or open_files() - before:
        gc.collect()  # slow, so only where something may hang in a cycle
    assert (hooks, modes) == (0, 0), "saved-tensor hooks or dispatch modes are left"
    assert runtime_threads() == [], "threads are left"
    assert open_files() - before == set(), "files are left"
