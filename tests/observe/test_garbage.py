"""While a recorder looks, the garbage collector runs when it is asked to."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Callable, Iterator

import pytest

from ebbtide.observe.garbage import HeldOff, expect_objects, put_back_if_left
from ebbtide.observe.recorder import Recorder


@pytest.fixture(autouse=True)
def thresholds() -> Iterator[tuple[int, int, int]]:
    """Those of the interpreter, put back afterwards."""
    found = gc.get_threshold()
    gc.set_threshold(700, 10, 10)
    yield 700, 10, 10
    gc.set_threshold(*found)
    gc.enable()


def collections_while_objects_are_made() -> int:
    """How often the collector runs for some thousand objects."""
    before = sum(one["collections"] for one in gc.get_stats())
    made = [[number] for number in range(10_000)]
    after = sum(one["collections"] for one in gc.get_stats())
    return after - before if made else 0


def test_while_a_step_is_recorded_it_does_not_run_by_itself(thresholds: tuple[int, int, int]) -> None:
    assert collections_while_objects_are_made()
    with contextlib.suppress(KeyError), Recorder():
        assert not collections_while_objects_are_made()
        raise KeyError
    assert gc.get_threshold() == thresholds
    assert collections_while_objects_are_made()


@pytest.mark.parametrize("name", ["watch_compiling", "tell_of_passes"])
def test_an_interrupt_as_a_recorder_begins(
    name: str, thresholds: tuple[int, int, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupt(_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(f"ebbtide.observe.recorder.{name}", interrupt)
    with pytest.raises(KeyboardInterrupt), Recorder():
        pytest.fail("it has begun")
    assert gc.get_threshold() == thresholds


def test_several_hold_it_off_until_the_last_one_ends(thresholds: tuple[int, int, int]) -> None:
    one, other = HeldOff(), HeldOff()
    one.begin()
    other.begin()
    one.end()
    one.end()
    assert not collections_while_objects_are_made()
    other.end()
    assert gc.get_threshold() == thresholds


def test_objects_that_are_expected_meanwhile_count_afterwards() -> None:
    held = HeldOff()
    held.begin()
    expect_objects(1000)
    assert not collections_while_objects_are_made()
    held.end()
    assert gc.get_threshold() == (1700, 10, 10)
    held.begin()
    expect_objects(-1000)
    held.end()
    assert gc.get_threshold() == (700, 10, 10)


@pytest.mark.parametrize("youngest", [0, 500])
def test_who_sets_thresholds_meanwhile_is_believed(youngest: int) -> None:
    held = HeldOff()
    held.begin()
    gc.set_threshold(youngest, 5, 5)
    held.end()
    assert gc.get_threshold() == (youngest, 5, 5)


@pytest.mark.parametrize("gives_back", [HeldOff.begin, lambda _: put_back_if_left()])
def test_who_sets_what_was_read_meanwhile_does_not_turn_it_off(
    gives_back: Callable[[HeldOff], None], thresholds: tuple[int, int, int]
) -> None:
    held = HeldOff()
    held.begin()
    read = gc.get_threshold()
    put_back_if_left()
    assert not collections_while_objects_are_made()
    held.end()
    gc.set_threshold(*read)
    gives_back(held)
    held.end()
    assert gc.get_threshold() == thresholds


def test_the_largest_threshold_stays() -> None:
    largest = (1 << 31) - 1
    held = HeldOff()
    gc.set_threshold(largest, 10, 10)
    for _ in range(2):
        held.begin()
        held.end()
        expect_objects(1000)
        expect_objects(-1000)
    assert gc.get_threshold() == (largest, 10, 10)


def test_what_was_off_stays_off() -> None:
    held = HeldOff()
    gc.set_threshold(0, 10, 10)
    held.begin()
    held.end()
    assert gc.get_threshold() == (0, 10, 10)


def test_who_turns_it_off_or_on_meanwhile_is_believed() -> None:
    held = HeldOff()
    held.begin()
    assert gc.isenabled()
    gc.disable()
    held.end()
    assert not gc.isenabled()
    held.begin()
    gc.enable()
    held.end()
    assert gc.isenabled()


def test_in_a_forked_child_it_runs_as_ever(thresholds: tuple[int, int, int]) -> None:
    held = HeldOff()
    held.begin()
    child = os.fork()
    if not child:
        os._exit(gc.get_threshold() != thresholds)
    _, status = os.waitpid(child, 0)
    held.end()
    assert os.waitstatus_to_exitcode(status) == 0
