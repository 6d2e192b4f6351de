"""What states must have in common: structure, shapes and types."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ebbtide.errors import SequenceError
from ebbtide.sequence import run
from tests.sequence.test_run import START, STATE_BYTES, Array, reverse, turn

pytestmark = pytest.mark.usefixtures("nothing_left")


@pytest.mark.parametrize("step", [lambda u, step: u[:-1], lambda u, step: (u, u)])
def test_states_of_another_kind_are_refused_before_they_are_copied(step: Any, tmp_path: Path) -> None:
    """With a disk it is a trial that meets them first."""
    with pytest.raises(SequenceError, match="state 1 is not like state 0"):
        run(step, reverse, 30, START, turn=turn, memory=5 * STATE_BYTES, spill=tmp_path)


def test_keys_in_another_order() -> None:
    """A dict is like one with the same keys; what belongs to a key stays with it."""

    def swapped(state: dict[str, Any], step: int) -> dict[str, Any]:
        (u,) = state["u"]
        return {"v": state["v"] + 0.1 * u, "u": (np.sin(u) + 0.2 * step,)}

    def swapped_back(state: dict[str, Any], adjoint: Array, step: int) -> Array:
        return adjoint * np.cos(state["u"][0]) + state["v"]

    adjoint = [
        run(
            chained,
            swapped_back,
            30,
            {"u": (START,), "v": 2 * START},
            turn=lambda state: state["u"][0] + 3 * state["v"],
            memory=9 * STATE_BYTES,
            check=True,
        ).adjoint
        for chained in (swapped, lambda state, step: dict(sorted(swapped(state, step).items())))
    ]
    assert adjoint[0].tobytes() == adjoint[1].tobytes()
    with pytest.raises(SequenceError, match="state 1 is not like state 0"):
        run(
            lambda state, step: {"u": START, "w": START},
            swapped_back,
            9,
            {"u": START, "v": START},
            turn=turn,
            memory="1MiB",
        )
