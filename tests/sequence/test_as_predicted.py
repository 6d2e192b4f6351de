"""A schedule that `run` has chosen itself runs the steps, and moves the bytes, that were predicted for it."""

from __future__ import annotations

import itertools
import time
from pathlib import Path

import numpy as np
import pytest

from ebbtide.sequence import run
from ebbtide.sequence.schedules import DISK, Multistage
from tests.sequence.test_run import START, STATE_BYTES, Array, forward, plain, reverse, turn

pytestmark = pytest.mark.usefixtures("nothing_left")
N = 1500
STEP_SECONDS, LOOK_SECONDS = 3e-4, 1e-6
"""What a step takes by the clock of these tests, and what passes from one look at it to the next: a disk is quick."""


@pytest.mark.parametrize("states", [4, 5, 9, 14])
def test_forward_steps_and_bytes(states: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = 0
    looks = itertools.count()

    def counted(u: Array, step: int) -> Array:
        nonlocal calls
        calls += 1
        return forward(u, step)

    monkeypatch.setattr(time, "perf_counter", lambda: calls * STEP_SECONDS + next(looks) * LOOK_SECONDS)
    done = run(counted, reverse, N, START, turn=turn, memory=states * STATE_BYTES, spill=tmp_path, reverse_seconds=1e-4)
    monkeypatch.undo()
    assert done.adjoint.tobytes() == plain(N)[0].tobytes()
    assert done.choice is not None
    assert isinstance(done.choice.schedule, Multistage), done.choice
    assert done.choice.schedule.slots[DISK] > 0
    assert done.forward_steps == done.choice.forward_steps, done.choice
    assert done.recompute_factor == done.choice.recompute_factor
    assert done.slow_bytes == done.choice.slow_bytes[DISK], done.choice
    tried = calls - done.forward_steps - 1  # the last step runs once more at the turn
    assert 0 <= tried < 0.3 * N, "trying steps takes too many of them"
    assert np.isfinite(done.choice.seconds)
