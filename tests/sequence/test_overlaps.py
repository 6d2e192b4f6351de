"""Arrays of a state that share memory: copies of it share theirs so, too, or it is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from ebbtide.errors import SequenceError
from ebbtide.sequence import run
from ebbtide.sequence.layout import ArrayLayout
from ebbtide.sequence.overlaps import are_apart, hosts
from ebbtide.sequence.schedules import Multistage, Revolve

pytestmark = pytest.mark.usefixtures("nothing_left")
Array = npt.NDArray[Any]
State = tuple[Array, ...]
N = 30
START = np.random.default_rng(0).standard_normal((9, 8))

SHARING: dict[str, Callable[[Array], State]] = {
    "interior": lambda u: (u, u[1:-1, 1:-1]),
    "interior first": lambda u: (u[1:-1, 1:-1], u),
    "twice": lambda u: (u, u),
    "twice, with gaps": lambda u: (u[:, 1:-1], u[:, 1:-1]),
    "backwards": lambda u: (u, u[::-1, ::-2]),
    "transposed": lambda u: (u.T, u),
    "flat": lambda u: (u, u.reshape(-1), u[2]),
    "real part": lambda u: (u.view(complex), u.view(complex).real),
    "bytes": lambda u: (u, u.view(np.uint8)[:, ::8], np.ones(3)),
    "Fortran's": lambda u: (u.T.copy(order="F"),) * 2,
}
APART: dict[str, Callable[[Array], State]] = {
    "halves": lambda u: (u[::2], u[1::2]),
    "columns": lambda u: (u[:, :4], u[:, 4:], np.zeros(0)),
    "parts": lambda u: (u.view(complex).real, u.view(complex).imag),
}
REFUSED: dict[str, Callable[[Array], State]] = {
    "neighbours": lambda u: (u[:-1], u[1:]),
    "in gaps": lambda u: (u[:, 1:-1], u[2, 1:-1]),
    "upside down": lambda u: (u[::-1], u[0]),
}


def alter(state: State, step: int) -> State:
    """Each array in place, by what is in all."""
    for number, part in enumerate(state):
        part[...] = np.asarray(part * 0.9 + 0.01 * step + number - 0.1 * part.mean()).astype(part.dtype)
    return state


def reverse(state: State, adjoint: float, step: int) -> float:
    return 0.9 * adjoint + float(sum(abs(part.sum()) for part in state))


def turn(state: State) -> float:
    return float(abs(state[0].sum()))


def plain(forward: Callable[[State, int], State], state: State) -> float:
    """The adjoint by a loop that keeps copies of all arrays."""
    states = []
    for step in range(N):
        states.append(tuple(part.copy() for part in state))
        state = forward(state, step)
    adjoint = turn(state)
    for step in reversed(range(N)):
        adjoint = reverse(states[step], adjoint, step)
    return adjoint


@pytest.mark.parametrize("spilled", [False, True])
@pytest.mark.parametrize("kind", SHARING)
def test_altered_in_place(kind: str, spilled: bool, tmp_path: Path) -> None:
    """Later ones of a state saw what was done to the first in a plain loop, and not here."""
    options: dict[str, Any] = {"spill": tmp_path, "schedule": Multistage(N, 3, 4)} if spilled else {}
    made = SHARING[kind](START.copy())
    memory = 4 * ArrayLayout(made).size_bytes
    done = run(alter, reverse, N, made, turn=turn, memory=memory, check=True, **options)
    assert np.isclose(done.adjoint, plain(alter, SHARING[kind](START.copy())), rtol=1e-12)
    assert all(np.array_equal(part, same) for part, same in zip(made, SHARING[kind](START.copy()), strict=True))


@pytest.mark.parametrize("kind", APART)
def test_what_does_not_overlap_is_no_matter(kind: str) -> None:
    made = APART[kind](START.copy())
    assert ArrayLayout(made).first_orders == ((),) * len(made)
    done = run(alter_apart, reverse, N, made, turn=turn, memory=4 * ArrayLayout(made).size_bytes, check=True)
    assert np.isclose(done.adjoint, plain(alter_apart, APART[kind](START.copy())), rtol=1e-12)


def alter_apart(state: State, step: int) -> State:
    for part in state:
        np.multiply(part, 0.9, out=part)
    return state


@pytest.mark.parametrize("kind", REFUSED)
def test_what_copies_could_not_share_is_refused(kind: str) -> None:
    with pytest.raises(SequenceError, match=r"\[0\] and \[1\] of a state share memory"):
        run(alter, reverse, N, REFUSED[kind](START.copy()), turn=turn, memory="1MiB")


def test_states_that_come_to_share_memory() -> None:
    """From some step on, with an array that one state shares and the next one does not."""

    def forward(state: State, step: int) -> State:
        now, before = state
        if step == 7:
            return now, now
        before += 0.1 * now  # twice as much where both are one
        return (now, before) if step % 5 else (now.copy(), before)

    made = (START.copy(), START + 1)
    done = run(forward, reverse, N, made, turn=turn, memory=4 * 2 * START.nbytes, schedule=Revolve(N, 3))
    assert np.isclose(done.adjoint, plain(forward, (START.copy(), START + 1)), rtol=1e-12)


def test_many_arrays() -> None:
    own = [np.zeros(4) for _ in range(9)]
    assert are_apart(own)
    assert not are_apart([*own, own[3][1:]])
    assert not are_apart([*own, own[3]])
    assert not are_apart([*own, np.frombuffer(bytearray(32))])  # it may be anybody's
    assert hosts([*own, np.frombuffer(bytearray(32)), own[3][1:]]) == [None] * 10 + [3]


def test_shapes_that_operators_set() -> None:
    """The array that an operator was given is its own; the memory serves again, whatever became of its shape."""

    def shaped(u: Array, step: int) -> Array:
        reshape(u)
        return np.asarray(np.tanh(u * 1.01) + 0.1 * u[::-1]).reshape(72)

    def shaped_back(u: Array, adjoint: Array, step: int) -> Array:
        reshape(u)
        return np.asarray(adjoint * np.cos(u.reshape(-1)))

    start, n = START.reshape(-1), N
    states = [start]
    for step in range(n):
        states.append(shaped(states[-1].copy(), step))
    expected = 2 * states[-1]
    for step in reversed(range(n)):
        expected = shaped_back(states[step].copy(), expected, step)
    for schedule in (Revolve(n, 3), Revolve(n, 29)):
        done = run(shaped, shaped_back, n, start, turn=lambda u: 2 * u, memory=30 * start.nbytes, schedule=schedule)
        assert done.adjoint.tobytes() == expected.tobytes()


def reshape(u: Array) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # of NumPy 2.5
        u.shape = (9, 8)


class TestFinal:
    """The last state that `run` returns, where its memory serves for something else."""

    def final(self, turn: Callable[[Array], Array], *, in_place: bool, n: int | Callable[[Array, int], bool]) -> Array:
        def back(u: Array, adjoint: Array, step: int) -> Array:
            return np.multiply(adjoint, np.cos(u), out=adjoint if in_place else None)

        outcome = run(lambda u, _: np.sin(u), back, n, START, turn=turn, memory="20KiB")
        final: Array = outcome.final
        return final

    @pytest.mark.parametrize("known", [True, False])
    def test_of_an_adjoint_in_the_memory_of_the_state(self, known: bool) -> None:
        def doubled(u: Array) -> Array:
            u *= 2
            return u.copy()

        n = N if known else lambda _, step: step < N
        expected = self.final(np.copy, in_place=False, n=n)
        for turn in (lambda u: u, lambda u: u[:]):
            assert np.array_equal(self.final(turn, in_place=True, n=n), expected)
        assert np.array_equal(self.final(doubled, in_place=False, n=n), expected)

    def test_of_two_arrays_that_steps_take_turns_in(self) -> None:
        places = np.empty((2, *START.shape))

        def forward(u: Array, step: int) -> Array:
            return np.sin(u, out=places[step % 2])

        done = run(forward, lambda _, adjoint, __: adjoint, N, START, turn=np.copy, memory="2KiB")
        assert np.array_equal(done.final, done.adjoint)
