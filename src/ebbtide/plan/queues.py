"""Which transfers a stall is due to: the one that compute waited for, and those right before it on the same link."""

from __future__ import annotations

import dataclasses

import numpy as np

from ebbtide.arrays import Floats, Ints, Mask
from ebbtide.plan.course import TransferRows


@dataclasses.dataclass(frozen=True, slots=True)
class Queue:
    """What one link carried, in order.

    Attributes:
        absence: of each transfer.
        start, end: of each transfer, in seconds from the beginning of the step.
        first: for each the transfer since which the link made no pause.
        place: per absence of the step its place in this queue; 0 if it has none.
    """

    absence: Ints
    start: Floats
    end: Floats
    first: Ints
    place: Ints

    @classmethod
    def of(cls, sent: TransferRows, chosen: Mask, absences: int) -> Queue:
        """The queue of the ``chosen`` of the transfers, in a step with so many ``absences``."""
        absence, queued = sent.absence[chosen], sent.queued[chosen]
        start, end = sent.started[chosen], sent.ended[chosen]
        goes_on = np.zeros(len(absence), dtype=np.bool_)
        goes_on[1:] = (end[:-1] >= start[1:]) & (start[1:] > queued[1:])
        places = np.arange(len(absence))
        place = np.zeros(absences, dtype=np.int64)
        place[absence] = places
        return cls(absence, start, end, np.maximum.accumulate(np.where(goes_on, 0, places)), place)

    def blame(self, waited: Ints) -> tuple[Floats, Ints]:
        """Which transfers those of the absences in ``waited`` had to wait for, themselves included.

        Returns:
            Per absence of the step 1 if its transfer is one of these, else 0; and per entry of ``waited`` the place of
            the first such transfer.
        """
        last = self.place[waited]
        change = np.zeros(len(self.absence) + 1)
        np.add.at(change, self.first[last], 1.0)
        np.subtract.at(change, last + 1, 1.0)
        blamed = np.zeros(len(self.place))
        blamed[self.absence] = np.cumsum(change)[:-1] > 0
        return blamed, self.first[last]
