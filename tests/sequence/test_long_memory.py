"""What a chain holds does not grow with its length, where its states go to the disk several at a time, either."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ebbtide.sequence import run
from ebbtide.sequence.blocks import Blocks
from ebbtide.sequence.schedules import Multistage

pytestmark = pytest.mark.usefixtures("nothing_left")
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


def traced_bytes(work: Callable[[], None]) -> int:
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_states_go_several_at_a_time() -> None:
    """Else the other tests say nothing new."""
    assert Blocks(4096, STATES, for_disk=True).run_length == 3


def test_objects_of_python(tmp_path: Path) -> None:
    """Ten times as many states, and not two bytes more for each."""
    few, many = 500, 5_000
    traced_bytes(lambda: chain(200, 4096, 2, tmp_path))
    short, long = (traced_bytes(lambda n=2 * count: chain(n, 4096, 2, tmp_path)) for count in (few, many))  # type: ignore[misc]
    assert long < short + 2 * (many - few), f"{short} bytes for {few} states, {long} for {many}"
