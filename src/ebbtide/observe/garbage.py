"""Keeps Python's garbage collector from looking where it would find nothing, or what it must not.

It looks at the youngest objects whenever there are some hundred more of them, and each so many times at all there are.

The runtime holds some objects for each saved tensor until the backward pass, so that in a step with 2,000 of them it
would look thirty times in vain, and now and then at the objects of all imported modules: half of what such a step cost.

A recorder makes objects for each op. If the collector ran for these, what lies in reference cycles would die sooner in
observed steps than in those that are planned from them.
"""

from __future__ import annotations

import gc
import os
import threading

_OUT_OF_REACH = 2_000_000_011
"""A threshold that is not reached, and that nobody else would think of. 0 would turn the collector off as well, but
that a user may set meanwhile."""

_lock = threading.RLock()  # an interrupt may come while it is held
_holding: list[HeldOff] = []
_found = 0
"""The threshold that the first of those that hold the collector off has found; it stays known when they have ended."""
_expected = _before = _with_expected = 0
"""How many objects are expected now; of those that were last, the threshold before and the one with all of them."""


def expect_objects(count: int) -> None:
    """From now on ``count`` more objects may be alive before the collector looks; negative to take that back."""
    global _found, _expected, _before, _with_expected
    with _lock:
        put_back_if_left()
        youngest, *older = gc.get_threshold()
        is_held_off = bool(_holding) and youngest == _OUT_OF_REACH
        former = _found if is_held_off else youngest
        raised = _raised(former, count)
        if count > 0:
            _before, _with_expected = former if not _expected else _before, raised
        _expected += count
        if is_held_off:
            _found = raised
        else:
            gc.set_threshold(raised, *older)


def _raised(youngest: int, count: int) -> int:
    # 0 turns it off, and whoever has set it meanwhile did not count these. One that is out of reach is so without them.
    return youngest + count if youngest > 0 and 0 < youngest + count < _OUT_OF_REACH else youngest


def put_back_if_left() -> None:
    """Undo what this module did to the threshold, if it is there for nobody: who reads the threshold within a step, and
    sets it again after that, sets what was meant for the step."""
    with _lock:
        if not _holding:
            _let_go()
        youngest, *older = gc.get_threshold()
        if not _expected and youngest == _with_expected:
            gc.set_threshold(_before, *older)


class HeldOff:
    """Holds automatic collections off from `begin` to `end`; of several, until the last one ends.

    Collections that somebody asks for are as ever, and so is a collector that was off before. Who turns it off or on,
    or sets thresholds, meanwhile has the last word.
    """

    def begin(self) -> None:
        """Hold them off."""
        global _found
        with _lock:
            put_back_if_left()
            youngest, *older = gc.get_threshold()
            if not _holding or youngest != _OUT_OF_REACH:
                _found = youngest
            _holding.append(self)
            if youngest > 0:
                gc.set_threshold(_OUT_OF_REACH, *older)

    def end(self) -> None:
        """Do so no more; it may not have begun, or have ended already."""
        with _lock:
            if self in _holding:
                _holding.remove(self)
                if not _holding:
                    _let_go()


def _let_go() -> None:
    youngest, *older = gc.get_threshold()
    if youngest == _OUT_OF_REACH:
        gc.set_threshold(_found, *older)


def _forked() -> None:
    """In a child nobody ends what was begun in the parent, whose other threads may have held the lock."""
    global _lock
    _lock = threading.RLock()
    if _holding:
        _holding.clear()
        _let_go()


os.register_at_fork(after_in_child=_forked)
