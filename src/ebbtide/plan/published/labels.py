"""States of the dynamic programs that choose what of a chain to offload, and how they change from stage to stage."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.compiled import compiled


@dataclasses.dataclass(frozen=True, slots=True)
class Labels:
    """Ways to come to one node of the program, as columns.

    The papers round states to slots. Here a state holds exact bytes, and of those that fall into one cell of the grid
    of slots the cheapest stays: what crosses a link during one short stage would round to nothing.

    Attributes:
        kept: bytes of earlier stages that stay.
        out: bytes that are queued to go out and still there.
        back: the same for the backward pass, read backwards in time: bytes that are back early.
        seconds: cost so far.
        node, row: node and row of the state before; -1 for the start.
        offloaded: whether the input of the stage before goes out.
    """

    kept: Floats
    out: Floats
    back: Floats
    seconds: Floats
    node: Ints
    row: Ints
    offloaded: Mask

    @classmethod
    def start(cls) -> Labels:
        """The state before the first stage."""
        none, zero = np.array([-1]), np.zeros(1)
        return cls(zero, zero, zero, zero, none, none, np.zeros(1, dtype=np.bool_))

    def moved(
        self, node: int, item_bytes: float, crossed_out: Floats, crossed_in: Floats, seconds: Floats, offload: bool
    ) -> Labels:
        """The states after a stage that read ``item_bytes``, kept or offloaded. ``node`` is where these states are.

        Args:
            node: node of these states.
            item_bytes: size of the stage's input.
            crossed_out, crossed_in: what can cross the links during the stage, forward and backward.
            seconds: cost with the stage; infinite where it is impossible.
            offload: whether the input goes out.
        """
        rows = np.flatnonzero(np.isfinite(seconds))
        out, back = self.out[rows], np.maximum(0.0, self.back[rows] - crossed_in[rows])
        kept = self.kept[rows]
        if offload:
            out, back = out + item_bytes, back + item_bytes
        else:
            kept = kept + item_bytes
        return Labels(
            kept,
            np.maximum(0.0, out - crossed_out[rows]),
            back,
            seconds[rows],
            np.full(len(rows), node),
            rows,
            np.full(len(rows), offload),
        )

    @classmethod
    def joined(cls, parts: Sequence[Labels]) -> Labels:
        """The states of all ``parts``."""
        columns = [field.name for field in dataclasses.fields(cls)]
        return cls(*(np.concatenate([getattr(part, name) for part in parts]) for name in columns))

    def thinned(self, cell_bytes: float) -> Labels:
        """The cheapest state of each cell of a grid."""
        cell = np.zeros(len(self.seconds), dtype=np.int64)
        for column in (self.back, self.out, self.kept):
            number = np.ceil(column / cell_bytes).astype(np.int64)
            cell = cell * (int(number.max(initial=0)) + 1) + number
        rows = compiled(cheapest_rows)(cell, self.seconds)
        rows = rows[np.argsort(cell[rows])]
        return Labels(*(getattr(self, field.name)[rows] for field in dataclasses.fields(self)))


def cheapest_rows(cell: Ints, seconds: Floats) -> Ints:
    """Of each cell the row of least ``seconds``, the first of equal ones. A hash table with linear probing."""
    size = 16
    while size < 2 * len(cell):
        size *= 2
    table, rows, count = np.full(size, -1, np.int64), np.empty(len(cell), np.int64), 0
    for row in range(len(cell)):
        place = ((cell[row] * 0x9E3779B97F4A7C1 & 0x7FFFFFFFFFFFFFFF) >> 20) & (size - 1)
        while table[place] >= 0 and cell[rows[table[place]]] != cell[row]:
            place = (place + 1) & (size - 1)
        if table[place] < 0:
            table[place] = count
            rows[count] = row
            count += 1
        elif seconds[row] < seconds[rows[table[place]]]:
            rows[table[place]] = row
    return rows[:count]


def trail(fronts: Mapping[int, Labels], node: int, row: int) -> list[tuple[int, int, bool]]:
    """How a state came about: per node passed its number, the row there, and whether its stage's input goes out."""
    steps: list[tuple[int, int, bool]] = []
    while True:
        labels = fronts[node]
        before = int(labels.node[row])
        if before < 0:
            return steps[::-1]
        offloaded, row = bool(labels.offloaded[row]), int(labels.row[row])
        node = before
        steps.append((node, row, offloaded))


def waiting(size_bytes: Floats, bytes_per_second: float) -> Floats:
    """Time in which ``size_bytes`` cross a link; infinite for any byte over a link that there is not (rate 0)."""
    if bytes_per_second > 0:
        seconds: Floats = size_bytes / bytes_per_second
        return seconds
    return np.where(size_bytes > 0, np.inf, 0.0)
