"""By which plan to begin a step where kinds come in no order, and which steps are but the beginnings of others."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator

from ebbtide.run.covering import Room
from ebbtide.run.forks import KnownScripts
from ebbtide.run.kinds import Kind


def kind_to_begin_with(
    likely: Kind, kinds: Iterable[Kind], latest: Iterable[Kind], library: KnownScripts, *, in_order: bool
) -> Kind:
    """The kind by whose plan to begin a step that is ``likely`` of one kind and may be of another.

    What is held may differ before anything else does, as where one kind adds up gradients in its first backward pass
    and another one in its second: so there has to be room for all that came of late. Where kinds come in no order, the
    largest is taken of those whose plans can run steps of the likely one: to go over to another plan is dear, to leave
    out some is not.

    Args:
        likely: a kind that is planned for.
        kinds: all that are known.
        latest: the kinds of the latest steps.
        in_order: whether most steps are of the kind that is likely.
    """
    assert likely.script is not None
    planned = [kind for kind in kinds if kind.script is not None and kind.state != "verify"]
    planned.sort(key=lambda kind: -len(kind.step.saved))
    scripts = {id(kind.script): kind.script for kind in (likely, *latest) if kind.script is not None}

    def rooms(kind: Kind) -> Iterator[Room]:
        assert kind.script is not None
        return (library.room_to_begin(kind.script, each) for each in scripts.values() if each is not kind.script)

    def surely(kinds: Iterable[Kind]) -> Iterator[Kind]:
        return (kind for kind in kinds if all(room.sure_bytes >= 0 for room in rooms(kind)))

    if in_order:
        return next(surely(dict.fromkeys((likely, *planned))), likely)
    covering = [kind for kind in planned if kind.script is not None and library.covers(kind.script, likely.script, 0)]
    candidates = list(dict.fromkeys((*covering, likely, *planned)))
    probably = (kind for kind in candidates if all(room.likely_bytes >= 0 for room in rooms(kind)))
    return next(itertools.chain(surely(candidates), probably, covering), likely)


def may_be_skipped(kind: Kind, kinds: Iterable[Kind]) -> bool:
    """Whether steps of ``kind`` may be skipped batches of a loop that trains, as none of ``kinds`` has a backward pass
    so far. A plan for them leaves no room for one: the first step that has a backward pass would pass the limit."""
    is_asked = any(saved.unpacked for saved in kind.step.saved)  # as by a pass in a thread of the user's
    return bool(kind.step.saved) and not is_asked and not any(other.step.has_backward_pass for other in kinds)


def whole_of(kind: Kind, kinds: Iterable[Kind], *, alike: bool) -> Kind | None:
    """The kind with a backward pass that came last; if ``alike``, of those whose steps save first what those of
    ``kind`` save, as far as types and shapes tell."""
    others = (other for other in kinds if other.step.has_backward_pass and (not alike or _begins(kind, other)))
    return max(others, key=lambda other: other.comings.latest, default=None)


def _begins(kind: Kind, whole: Kind) -> bool:
    pairs = itertools.zip_longest(kind.step.saved, whole.step.saved[: len(kind.step.saved)])
    return all(two is not None and (one.dtype, one.shape) == (two.dtype, two.shape) for one, two in pairs)
