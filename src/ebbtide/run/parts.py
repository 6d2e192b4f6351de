"""Steps of unknown kinds that leave out some of what a plan expects: whether they hold more than that has room for."""

from __future__ import annotations

import collections
import weakref
from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from ebbtide.run.held_bytes import Held
    from ebbtide.run.kinds import Kind
    from ebbtide.run.script import Script

_COUNTS, _SHARE = 8, 0.01
"""So many steps, and this share of all, may be counted: those that never come again tell nothing of later ones."""
_MOST_PASSES = 4
"""Kinds of steps to observe for having passed the limit; where there are more, what they hold is planned for."""
_MOST_SEEN = 1024
"""Keys to remember."""
Remedy = Literal["none", "observe", "plan"]


class Parts:
    """When to count steps which leave out some of what is planned for, and what to do once one has passed the limit.

    What a step leaves out is known at its end, and to count it begins with it. So the step is counted that comes as
    long after such a step as that came after the last one of its kind or, if it is the first, of any or, if it is the
    first of all, after the loop began.

    Attributes:
        due: the number of that step.
        due_again: the number of the one that comes as long after one that held more than others of its kind as that
            came after the last such one.
    """

    def __init__(self) -> None:
        self._fit: weakref.WeakKeyDictionary[Kind, tuple[Script, dict[int, Held | None]]] = weakref.WeakKeyDictionary()
        self._seen: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._more: collections.OrderedDict[int, int] = collections.OrderedDict()
        self._passes: collections.Counter[int] = collections.Counter()
        self._last = self.due = self.due_again = -1
        self._counts = 0

    def claim_count(self, number: int) -> bool:
        """Claim a count, if one is left, for step ``number``, which begins now. Returns whether to count it."""
        due = number in (self.due, self.due_again) and self._counts <= _COUNTS + _SHARE * number
        self._counts += due
        return due

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
            if kind.exceeds(held, other):
                self.due_again = 2 * number - _noted(self._more, key, number, last)
        if key not in fit:
            self.due = 2 * number - last
        self._last = number
        _noted(self._seen, key, number, last)
        if peak_bytes is None or key in fit:
            return "none"
        self._passes[key] += 1
        return "observe" if self._passes[key] == 1 and len(self._passes) <= _MOST_PASSES else "plan"


def _noted(numbers: collections.OrderedDict[int, int], key: int, number: int, else_last: int) -> int:
    """Note the latest number of a key. Returns the one before, or ``else_last`` if it is the first."""
    last = numbers.get(key, else_last)
    numbers[key] = number
    numbers.move_to_end(key)
    if len(numbers) > _MOST_SEEN:
        numbers.popitem(last=False)
    return last
