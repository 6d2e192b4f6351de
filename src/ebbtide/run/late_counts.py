"""When to count steps of kinds that no step is begun as: each may only turn out to be one of them."""

from __future__ import annotations

RUN = 16
"""How many steps in a row are counted until one of them turns out to be of such a kind."""
MOST_VAIN_RUNS = 4
"""How many runs of steps may be counted around those that are due, as that may be in vain."""
VAIN_SHARE = 0.01
"""Share of all steps that may be counted besides around those that are due."""


class LateCounts:
    """Runs of steps to count as one of them may go over to another plan, and pass its limit."""

    def __init__(self) -> None:
        self._left = 0  # steps of the run that are still to be counted
        self._first = 0  # number of the run's first step
        self._next = 0  # number of the step from which on `ask` begins another run
        self._around = 0  # steps that runs around due ones were to count

    def claim(self, number: int) -> bool:
        """Claim a count, if one is left, for step ``number``, which begins now. Returns whether to count it."""
        is_counted = self._left > 0 and number >= self._first
        if is_counted:
            self._left -= 1
        return is_counted

    def ask(self, number: int) -> None:
        """A step before step ``number`` went over to another plan, and may have passed the limit: count the next ones.
        It is asked for ever less often, as that may be in vain."""
        if number >= self._next:
            self._left, self._first, self._next = RUN, 0, 2 * number

    def ask_around(self, due: int, number: int) -> None:
        """Step ``due`` is likely to go over to another plan, and to pass the limit: count the steps around it, unless
        too many of the ``number`` steps so far were counted so."""
        if self._around < MOST_VAIN_RUNS * RUN + VAIN_SHARE * number:
            self._left, self._first = RUN, due - RUN // 2
            self._around += RUN
