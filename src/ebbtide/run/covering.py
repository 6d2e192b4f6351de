"""Whether the plan of one kind of step can run steps of another, which save a part of what it expects.

NOTE [What is held]
At each event, such a step holds what it would hold without a plan, less the values that the followed plan has away.

1. A value that the user keeps for longer than in steps of the plan's kind stays until it is let go of. If it is fetched
   before, it comes back as a second copy.
2. Recipes take what they take in the plan.
3. A value that the plan releases at an event still counts at that event, unless the step has no such value. Where the
   user keeps it, it is counted already.
"""

from __future__ import annotations

import bisect
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import NamedTuple

from ebbtide.run.footprint import Gap
from ebbtide.run.script import ExpectedSave, Script, Treatment


def can_run(script: Script, other: Script, first: int) -> bool:
    """Whether ``script`` can run steps of ``other`` from event ``first`` of both on: what they save is a part of what
    that expects, and it leaves them enough memory.

    Both agree before ``first``. Time O(events + values x log events), where next to nothing is left out.
    """
    found = _places(script, other, first)
    if found is None:
        return False
    held = _held(script, other, *found, range(first, len(other.expected)))
    return all(most <= script.limit_bytes for most in held)


class Room(NamedTuple):
    """Bytes that are left under a limit: at least, and as is likely."""

    sure_bytes: int
    likely_bytes: int


def room_to_begin(script: Script, other: Script) -> Room:
    """What is left where steps of ``other`` begin by ``script``, until they do what that does not expect: then they go
    over to their own plan. Time as for `can_run`."""
    pairs = zip(script.expected, other.expected, strict=False)
    common = sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], pairs))
    saves = list(zip(script.saves, other.saves, strict=False))[: script.numbers[common]]
    alike = sum(1 for _ in itertools.takewhile(lambda pair: look_alike(*pair), saves))
    if alike < len(saves):
        common = script.expected.index(alike)
    values = {one.value: two.value for one, two in saves[:alike]}
    theirs = _held(script, other, _places_until(common, script, other), values, range(common))
    own = dict(zip(values, values, strict=True))
    ours = _held(script, script, _places_until(common, script, script), own, range(common))
    sure = likely = script.limit_bytes
    for event, (most, own_most) in enumerate(zip(theirs, ours, strict=True)):
        # Values may leave between two events, which these numbers do not tell: likely in steps of both kinds alike.
        leaving = max(0, own_most - script.alive_at(event) - script.headroom[event])
        sure = min(sure, script.limit_bytes - most)
        likely = min(likely, script.limit_bytes - most + leaving)
    return Room(sure, likely)


def _places_until(common: int, script: Script, other: Script) -> list[int]:
    """By event of ``other``, that of ``script``: the same for the first ones, which both have in ``common``."""
    return [*range(common), *[len(script.expected)] * (len(other.expected) - common)]


def _held(
    script: Script, other: Script, places: Sequence[int], values: Mapping[int, int], events: range
) -> Iterator[int]:
    """What steps of ``other`` hold at these ``events``, and up to the next one each, where ``script`` runs them.

    Args:
        places, values: as for `_held_more`.
    """
    more, twice = _held_more(script, other, places, values), _counted_twice(script, other, places, values)
    ours, theirs = script.footprint, other.footprint
    for event in events:
        place = max(places[event], 0)
        held = theirs.plain[event] + ours.besides[place] - twice.get(event, 0)
        between = theirs.plain_between[event] + ours.besides_between[place]
        yield max(held, between) + more[event]


def _places(script: Script, other: Script, first: int) -> tuple[list[int], dict[int, int]] | None:
    """At which event of ``script`` a step of ``other`` is, by its own events, and what ``other`` calls the values of
    ``script``; None if the step saves what is no part of what ``script`` expects."""
    names = {number: number for number in range(other.numbers[first])}
    values, theirs = dict[int, int](), dict[int, int]()
    there, early, places = set(names), set[int](), list(range(first))
    for number in names:
        values.setdefault(script.saves[number].value, other.saves[number].value)
        theirs.setdefault(other.saves[number].value, script.saves[number].value)
    place = first - 1
    for number in other.expected[first:]:
        if number >= 0:
            saved = other.saves[number]
            found = _next_save(script, place + 1, saved, values)
            if found is None:
                return None
            place = found
            names[number] = script.expected[place]
            value = script.saves[names[number]].value
            # Two values where one is planned for hold more, and one where there are two is not let go of.
            if (values.setdefault(value, saved.value), theirs.setdefault(saved.value, value)) != (saved.value, value):
                return None
            there.add(names[number])
        else:
            again = _next_request(script, place, names[~number], there, early)
            if again is None:
                return None
            place = again
        places.append(place)
    return places, values


def _held_more(script: Script, other: Script, places: Sequence[int], values: Mapping[int, int]) -> list[int]:
    """By event of ``other``: bytes that its values take besides those without a plan, mostly less than none.

    Args:
        places: by event of ``other``, that of ``script``; ascending.
        values: what ``other`` calls the values of ``script`` that it has.
    """
    change = [0] * (len(places) + 1)

    def add(first: int, end: int, size_bytes: int) -> None:
        if first < end:
            change[first] += size_bytes
            change[end] -= size_bytes

    last = {other.saves[~number].value: event for event, number in enumerate(other.expected) if number < 0}
    for value, named in values.items():
        theirs = other.footprint.gaps.get(named, ())
        for gap in script.footprint.gaps.get(value, ()):
            if gap.stays:
                continue
            leaves, returns = (bisect.bisect_left(places, place) for place in (gap.leaves, gap.returns))
            for each in theirs:
                add(max(leaves, each.opens), min(returns, each.closes), -gap.size_bytes)
            add(returns, _gone_from(theirs, leaves, last.get(named, 0)), gap.size_bytes)
    return list(itertools.accumulate(change[:-1]))


def _counted_twice(script: Script, other: Script, places: Sequence[int], values: Mapping[int, int]) -> dict[int, int]:
    """By event of ``other``: bytes among those besides that its user keeps, or that it does not have."""
    moved = [(value, gap) for value, gaps in script.footprint.gaps.items() for gap in gaps if not gap.stays]
    fetched = {gap.returns for _, gap in moved}
    twice = dict[int, int]()
    for value, gap in moved:
        event = bisect.bisect_left(places, gap.leaves)
        # Where something is saved and nothing fetched, what lingers is all that is counted besides.
        is_alone = gap.lingers and script.expected[gap.leaves] >= 0 and gap.leaves not in fetched
        if is_alone and event < len(places) and places[event] == gap.leaves:
            theirs = other.footprint.gaps.get(values[value], ()) if value in values else ()
            if not any(each.opens <= event < each.closes for each in theirs):
                twice[event] = twice.get(event, 0) + gap.size_bytes
    return twice


def _gone_from(gaps: Sequence[Gap], leaves: int, last: int) -> int:
    """The first event from which on only autograd has a value that the plan lets go of.

    Args:
        gaps: the value's absences.
        leaves: the event at which the plan lets go of it.
        last: the event at which it is asked for the last time: the answer, if the user never lets go of it.
    """
    # At the event that closes a gap, the value is asked for after the plan has let go of it.
    if any(gap.opens <= leaves <= gap.closes for gap in gaps):
        return leaves
    return min((gap.opens for gap in gaps if gap.opens > leaves), default=last)


def _next_save(script: Script, event: int, save: ExpectedSave, values: Mapping[int, int]) -> int | None:
    """The save that a step goes on with, which compares values as far as they are held: ``values`` are those of the
    other script by those of this one."""

    def is_next(number: int) -> bool:
        ours = script.saves[number]
        is_known = ours.treatment != Treatment.KEEP and not ours.first
        return look_alike(ours, save) and not (is_known and values.get(ours.value, save.value) != save.value)

    return next_like(script, event, is_next)


def next_like(script: Script, event: int, is_next: Callable[[int], bool]) -> int | None:
    """The first event, from ``event`` on and before anything is asked for, at which a tensor is saved that ``is_next``
    says so of, by its number."""
    for place in range(event, len(script.expected)):
        number = script.expected[place]
        if number < 0:
            break
        if is_next(number):
            return place
    return None


def _next_request(script: Script, event: int, number: int, there: Collection[int], early: set[int]) -> int | None:
    """At which event, after ``event``, a saved tensor is asked for, or that itself if another one comes before: what is
    asked for ``early`` is passed by later, as is what is not ``there``. None if it is not asked for any more."""
    for place in range(event + 1, len(script.expected)):
        other = ~script.expected[place]
        if other == number:
            return place
        if other in early:
            early.remove(other)
        elif other in there:
            break
    if ~number not in script.expected[event + 1 :]:
        return None
    early.add(number)
    return event


def look_alike(one: ExpectedSave, two: ExpectedSave) -> bool:
    """Whether both are of one type and shape."""
    return one.dtype is two.dtype and one.shape == two.shape
