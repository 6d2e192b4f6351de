"""The kinds of step that a loop is known to have, and which of them comes next."""

from __future__ import annotations

import collections

from ebbtide.observe.ledger import Ledger
from ebbtide.run.beginning import kind_to_begin_with
from ebbtide.run.footprint import growth_bytes_of
from ebbtide.run.forks import KnownScript, KnownScripts
from ebbtide.run.kinds import Kind
from ebbtide.run.script import Script

MOST_KINDS = 256
"""Kinds of steps to know at once: each takes some megabytes. The one that came longest ago is forgotten."""
GUESSES = 16
"""Of how many of the latest steps it is remembered whether they were of the kind that was likely."""
SURPRISES = 4
"""Where so many of the latest `GUESSES` steps were of other kinds than was likely, kinds come in no order."""


class KnownKinds(dict[int, Kind]):
    """Kinds of step by their keys.

    Attributes:
        current: the kind of the latest step; None before the first was observed.
        latest_ledger: who was alive in the latest step that was observed; None before the first.
    """

    def __init__(self) -> None:
        super().__init__()
        self.current: Kind | None = None
        self.latest_ledger: Ledger | None = None
        self._library = KnownScripts([])
        self._due: dict[int, Kind] = {}
        self._guesses: collections.deque[tuple[Kind, bool]] = collections.deque(maxlen=GUESSES)
        self._beginning: tuple[tuple[int, Kind, KnownScripts], Kind] | None = None

    @property
    def library(self) -> KnownScripts:
        """The scripts of all of them."""
        known = [
            KnownScript(script, kind.state != "verify", kind.keeps_graphs)
            for kind in self.values()
            if (script := kind.script) is not None
        ]
        self._library = self._library.renewed(known)
        return self._library

    @property
    def growth_bytes(self) -> int:
        """What steps of any kind take at most from one hook to the next; 0 before the first one."""
        planned = (kind.script.footprint.growth_bytes for kind in self.values() if kind.script is not None)
        latest = growth_bytes_of(self.current.step) if self.current is not None else 0
        return max(latest, max(planned, default=0))

    @property
    def resting_bytes(self) -> int:
        """What is likely to be at rest in the next step: the most that was in any or, if that is more, what was in the
        latest observed one with what that has made and lives still, such as gradients to add to. 0 before the first."""
        latest = self.latest_ledger
        left_bytes = latest.resting_bytes + latest.made_here_bytes if latest is not None else 0
        return max((left_bytes, *(kind.step.resting_bytes for kind in self.values())))

    def running(self, script: Script) -> Kind | None:
        """The kind whose steps run by ``script``; None if it was planned for anew, or is not known any more."""
        return next((kind for kind in self.values() if kind.script is script), None)

    def expected_at(self, number: int) -> Kind | None:
        """The kind by whose plan to run step ``number``: the one that it is likely to be of or, where steps often are
        of others, one whose steps hold all that those hold. See NOTE [Leaving out] in `ebbtide.run.forks`."""
        likely, surprises = self._likely_at(number), sum(not was_likely for _, was_likely in self._guesses)
        if likely is None or likely.script is None or not surprises:
            return likely
        known = number, likely, self.library
        if self._beginning is None or self._beginning[0] != known:
            latest, in_order = (kind for kind, _ in self._guesses), surprises < SURPRISES
            begun = kind_to_begin_with(likely, self.values(), latest, known[-1], in_order=in_order)
            self._beginning = known, begun
        return self._beginning[1]

    def _likely_at(self, number: int) -> Kind | None:
        """One that comes each so many steps, or what came after the last one before."""
        follower = self.current.comings.follower if self.current is not None else None
        return self._due.get(number, follower or self.current)

    def met(self, kind: Kind, number: int) -> None:
        """Step ``number``, the latest, was of this kind."""
        if self.current is not None:
            self._guesses.append((kind, kind is self._likely_at(number)))
            self.current.comings.followed_by(kind if kind is not self.current else None)
        self.current = kind
        self._due.pop(number, None)
        if kind.comings.came_at(number):
            self._due[kind.comings.due] = kind
        if len(self) > MOST_KINDS:
            self.forget(min(self.values(), key=lambda known: known.comings.latest))

    def forget(self, kind: Kind) -> None:
        """Know nothing of it any more."""
        del self[kind.key]
        self._due = {number: due for number, due in self._due.items() if due is not kind}
        for known in self.values():
            known.comings.no_longer_followed_by(kind)

    def forget_plans_above(self, limit_bytes: int) -> None:
        """Plan anew, once they are observed again, for the kinds whose plans are for more than this limit."""
        for known in self.values():
            if known.plan is not None and known.plan.limit_bytes > limit_bytes:
                known.forget_plan()

    def forget_all(self) -> None:
        """Know nothing any more."""
        self.clear()
        self._due.clear()
        self._guesses.clear()
        self._beginning = self.current = self.latest_ledger = None
