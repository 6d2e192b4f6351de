"""Chains for the benchmark of sequences: a 2-D wave, a smaller one, and a character LSTM."""

from __future__ import annotations

import abc
import pathlib
import sysconfig
from typing import Any

import numba
import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

Array = npt.NDArray[Any]
Pair = tuple[Array, Array]

RADIUS = 4
W0, W1, W2, W3, W4 = -205 / 72, 8 / 5, -1 / 5, 8 / 315, -1 / 560
"""Second derivative of eighth order, from the middle outwards."""
SUBSTEPS = 8
WIDTH, BATCH = 128, 16
"""Of the LSTM."""
TEXT_BYTES = 4 << 20


class Cell(abc.ABC):
    """A chain's operators.

    Attributes:
        start: state 0.
    """

    start: Pair

    @abc.abstractmethod
    def forward(self, state: Pair, step: int, /) -> Pair:
        """The next state; it may be written over ``state``."""

    @abc.abstractmethod
    def reverse(self, state: Pair, adjoint: Pair, step: int, /) -> Pair:
        """The adjoint before a step, maybe written over ``adjoint``; ``state`` is that before the step."""

    @abc.abstractmethod
    def turn(self, state: Pair, /) -> Pair:
        """The adjoint of the last state."""


@numba.njit(inline="always")
def _laplacian(u: Array, i: int, j: int) -> Any:
    return (
        2 * W0 * u[i, j]
        + W1 * (u[i - 1, j] + u[i + 1, j] + u[i, j - 1] + u[i, j + 1])
        + W2 * (u[i - 2, j] + u[i + 2, j] + u[i, j - 2] + u[i, j + 2])
        + W3 * (u[i - 3, j] + u[i + 3, j] + u[i, j - 3] + u[i, j + 3])
        + W4 * (u[i - 4, j] + u[i + 4, j] + u[i, j - 4] + u[i, j + 4])
    )


@numba.njit(nogil=True)
def _leapfrog(now: Array, before: Array, speed: Array) -> None:
    """Over ``before``, the field after ``now``."""
    rows, columns = now.shape
    for i in range(RADIUS, rows - RADIUS):
        for j in range(RADIUS, columns - RADIUS):
            before[i, j] = 2 * now[i, j] - before[i, j] + speed[i, j] * _laplacian(now, i, j)


@numba.njit(nogil=True)
def _leapfrog_adjoint(now: Array, of_next: Array, of_now: Array, scaled: Array, speed: Array, gradient: Array) -> None:
    """Adjoint of `_leapfrog`: over ``of_now`` that of ``now``, over ``of_next`` that of ``before``."""
    rows, columns = now.shape
    for i in range(rows):
        for j in range(columns):
            scaled[i, j] = speed[i, j] * of_next[i, j]
    for i in range(RADIUS, rows - RADIUS):
        for j in range(RADIUS, columns - RADIUS):
            gradient[i, j] += of_next[i, j] * _laplacian(now, i, j)
    for i in range(RADIUS, rows - RADIUS):
        for j in range(RADIUS, columns - RADIUS):
            of_now[i, j] += 2 * of_next[i, j] + _laplacian(scaled, i, j)
    for i in range(rows):
        for j in range(columns):
            of_next[i, j] = -of_next[i, j]


class Wave(Cell):
    """Leapfrog steps of a wave in a square of ``size`` points a side.

    A state is the field now and one step before; ``reverse`` looks at the first only.
    """

    def __init__(self, size: int) -> None:
        y, x = np.mgrid[0:size, 0:size] / size
        inside = np.zeros((size, size))
        inside[RADIUS:-RADIUS, RADIUS:-RADIUS] = 1
        bump = np.exp(-200 * ((x - 0.5) ** 2 + (y - 0.5) ** 2)) * inside
        self.start = (bump, bump.copy())
        self.gradient = np.zeros_like(bump)
        self._speed = (0.1 + 0.05 * x) * inside
        self._scaled = np.zeros_like(bump)

    def forward(self, state: Pair, step: int) -> Pair:
        """See `Cell`; in place."""
        now, before = state
        _leapfrog(now, before, self._speed)
        before[RADIUS, RADIUS] += 0.01 * ((step % 64) - 32)
        return before, now

    def reverse(self, state: Pair, adjoint: Pair, _step: int) -> Pair:
        """See `Cell`; over the adjoint."""
        of_next, of_now = adjoint
        _leapfrog_adjoint(state[0], of_next, of_now, self._scaled, self._speed, self.gradient)
        return of_now, of_next

    def turn(self, state: Pair) -> Pair:
        """See `Cell`."""
        return state[0].copy(), np.zeros_like(state[0])


class HeavyWave(Wave):
    """A `Wave` of which a step is `SUBSTEPS` time steps: more to compute for each byte of a state."""

    def forward(self, state: Pair, step: int) -> Pair:
        """See `Cell`; in place."""
        for number in range(SUBSTEPS):
            state = super().forward(state, SUBSTEPS * step + number)
        return state

    def reverse(self, state: Pair, adjoint: Pair, step: int) -> Pair:
        """See `Cell`; over the adjoint. Looks at both fields."""
        states = [state]
        for number in range(SUBSTEPS - 1):
            now, before = states[-1]
            states.append(super().forward((now.copy(), before.copy()), SUBSTEPS * step + number))
        for inner in reversed(states):
            adjoint = super().reverse(inner, adjoint, step)
        return adjoint


class CharLSTM(nn.Module):
    """Predicts the next byte of the standard library's source; losses of all steps add up."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(256, WIDTH)
        self.inner = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 256)
        self.start = (np.zeros((BATCH, WIDTH), np.float32), np.zeros((BATCH, WIDTH), np.float32))
        paths = sorted(pathlib.Path(sysconfig.get_path("stdlib")).glob("*.py"))
        text = b"".join(path.read_bytes() for path in paths)[:TEXT_BYTES]
        count = len(text) // BATCH
        columns = np.frombuffer(text[: count * BATCH], np.uint8).reshape(BATCH, count).T
        self._text = torch.from_numpy(columns.astype(np.int64))
        self._count = count - 1

    def sample(self, step: int) -> tuple[Tensor, Tensor]:
        """Bytes, and those that come next."""
        place = step % self._count
        return self._text[place], self._text[place + 1]

    def cell(self, state: tuple[Tensor, Tensor, Tensor], step: int) -> tuple[tuple[Tensor, Tensor, Tensor], None]:
        """A step for `ebbtide.scan`, the loss in the state."""
        h, c, loss = state
        given, wanted = self.sample(step)
        h, c = self.inner(self.embed(given), (h, c))
        return (h, c, loss + nn.functional.cross_entropy(self.head(h), wanted)), None


class LSTMOperators(Cell):
    """The steps of a `CharLSTM` and their adjoints, written by hand, as adjoint codes have them.

    Attributes:
        module: the weights; the adjoints add up in their ``grad``.
    """

    def __init__(self) -> None:
        self.module = CharLSTM()
        self.start = self.module.start
        inner = self.module.inner
        self._given, self._held = inner.weight_ih.detach(), inner.weight_hh.detach()
        self._bias = (inner.bias_ih + inner.bias_hh).detach()
        self._embedded = self.module.embed.weight.detach()
        self._head, self._head_bias = self.module.head.weight.detach(), self.module.head.bias.detach()
        self._rows = torch.arange(BATCH)
        for parameter in self.module.parameters():
            parameter.grad = torch.zeros_like(parameter)

    def forward(self, state: Pair, step: int, /) -> Pair:
        """See `Cell`."""
        h, c = _tensors(state)
        i, f, g, o = self._gates(self._embedded[self.module.sample(step)[0]], h)
        c = (f * c).addcmul_(i, g)
        return (o * c.tanh()).numpy(), c.numpy()

    def reverse(self, state: Pair, adjoint: Pair, step: int, /) -> Pair:
        """See `Cell`."""
        (h, c), (of_h, of_c), (given, wanted) = _tensors(state), _tensors(adjoint), self.module.sample(step)
        x = self._embedded[given]
        i, f, g, o = self._gates(x, h)
        squashed = (f * c).addcmul_(i, g).tanh_()
        of_h = self._through_head(o * squashed, wanted, of_h)
        of_c = of_c + of_h * o * (1 - squashed * squashed)
        of_gates = torch.cat(
            (
                of_c * g * i * (1 - i),
                of_c * c * f * (1 - f),
                of_c * i * (1 - g * g),
                of_h * squashed * o * (1 - o),
            ),
            1,
        )
        inner, bias = self.module.inner, of_gates.sum(0)
        _grad(inner.weight_ih).addmm_(of_gates.T, x)
        _grad(inner.weight_hh).addmm_(of_gates.T, h)
        _grad(inner.bias_ih).add_(bias)
        _grad(inner.bias_hh).add_(bias)
        _grad(self.module.embed.weight).index_add_(0, given, of_gates @ self._given)
        return (of_gates @ self._held).numpy(), (of_c * f).numpy()

    def turn(self, state: Pair, /) -> Pair:
        """See `Cell`."""
        return np.zeros_like(state[0]), np.zeros_like(state[1])

    def _gates(self, x: Tensor, h: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        i, f, g, o = torch.addmm(self._bias, x, self._given.T).addmm_(h, self._held.T).chunk(4, 1)
        return i.sigmoid_(), f.sigmoid_(), g.tanh_(), o.sigmoid_()

    def _through_head(self, h: Tensor, wanted: Tensor, of_h: Tensor) -> Tensor:
        """The adjoint of the next ``h``, that of the loss included."""
        of_logits = torch.addmm(self._head_bias, h, self._head.T).softmax(1)
        of_logits[self._rows, wanted] -= 1
        of_logits /= BATCH
        _grad(self.module.head.weight).addmm_(of_logits.T, h)
        _grad(self.module.head.bias).add_(of_logits.sum(0))
        return torch.addmm(of_h, of_logits, self._head)


def _grad(parameter: Tensor) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad


def _tensors(state: Pair) -> tuple[Tensor, Tensor]:
    return torch.from_numpy(state[0]), torch.from_numpy(state[1])


def make_cell(name: str) -> Cell:
    """The cell called ``name``: ``wave``, ``small-wave``, ``heavy-wave`` or ``lstm``."""
    if name == "lstm":
        return LSTMOperators()
    if name == "heavy-wave":
        return HeavyWave(128)
    return Wave(128 if name == "wave" else 48)
