"""How closely the steps of one kind are looked at, once its plan is trusted."""

from __future__ import annotations

from typing import TYPE_CHECKING

from ebbtide.run.held_bytes import Recounts

if TYPE_CHECKING:
    from ebbtide.run.forks import KnownScripts
    from ebbtide.run.kinds import Kind

COUNTS = 4
"""How many steps are counted at most of a kind in which nothing binds, until one was of it from beginning to end."""
CLOSE_LOOKS = 16
"""Steps of a kind in which nothing binds that are watched as if something did: some may save other tensors, of which
the first one tells nothing."""
UNWEIGHED = 61
"""One of so many steps is counted of which nobody knows what they hold: a prime number, as steps of several sorts
may come in turns."""


class Scrutiny:
    """Which steps of a kind are counted, and which are watched from beginning to end though nothing binds.

    Attributes:
        recounts: when to count some of them once more.
        was_weighed: whether it was known of the last one what it held.
        was_comparable: whether the last one could be compared with the one that was counted: not a smaller one.
    """

    def __init__(self) -> None:
        self.recounts = Recounts()
        self.was_weighed = self.was_comparable = True
        self._begun = self._idle = self._counted = 0
        self._close_looks = CLOSE_LOOKS
        self._is_weighed = self._is_due = False

    def begin_anew(self) -> None:
        """Begin to count anew, as there is another plan."""
        self._counted = 0

    def step_begins(self, kind: Kind, *, is_weighed: bool, on_cpu: bool) -> None:
        """Note that a step begins, and whether to look at it as nothing else tells what such steps hold.

        Args:
            kind: the kind by whose plan it begins.
            is_weighed: whether it will be known what it holds, unless another budget's step begins meanwhile. That
                tells something where nothing binds, or where it can be compared with a step as large that was counted.
            on_cpu: whether it runs on a CPU; on a device, steps are counted to audit them, and for nothing else.
        """
        self._begun += 1
        self._is_weighed = is_weighed and self.was_weighed
        tells = self._is_weighed and self.was_comparable and not kind.varies
        tells = tells and (kind.usage.audited is not None or kind.state == "idle")
        self._is_due = on_cpu and not tells and self._begun % UNWEIGHED == 0

    def claim_close_look(self, kind: Kind, library: KnownScripts) -> bool:
        """Claim a close look, if one is left, at the step, in which nothing binds. Returns whether it is watched from
        beginning to end: it may turn out to be another one, and if nobody weighs it, that is all that tells."""
        assert kind.script is not None
        self._idle += 1
        if self._idle <= self._close_looks or self.recounts.are_due or self._is_due:
            return True
        if not self._is_weighed and self._idle % CLOSE_LOOKS == 0:
            return True
        return bool(kind.samples) or library.has_like(kind.script)

    def look_again(self) -> None:
        """Look at the next steps, as one that was hardly looked at may have been another one: each time at twice as
        many, as such steps may come seldom."""
        self._idle, self._close_looks = 0, 2 * self._close_looks

    def claim_count(self, kind: Kind) -> bool:
        """Claim a count, if one is left, for the step. Returns whether it is counted: where nothing binds, to know what
        steps of this kind hold, unless such steps turn out again and again to be of other kinds; later, if one may have
        held more, or nobody knows."""
        if self.recounts.claim_count(kind.comings.count) or self._is_due:
            return True
        if not self._is_weighed:
            return False
        self._counted += 1
        return kind.state == "idle" and kind.usage.audited is None and self._counted <= COUNTS

    def count_failed(self) -> None:
        """Count the next step, as one that was counted failed in its middle."""
        self._counted -= 1
        self.recounts.take_another()
