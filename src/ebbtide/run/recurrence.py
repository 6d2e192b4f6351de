"""What comes now and then is looked for again: when the next time is likely, and how often that may be in vain.

NOTE [When the next one is due]
It is due as long after the latest as that came after the one before or, if it is the first, after the loop began: where
such steps were those numbered 3 and 10, step 17 is.
"""

from __future__ import annotations


def due_after(latest: int, former: int) -> int:
    """The number that comes as long after ``latest`` as that came after ``former``."""
    return 2 * latest - former


class Recurrence:
    """Steps that come now and then, and when the next one is due. See NOTE [When the next one is due].

    Args:
        latest: the number that stands for the loop's beginning.

    Attributes:
        latest: number of the latest one; before the first, that of the loop's beginning.
        due: number of the next one, if these steps come regularly; -1 before the first.
    """

    def __init__(self, latest: int = -1) -> None:
        self.latest, self.due = latest, -1

    def note(self, number: int) -> None:
        """Note that the latest one was step ``number``."""
        self.latest, self.due = number, due_after(number, self.latest)


class Allowance:
    """How many steps may be counted that may tell nothing: some, and a share of all.

    Args:
        count: how many steps, whatever the number of all.
        share: the share of all steps that may be counted besides.
    """

    def __init__(self, count: int = 8, share: float = 0.01) -> None:
        self._count, self._share, self._claimed = count, share, 0

    def claim(self, number: int) -> bool:
        """Claim one of them for step ``number``. Returns whether one was left."""
        is_left = self._claimed <= self._count + self._share * number
        self._claimed += is_left
        return is_left
