"""What a chain holds does not grow with its length, where its states go to the disk several at a time, either."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from ebbtide.sequence import run
from ebbtide.sequence.blocks import Blocks
from ebbtide.sequence.schedules import Multistage

pytestmark = pytest.mark.usefixtures("nothing_left")
Array = npt.NDArray[np.float64]
STATES = 9
"""Slots: a run of states is as long as a third of them."""


def chain(n: int, state_bytes: int, interval: int, spill: Path) -> None:
    """Steps that take next to nothing."""
    start = np.zeros(state_bytes // 8)
    done = run(
        lambda u, step: u + 1,
        lambda u, adjoint, step: adjoint,
        n,
        start,
        turn=lambda u: u,
        memory=(STATES + 1) * state_bytes,
        spill=spill,
        schedule=Multistage(n, STATES, interval),
        progress=False,
    )
    assert done.slow_bytes > n // interval // 2 * state_bytes, "hardly anything went to the disk"


def traced_bytes(work: Callable[[], object]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize("states", [2, 4])
def test_large_states_that_are_held(states: int) -> None:
    """Besides slots: the working state and the next one; and the last one, once it is there."""
    start, most = np.ones(1 << 18), {"forward": 0.0, "back": 0.0}
    held, turned = (states - 1) * start.nbytes, False  # blocks, which are not traced

    def forward(u: Array, step: int) -> Array:
        following = u * 0.5
        if step < 19:  # that is for the turn, with a copy
            note("back" if turned else "forward")
        return following

    def turn(u: Array) -> float:
        nonlocal turned
        turned = True
        return 0.0

    def reverse(u: Array, adjoint: float, step: int) -> float:
        note("back")
        return adjoint

    def note(sweep: str) -> None:
        live = (tracemalloc.get_traced_memory()[0] + held) / start.nbytes
        most[sweep] = max(most[sweep], live)

    traced_bytes(lambda: run(forward, reverse, 20, start, turn=turn, memory=states * start.nbytes))
    assert most["forward"] < states + 1.1
    assert most["back"] < states + 2.1


def test_states_go_several_at_a_time() -> None:
    """Else the other tests say nothing new."""
    assert Blocks(4096, STATES, for_disk=True).run_length == 3


def test_objects_of_python(tmp_path: Path) -> None:
    """Ten times as many states, and not two bytes more for each."""
    few, many = 500, 5_000
    traced_bytes(lambda: chain(200, 4096, 2, tmp_path))
    short, long = (traced_bytes(lambda n=2 * count: chain(n, 4096, 2, tmp_path)) for count in (few, many))  # type: ignore[misc]
    assert long < short + 2 * (many - few), f"{short} bytes for {few} states, {long} for {many}"
