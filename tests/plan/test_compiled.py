"""The compiled simulator finds what the plain oracle finds; compiling is put off, and needs no place to keep it."""

from __future__ import annotations

import errno
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numba
import numpy as np
import pytest
from numba.core.caching import CacheImpl, IndexDataCacheFile
from numba.core.compiler_lock import global_compiler_lock
from numba.core.registry import cpu_target

from ebbtide.compiled import NOTICE, _interrupts_held, _numba, compiled, dispatcher_of
from ebbtide.plan import find_recipes, solve
from ebbtide.plan.course import run_course
from ebbtide.plan.follow import Follower, Moves, Trip, follow
from ebbtide.plan.problem import CheckedRecipe, Problem
from ebbtide.plan.replay import check_recipe
from ebbtide.plan.simulate import moves_of
from ebbtide.plan.walk import walk
from tests.plan.limits import limit_at
from tests.plan.random_steps import disk_machine, random_step, tiny_step
from tests.plan.reference import Walk
from tests.plan.test_simulate import MACHINE, random_decisions


@pytest.mark.parametrize("batch", range(20))
def test_equals_oracle_on_many_plans(batch: int) -> None:
    step = random_step(1000 + batch, length=4 + batch % 10)
    problem = Problem.of(step, MACHINE)
    for seed in range(60):
        decisions = random_decisions(step, 1000 * batch + seed)
        course, walked = follow(problem, moves_of(problem, decisions)), Walk(step, MACHINE, decisions).run()
        assert course.memory.tolist() == walked.memory
        assert course.physical.tolist() == walked.physical
        np.testing.assert_allclose(course.starts, walked.starts, rtol=0, atol=1e-9)
        assert course.seconds == pytest.approx(walked.seconds, abs=1e-9)


def test_columns_and_lists_say_the_same() -> None:
    step = random_step(7, length=14)
    problem = Problem.of(step, MACHINE)
    recipes = find_recipes(step)
    replays = [
        None if recipe is None else check_recipe(problem.facts, absence.value, recipe, MACHINE.replay_seconds)
        for recipe, absence in zip(recipes, step.absences, strict=True)
    ]
    follower = Follower(problem, replays)
    for seed in range(20):
        moves = moves_of(problem, random_decisions(step, seed))
        columns = Moves.none(len(moves))
        for number, move in enumerate(moves):
            if isinstance(move, CheckedRecipe):
                columns.replay[number] = number
            elif isinstance(move, Trip):
                columns.send(number, 0, move)
        assert follower.listed(columns) == moves
        course, listed = follower.follow(columns), follow(problem, moves)
        assert course.memory.tolist() == listed.memory.tolist()
        assert (course.seconds, course.transfers) == (listed.seconds, listed.transfers)
        assert (course.stalls, course.recomputations) == (listed.stalls, listed.recomputations)


def test_nothing_is_compiled_before_a_plan_is_made() -> None:
    program = "import sys, ebbtide, ebbtide.plan; sys.exit(bool({'numba', 'highspy'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", program], check=False).returncode == 0


def twice(number: int) -> int:
    """Something to compile."""
    return 2 * number


def compile_twice() -> Any:
    """As a new process does it."""
    return dispatcher_of.__wrapped__(twice)


def test_nowhere_to_keep_what_was_compiled_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CacheImpl, "_locator_classes", [])
    assert compile_twice()(21) == 42


def test_a_full_disk_is_no_error(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(IndexDataCacheFile, "save", refuse)
    assert compile_twice()(21) == 42
    assert f"{tmp_path}" in caplog.text
    assert "cannot be written ([Errno 28] No space left on device)" in caplog.text


@pytest.mark.parametrize("kind", ["nbi", "nbc"])
@pytest.mark.parametrize("damage", [lambda data: b"", lambda data: data[: len(data) // 2], lambda data: b"no pickle"])
def test_a_damaged_file_is_no_error(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    kind: str,
    damage: Callable[[bytes], bytes],
) -> None:
    monkeypatch.setattr(numba.config, "CACHE_DIR", str(tmp_path))
    assert compile_twice()(21) == 42
    (file,) = tmp_path.rglob(f"*.{kind}")
    file.write_bytes(damage(file.read_bytes()))
    assert compile_twice()(21) == 42
    assert "compiled again" in caplog.text
    caplog.clear()
    again = compile_twice()
    assert again(21) == 42
    assert (sum(again.stats.cache_hits.values()), caplog.text) == (1, "")


def test_numba_is_made_ready_under_its_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two threads that plan for the first time at once: one loads what was compiled while the other is still here."""
    is_locked: Callable[[], bool] = global_compiler_lock.is_locked
    locked: list[bool] = []
    for context in (cpu_target.typing_context, cpu_target.target_context):
        monkeypatch.setattr(context, "refresh", lambda: locked.append(is_locked()))
    _numba.__wrapped__()
    assert locked == [True, True]
    assert not is_locked()


def spin(numbers: Any, rounds: int) -> tuple[Any, float]:
    """Takes a while; makes a result that only Python can take over."""
    number = 0.0
    for index in range(rounds):
        number = (number * 1.0000001 + index) % 1000.0
        numbers[0] = number
    return numbers, number


def test_what_a_signal_raises_meanwhile_is_raised() -> None:
    """Ctrl-C while a plan is searched for: it was a `SystemError` of numba's."""
    call = compiled(spin)
    call(np.zeros(1), 10)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.02)
        with pytest.raises(KeyboardInterrupt):
            call(np.zeros(1), 50_000_000)
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


def test_functions_that_are_called_are_compiled_too_and_named_after() -> None:
    """A change in what is called must not find the caller that was kept before it."""
    walked, ran = dispatcher_of(walk).py_func, dispatcher_of(run_course).py_func
    assert walked.__qualname__.startswith("walk_")
    assert ran.__qualname__ == "run_course"
    assert walked.__globals__["_judge"].py_func.__globals__["run_course"] is dispatcher_of(run_course)


COMPILES = """
import logging, numba
from ebbtide.compiled import NOTICE, compiled

logging.basicConfig(level=logging.INFO, format="%(message)s")

def twice(number):
    return 2 * number

def thrice(number):
    return 3 * number

def of_somebody_else(number):
    return number

numba.njit(of_somebody_else)(1)
print("so far nothing", flush=True)
twice.__module__ = thrice.__module__ = "ebbtide.plan.walk"
compiled(twice)(1)
compiled(thrice)(1)
"""


def test_who_waits_for_the_compiler_is_told_so_once() -> None:
    command = [sys.executable, "-c", COMPILES]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, check=True)
    assert done.stdout.splitlines() == ["so far nothing", NOTICE]


def test_interrupts_wait_while_numba_is_imported() -> None:
    """It cannot be imported again where it was half imported."""
    here: list[str] = []

    def interrupted() -> None:
        with _interrupts_held():
            signal.raise_signal(signal.SIGINT)
            here.append("went on")

    former = signal.signal(signal.SIGINT, signal.default_int_handler)  # in the background it may be ignored
    try:
        with pytest.raises(KeyboardInterrupt):
            interrupted()
        assert here == ["went on"]
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, former)
    program = """
import importlib.abc, signal, sys

signal.signal(signal.SIGINT, signal.default_int_handler)

class Once(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path, target=None):
        if name == "numba.core.decorators":
            sys.meta_path.remove(self)
            signal.raise_signal(signal.SIGINT)

sys.meta_path.insert(0, Once())
from ebbtide.compiled import dispatcher_of
try:
    dispatcher_of(lambda x: x)
except KeyboardInterrupt:
    print("interrupted")
dispatcher_of(lambda x: x)(3)
"""
    done = subprocess.run([sys.executable, "-c", program], stdout=subprocess.PIPE, check=True)
    assert done.stdout == b"interrupted\n"


def test_a_process_that_compiles_nothing() -> None:
    """As who debugs functions of numba of their own runs it: what it takes for them are plain ones then."""
    program = (
        "from ebbtide.plan import solve\nfrom tests.plan.limits import limit_at\n"
        "from tests.plan.random_steps import disk_machine, tiny_step\nstep = tiny_step(1, 4)\n"
        "print(solve(step, disk_machine(), limit_at(step, 0.6), seconds=0.0).decisions)"
    )
    step = tiny_step(1, 4)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env=os.environ | {"NUMBA_DISABLE_JIT": "1"},
        cwd=Path(__file__).parents[2],
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stderr == ""
    assert done.stdout.strip() == str(solve(step, disk_machine(), limit_at(step, 0.6), seconds=0.0).decisions)
