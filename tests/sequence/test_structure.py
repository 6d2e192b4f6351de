"""What states must have in common: structure, shapes and types."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ebbtide
from ebbtide.errors import SequenceError
from ebbtide.sequence import Outcome, run
from ebbtide.sequence.schedules import Multistage
from tests.sequence.test_named import die, killed
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


def test_a_run_goes_on_with_keys_in_another_order(tmp_path: Path) -> None:
    """The order of keys is no part of what it is; operators see that of their own call."""
    seen: list[list[str]] = []
    lives = False

    def forward(state: dict[str, Any], step: int) -> dict[str, Any]:
        if step == 77 and not lives:
            die()
        seen.append(list(state))
        return {"b": np.sin(state["b"] + 0.01 * step), "a": [state["a"][0] + 0.1 * state["b"]]}

    def back(state: dict[str, Any], adjoint: Array, step: int) -> Array:
        return adjoint * np.cos(state["b"]) + state["a"][0]

    def attempt(state: dict[str, Any], name: str) -> Outcome:
        schedule = Multistage(120, 3, 7)
        options: dict[str, Any] = {"memory": 5 * 2 * STATE_BYTES, "spill": tmp_path, "name": name, "schedule": schedule}
        return run(forward, back, 120, state, turn=lambda u: u["b"] + u["a"][0], **options)

    killed(lambda: attempt({"b": START, "a": [2 * START]}, "one"))
    lives = True
    done, whole = (attempt({"a": [2 * START], "b": START}, name) for name in ("one", "two"))
    assert done.resumed_step > 0
    assert done.adjoint.tobytes() == whole.adjoint.tobytes()
    assert seen == [["a", "b"]] * len(seen)
    seen.clear()
    other = attempt({"b": START, "a": [2 * START]}, "three")
    assert other.adjoint.tobytes() == whole.adjoint.tobytes()
    assert [*seen, list(other.final)] == [["b", "a"]] * (len(seen) + 1)


@pytest.mark.parametrize(
    ("start", "later", "told"),
    [
        (lambda h: (h, h), lambda h: [h, h], "expected tuple, got list;"),
        (lambda h: {"h": h}, lambda h: collections.OrderedDict(h=h), "expected dict, got OrderedDict;"),
        (lambda h: {"h": [h, (h,)]}, lambda h: {"h": [h, [h]]}, "expected tuple at ['h'][1], got list;"),
    ],
)
def test_containers_of_another_type_are_named(start: Any, later: Any, told: str) -> None:
    with pytest.raises(SequenceError, match=f"state 1 is not like state 0: {re.escape(told)}"):
        ebbtide.scan(lambda h, x: (later(torch.zeros(2)), None), start(torch.zeros(2)), range(4))
