"""How arrays lie in memory is part of a state: sums add elements up as they lie, and Fortran wants its own order."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ebbtide.sequence import run
from ebbtide.sequence.blocks import Block, Blocks
from ebbtide.sequence.layout import ArrayLayout
from ebbtide.sequence.schedules import Multistage, Revolve, Schedule

pytestmark = pytest.mark.usefixtures("nothing_left")
Array = npt.NDArray[np.float64]
Forward = Callable[[Array, int], Array]
Backward = Callable[[Array, Array, int], Array]
SIDE = 40
START = np.random.default_rng(0).standard_normal((SIDE, SIDE))


def wave(u: Array, step: int) -> Array:
    """Its sum depends on the order in which elements lie; the result lies as ``u`` does."""
    return np.asarray(np.tanh(u) * (1.1 + 0.01 * np.sin(u.sum() + step)))


def reverse(u: Array, adjoint: Array, step: int) -> Array:
    return np.asarray(adjoint * np.cos(u) + u.sum() * u.mean(axis=1)[:, None] * 1e-3)


def swept(forward: Forward, n: int, start: Array) -> list[Array]:
    """All states."""
    states = [start]
    for step in range(n):
        states.append(forward(states[-1], step))
    return states


def plain(forward: Forward, n: int, start: Array, back: Backward = reverse) -> Array:
    """The adjoint with all states kept."""
    states = swept(forward, n, start)
    adjoint = 2 * states[-1]
    for step in reversed(range(n)):
        adjoint = back(states[step], adjoint, step)
    return np.asarray(adjoint)


STARTS = {"C": START, "Fortran": np.asfortranarray(START), "sliced": np.repeat(START, 2, axis=1).T[::2]}
STEPS: dict[str, Forward] = {
    "as given": wave,
    "C": lambda u, step: np.ascontiguousarray(wave(u, step)),
    "Fortran": lambda u, step: np.asfortranarray(wave(u, step)),
    "turned": lambda u, step: wave(u, step).T,
}


@pytest.mark.parametrize("n", [1, 2, 50])
@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("start", STARTS)
@pytest.mark.parametrize("forward", STEPS)
def test_adjoints_are_those_of_a_plain_loop(forward: str, start: str, spilled: bool, n: int, tmp_path: Path) -> None:
    options: dict[str, Any] = {"spill": tmp_path, "schedule": Multistage(n, 3, 4)} if spilled else {}
    done = run(
        STEPS[forward],
        reverse,
        n,
        STARTS[start],
        turn=lambda u: 2 * u,
        memory=4 * START.nbytes,
        check=True,
        **options,
    )
    assert done.adjoint.tobytes() == plain(STEPS[forward], n, STARTS[start]).tobytes()


@pytest.mark.parametrize("axes", [(0,), (1,), (0, 1), None])
@pytest.mark.parametrize("spilled", [False, True])
def test_elements_that_lie_backwards(spilled: bool, axes: tuple[int, ...] | None, tmp_path: Path) -> None:
    """Also those of a single axis (None), as of ``u[::-1]``: what adds them up goes the other way."""
    start = START.ravel() if axes is None else START
    seen: dict[int, tuple[int, ...]] = {}

    def flipped(u: Array, step: int) -> Array:
        assert seen.setdefault(step, u.strides) == u.strides
        return np.flip(np.tanh(u) * (1.1 + 0.01 * np.sin(np.dot(u, u[0]).sum() + step)), axes)

    def back(u: Array, adjoint: Array, step: int) -> Array:
        assert seen[step] == u.strides
        return np.asarray(adjoint * np.cos(u) + np.dot(u, u[0]).sum() * 1e-3)

    n = 30
    final, adjoint = swept(flipped, n, start)[-1], plain(flipped, n, start, back)
    options: dict[str, Any] = {"spill": tmp_path, "schedule": Multistage(n, 3, 4)} if spilled else {}
    done = run(flipped, back, n, start, turn=lambda u: 2 * u, memory=4 * start.nbytes, check=True, **options)
    assert min(final.strides) < 0
    assert done.final.tobytes() == final.tobytes()
    assert done.adjoint.tobytes() == adjoint.tobytes()


def test_what_is_wanted_of_fortran_is_there() -> None:
    """In several arrays, each its own order, and of several axes."""
    orders = (np.asfortranarray(START), START, np.zeros((2, 3, 4)).transpose(1, 2, 0))

    def forward(u: tuple[Array, ...], step: int) -> tuple[Array, ...]:
        assert [part.strides for part in u] == [part.strides for part in orders]
        for part in u:
            np.add(part, 1, out=part)  # altered in place, as by f2py's intent(inout)
        return u

    n, state_bytes = 40, sum(part.nbytes for part in orders)
    memory = 3 * state_bytes + 1000
    done = run(forward, lambda u, adjoint, step: adjoint, n, orders, turn=lambda u: u, memory=memory, check=True)
    assert np.allclose(done.final[0], START + n)


PADDED = np.dtype([("u", "f8"), ("count", "i2"), ("more", np.longdouble, (2,)), ("flag", "?")], align=True)


@pytest.mark.parametrize("dtype", [np.dtype(np.longdouble), np.dtype(np.clongdouble), PADDED])
def test_what_pads_elements_is_no_part_of_a_state(dtype: np.dtype[Any], tmp_path: Path) -> None:
    """It is whatever was in memory before, so that equal states may differ in it."""
    fill = itertools.count()

    def dirty(u: npt.NDArray[Any]) -> npt.NDArray[Any]:
        found = np.full(u.nbytes, next(fill) % 256, np.uint8).view(u.dtype)
        for name in u.dtype.names or ():
            found[name] = u[name]
        if not u.dtype.names:
            np.add(u, 0, out=found)
        return found

    start = np.zeros(40, dtype)
    done = run(
        lambda u, step: dirty(u), lambda u, a, step: a, 60, start, turn=lambda u: 1, memory=4 * start.nbytes, check=True
    )
    assert done.recompute_factor > 1
    first, second = (ArrayLayout(start).digest(dirty(start)) for _ in range(2))
    assert first == second


def test_parts_that_an_operator_keeps_stay_as_they_are() -> None:
    kept: dict[int, Array] = {}

    def forward(u: Array, step: int) -> Array:
        kept.setdefault(step, u[:2])
        return wave(u, step)

    start = np.asfortranarray(START)
    run(forward, reverse, 20, start, turn=lambda u: 2 * u, memory=3 * START.nbytes)
    state: Array = start
    for step in range(20):
        assert np.array_equal(kept[step], state[:2])
        state = wave(state, step)


@pytest.mark.parametrize("schedule", [Revolve(30, 3), Multistage(30, 3, 4)])
@pytest.mark.parametrize("start", STARTS)
def test_states_that_the_reverse_operator_keeps_or_returns(start: str, schedule: Schedule, tmp_path: Path) -> None:
    """Their memory does not serve again, and no other memory is left unused."""
    kept: dict[int, Array] = {}

    def keeping(u: Array, adjoint: Array, step: int) -> Array:
        if step % 5 == 0:
            kept[step] = u[:, :3]
        return u[:2] if step == 17 else adjoint

    given = STARTS[start]
    options: dict[str, Any] = {"memory": 4 * given.nbytes, "spill": tmp_path, "schedule": schedule}
    done = run(lambda u, step: u + 1, keeping, 30, given, turn=lambda u: u, **options)
    states = [given]
    for _ in range(29):
        states.append(states[-1] + 1)
    assert np.array_equal(done.adjoint, states[17][:2])
    assert all(np.array_equal(part, states[step][:, :3]) for step, part in kept.items())


@pytest.mark.parametrize("spilled", [False, True])
def test_a_window_that_moves_leaves_nothing_behind(spilled: bool, tmp_path: Path) -> None:
    """Arrays lie in another way in each state: what a block has of that is of the state in it alone."""
    ring, most = np.zeros(400), [0]

    def forward(state: tuple[Array, Array], step: int) -> tuple[Array, Array]:
        around, _ = state
        around[step] = np.sin(step) + around[step - 7]
        return around, around[step : step + 8]

    def looked(layout: ArrayLayout, block: Block, orders: Any) -> Any:
        found = views(layout, block, orders)
        most[0] = max(most[0], len(block.views))
        return found

    views = ArrayLayout._views
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ArrayLayout, "_views", looked)
        options: dict[str, Any] = {"spill": tmp_path, "schedule": Multistage(300, 3, 4)} if spilled else {}
        memory = 4 * ArrayLayout((ring, ring[:8])).size_bytes
        start = (ring, ring[:8])
        done = run(forward, lambda _, a, __: a, 300, start, turn=lambda _: 0.0, memory=memory, **options)
    assert most == [1]
    assert done.steps == 300


def test_blocks_that_nobody_has_serve_again(monkeypatch: pytest.MonkeyPatch) -> None:
    forgone = []
    forgo = Blocks.forgo

    def counted(blocks: Blocks) -> None:
        forgone.append(blocks)
        forgo(blocks)

    monkeypatch.setattr(Blocks, "forgo", counted)
    for given in STARTS.values():
        run(wave, reverse, 40, given, turn=lambda u: 2 * u, memory=4 * given.nbytes)
    assert len(forgone) == 0
    kept = []

    def keeping(u: Array, adjoint: Array, step: int) -> Array:
        kept.append(u)
        return reverse(u, adjoint, step)

    run(wave, keeping, 40, START, turn=lambda u: 2 * u, memory=4 * START.nbytes)
    assert len(forgone) > 0
    assert len(kept) == 40
