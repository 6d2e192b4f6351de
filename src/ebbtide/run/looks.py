"""Which steps of a loop are observed: the first ones, and some after a step that did not run as planned."""

from __future__ import annotations

from ebbtide.run.recurrence import Recurrence

_FIRST_LOOKS = 2
"""Steps to observe first: time and workspace of each op are read in the second, with no page faults in them."""
_LOOKS_AFTER_LEAVING = 4
"""Steps to observe after one that left its plan, until an unknown kind has been seen. Each time that none was, it is
twice as many: the kind may come in turns with others."""
_MOST_LOOKS = 64
"""Steps to observe at most after one that left its plan."""
_VAIN_LOOKS = 8
"""Observed steps that may tell nothing new, besides a share of all steps."""
_VAIN_SHARE = 0.2
"""Share of all steps that may be observed in vain after steps that saved something else than was expected."""
_VAIN_SHARE_OPS = 0.05
"""Share of all steps that may be observed in vain after steps that saved what was expected but ran other ops: as a rule
they logged something, and later ones do not."""
CHANGED_LOOKS = 2
"""How many steps in a row have to run other ops than the planned one for it to be planned for anew."""
MOST_SKIPPED = 8
"""Looks at the steps that follow those without a backward pass, before one with a pass has come."""


class Looks:
    """Which steps to observe, by their numbers.

    Attributes:
        left: how many of the next steps are to be observed before anything else.
    """

    def __init__(self) -> None:
        self.left = _FIRST_LOOKS
        self._next, self._vain, self._skipped = _LOOKS_AFTER_LEAVING, 0, 0
        self._leaving = Recurrence()

    def are_due(self, number: int) -> bool:
        """Whether to observe step ``number``."""
        return self.left > 0 or number == self._leaving.due

    def begin_anew(self) -> None:
        """Steps are others now than those that were observed."""
        self.left = _FIRST_LOOKS

    def take_another(self) -> None:
        """Observe the next step, whatever it is."""
        self.left = max(1, self.left)

    def claim_one_for_skipped(self) -> bool:
        """Claim another look after a step without a backward pass: the first batches may be skipped ones. Returns
        whether one was left, which is so for some steps only."""
        self._skipped += 1
        if self._skipped > MOST_SKIPPED:
            return False
        self.take_another()
        return True

    def have_enough(self) -> None:
        """What was observed is planned for: observe no more for now."""
        self.left = 0

    def note_observed(self) -> None:
        """Note that a step was observed."""
        self.left = max(0, self.left - 1)

    def note_nothing_new(self) -> None:
        """Note that the observed step told nothing that was not known."""
        self._vain += 1

    def note_new_kind(self) -> None:
        """Note that the observed step was of an unknown kind, or that its kind has changed."""
        self._next = _LOOKS_AFTER_LEAVING

    def again(self, number: int, *, ops_only: bool) -> None:
        """Observe steps again after step ``number``, which has left its plan, or if ``ops_only`` just run other ops:
        the next ones, unless too many were observed in vain, and the one at which the next that leaves its plan is due.
        See NOTE [When the next one is due] in `ebbtide.run.recurrence`."""
        if not ops_only:
            self._leaving.note(number)
        looks, share = (CHANGED_LOOKS, _VAIN_SHARE_OPS) if ops_only else (self._next, _VAIN_SHARE)
        if self._vain + looks <= _VAIN_LOOKS + share * (number + 1):
            self.left = looks
            if not ops_only:
                self._next = min(2 * looks, _MOST_LOOKS)

    def at(self, number: int) -> None:
        """Observe step ``number``: a planned one that passed the limit is likely to come again then."""
        self._leaving.due = number
