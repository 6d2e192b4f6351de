"""User errors, and steps within or beside a step, in each state that a budget has."""

from __future__ import annotations

import contextlib
import threading

import pytest

import ebbtide
from ebbtide.errors import StepError
from tests.run.faults import Steps, assert_clean, survive
from tests.run.harness import STEPS, compare

pytestmark = pytest.mark.usefixtures("nothing_left", "quick_plans")


@pytest.mark.parametrize("at", [3, 4, 5])
@pytest.mark.parametrize("where", ["forward", "backward"])
@pytest.mark.parametrize("error", [ZeroDivisionError, KeyboardInterrupt])
def test_exception_in_a_step_that_is_counted_or_rehearsed(
    memory: ebbtide.Budget, where: str, at: int, error: type[BaseException]
) -> None:
    def fail() -> None:
        raise error("by the user")

    program = Steps(at, forward=fail) if where == "forward" else Steps(at, backward=fail)
    survive(memory, program, error, "by the user")


@pytest.mark.parametrize("beside", [False, True], ids=["nested", "other thread"])
def test_a_step_during_each_step(memory: ebbtide.Budget, beside: bool) -> None:
    """It is refused, whatever the outer step is for, and that one goes on as if nothing had been."""
    refused: list[str] = []
    states: list[str] = []

    def begin() -> None:
        try:
            memory.step().__enter__()
        except StepError as error:
            refused.append(str(error))

    def attempt() -> None:
        if beside:
            thread = threading.Thread(target=begin)
            thread.start()
            thread.join()
        else:
            begin()

    plain, program = Steps(at=-1), Steps(at=-1, forward=attempt, backward=attempt)
    for index in range(STEPS + 2):
        program.at = index
        states.append(memory.state)
        expected = plain.run(index, contextlib.nullcontext)
        compare(expected, program.run(index, memory.step), f"step {index} ({states[-1]})")
        assert_clean(memory)
    assert len(refused) == 2 * (STEPS + 2)
    assert all("under way already" in text for text in refused)
    assert {"observe", "audit", "planned"} <= set(states), states
