"""Steps that leave out some of what a plan expects, or all: whether they hold more than that has room for."""

from __future__ import annotations

import collections
import warnings
import weakref
from typing import TYPE_CHECKING, Literal

from ebbtide.run.recurrence import Allowance, due_after
from ebbtide.units import format_bytes

if TYPE_CHECKING:
    from ebbtide.run.held_bytes import Held
    from ebbtide.run.kinds import Kind
    from ebbtide.run.script import Script

_MOST_PASSES = 4
"""Kinds of steps to observe for having passed the limit; where there are more, what they hold is planned for."""
_MOST_SEEN = 1024
"""Keys of unknown kinds to remember, each with the number of the latest step that was of it."""
Remedy = Literal["none", "observe", "plan"]


class Parts:
    """When to count steps which leave out some of what is planned for, and what to do once one has passed the limit.

    What a step leaves out is known at its end only, too late to count it. So the one is counted that is due to leave
    out as much as the latest: see NOTE [When the next one is due] in `ebbtide.run.recurrence`. The one before that is
    the last that left out the same or, if none did, the last that left out any.

    Attributes:
        due: number of the step to count as others left out some; -1 before the first.
        due_again: number of the step to count as others of a kind held more than the one that was counted; -1 before
            the first.
    """

    def __init__(self) -> None:
        self._fit: weakref.WeakKeyDictionary[Kind, tuple[Script, dict[int, Held | None]]] = weakref.WeakKeyDictionary()
        self._seen: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._more: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._passes: collections.Counter[int] = collections.Counter()
        self._has_warned = False
        self._last = self.due = self.due_again = -1
        self._allowance = Allowance()  # those that never come again tell nothing of later ones

    def is_due(self, number: int) -> bool:
        """Whether step ``number`` is one to count."""
        return number in (self.due, self.due_again)

    def claim_count(self, number: int) -> bool:
        """Claim a count, if one is left, for step ``number``, which begins now. Returns whether to count it."""
        return self.is_due(number) and self._allowance.claim(number)

    def met(self, kind: Kind, key: int, number: int, peak_bytes: int | None, held: Held | None = None) -> Remedy:
        """Step ``number`` followed the script of ``kind``, and what it left is of an unknown kind with this key.

        Args:
            peak_bytes: what it held at most, if it was counted.
            held: what it held as far as the arena tells. Once one like it was within the limit, and later ones have
                held more than the next one, others are counted.

        Returns:
            What is to be done about it, if it passed the limit.
        """
        assert kind.script is not None
        assert kind.plan is not None
        script, fit = self._fit.get(kind, (None, {}))
        if script is not kind.script:  # it was planned for anew
            fit = {}
            self._fit[kind] = kind.script, fit
        last = self._seen.get(key, self._last)
        if peak_bytes is not None and peak_bytes <= kind.plan.limit_bytes:
            fit[key] = None
        elif peak_bytes is not None:
            fit.pop(key, None)  # they hold more by now
            last = _noted(self._more, key, number, last)
        elif held is not None and key in fit:
            other = fit[key] = fit[key] or held
            if kind.usage.exceeds(kind.plan, held, other):
                self.due_again = due_after(number, _noted(self._more, key, number, last))
        if key not in fit:
            self.due = due_after(number, last)
        self._last = number
        _noted(self._seen, key, number, last)
        if peak_bytes is None or key in fit:
            return "none"
        self._passes[key] += 1
        return "observe" if self._passes[key] == 1 and len(self._passes) <= _MOST_PASSES else "plan"

    def met_empty(self, kind: Kind, key: int, number: int, peak_bytes: int | None, held: Held | None) -> None:
        """Step ``number`` was begun as one of ``kind``, and did nothing of what its plan is about. If it was counted,
        and has passed the limit, no plan helps: say so, once. The arguments are those of `met`."""
        if self._has_warned or self.met(kind, key, number, peak_bytes, held) == "none" or peak_bytes is None:
            return
        assert kind.plan is not None
        self._has_warned = True
        warnings.warn(
            f"a step of which no saved tensor came to this budget held {format_bytes(peak_bytes)}, above its limit of "
            f"{format_bytes(kind.plan.limit_bytes)}, as such ones may do again: nothing of it can be moved or computed "
            "again. Evaluate smaller batches, and keep saved tensors in no hooks besides the budget's",
            stacklevel=2,
        )


def _noted(numbers: collections.OrderedDict[int, int], key: int, number: int, else_last: int) -> int:
    """Note the latest number of a key. Returns the one before, or ``else_last`` if it is the first."""
    last = numbers.get(key, else_last)
    numbers[key] = number
    numbers.move_to_end(key)
    if len(numbers) > _MOST_SEEN:
        numbers.popitem(last=False)
    return last
