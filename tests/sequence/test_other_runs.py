"""Runs of a name that another run has."""

from __future__ import annotations

import fcntl
import shutil
from pathlib import Path

import numpy as np
import pytest

from ebbtide.errors import SequenceError
from tests.sequence.test_named import START, attempt, killed_at

pytestmark = pytest.mark.usefixtures("nothing_left")


def test_a_state_whose_elements_lie_in_another_order_is_another_run(tmp_path: Path) -> None:
    square = START.reshape(7, 100)
    killed_at(tmp_path, 77, state=square)
    with pytest.raises(SequenceError, match="its order of elements was"):
        attempt(tmp_path, state=np.asfortranarray(square))
    assert attempt(tmp_path, state=square).resumed_step > 50


def test_a_run_that_ends_just_as_it_is_begun_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its folder is gone by then: nobody could go on with what would be written there."""
    real = fcntl.flock

    def ended(fd: int, how: int) -> None:
        shutil.rmtree(tmp_path / "ebbtide-wave")
        real(fd, how)

    with monkeypatch.context() as patch:
        patch.setattr(fcntl, "flock", ended)
        with pytest.raises(SequenceError, match="has just ended in another process; start it again"):
            attempt(tmp_path)
    attempt(tmp_path)
    assert list(tmp_path.iterdir()) == []
