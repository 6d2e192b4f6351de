"""The places of states on a tier, known in memory that does not grow with the number of states."""

from __future__ import annotations

import bisect

from ebbtide.sequence.disk import StatePlace


class Shelf:
    """Places by step. Of evenly spaced states in places one after another only the first is kept, and how many.

    A place with checksums or compressed parts is kept as it is, and so is one between those of a row.
    """

    def __init__(self) -> None:
        # Rows of states, ascending: first step, its place, steps from one to the next, how many. In a row places follow
        # each other without gaps.
        self._runs: list[tuple[int, StatePlace, int, int]] = []
        self._others: dict[int, StatePlace] = {}

    def put(self, step: int, place: StatePlace) -> None:
        """Note where a state is."""
        index = bisect.bisect(self._runs, step, key=lambda run: run[0])
        first, place_0, spacing, count = self._runs[index - 1] if index else (step, place, 0, 0)
        if place.tail or place.checksums or place.packed or step < first + (count - 1) * spacing:
            self._others[step] = place
            return
        if index:
            fits = count == 1 or step == first + count * spacing
            if fits and place.offset_bytes == place_0.offset_bytes + count * place.size_bytes:
                self._runs[index - 1] = (first, place_0, (step - first) // count, count + 1)
                return
        self._runs.insert(index, (step, place, 0, 1))

    def find(self, step: int) -> StatePlace | None:
        """The place of a state; None if there is none."""
        if step in self._others:
            return self._others[step]
        found = self._run_with(step)
        return None if found is None else _moved(self._runs[found[0]][1], found[1])

    def take(self, step: int) -> StatePlace | None:
        """The place of a state, which is not here any more; None if there is none."""
        if step in self._others:
            return self._others.pop(step)
        found = self._run_with(step)
        if found is None:
            return None
        index, number = found
        first, place, spacing, count = self._runs[index]
        before = [(first, place, spacing if number > 1 else 0, number)] if number else []
        left = count - number - 1
        after = [(step + spacing, _moved(place, number + 1), spacing if left > 1 else 0, left)] if left else []
        self._runs[index : index + 1] = before + after
        return _moved(place, number)

    def _run_with(self, step: int) -> tuple[int, int] | None:
        """The row that a step is in, and its place there."""
        index = bisect.bisect(self._runs, step, key=lambda run: run[0]) - 1
        if index < 0:
            return None
        first, _, spacing, count = self._runs[index]
        number, rest = divmod(step - first, spacing) if spacing else (step - first, 0)
        return None if rest or number >= count else (index, number)


def _moved(place: StatePlace, places: int) -> StatePlace:
    return StatePlace(place.offset_bytes + places * place.size_bytes, place.size_bytes, place.head_bytes)
