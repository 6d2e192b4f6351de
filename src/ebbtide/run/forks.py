"""Steps of several kinds that begin alike: at the first difference the conductor goes over to another script.

NOTE [Going over]
Until then the step was run by a plan that is not its own, and what its own plan has away by now may be here.

1. A tensor that one plan keeps and another one moves, drops or reads for a recipe is given a holding by both, as far as
   their kinds are alike.
2. Values are numbered by kind: what is held gets the numbers of the new one. Where the former script expects two values
   and the new one a single value that is saved twice, the step goes over as the second save comes and shows the first
   value again: later two values would be held where the new plan knows one.
3. What the new plan has away is moved out and waited for, as is what it drops: what made it was not captured. What the
   former plan has dropped is made again at once, unless the new one drops it, too: its recipe would keep what it reads
   for longer than the new plan knows. To make it takes memory that no plan counts on, so all that nobody else keeps
   moves out first, and comes back when it is asked for.
4. So the bytes held are at most those of the new plan from then on.

NOTE [Kept graphs]
Steps with a backward pass more, as for the norm of one loss's gradient, may be the same as others until the first pass
begins, and if it saves nothing, until the second does. By then all that the plan for one pass has shown is here, as the
graph has it. But whether a pass keeps its graph is known from its beginning: that tells which kind it is, or, if none
that is known does that, that the plan is to be left.

NOTE [Leaving out]
To go over is dear, and what a step leaves out of another one, as layers that are dropped at random, needs no plan of
its own: of what the larger step holds it holds a part. So where all that is left of the script that agrees, or of an
unknown step as far as it has come, is part of the script that is followed, that one is gone on with, at the next save
that is like this one. If there is any way to leave out parts so that the rest agrees, this one does.

1. What is to be done at the saves and requests that do not come is done all the same, as far as there is anything.
2. Ops are counted again from the next event on that says at which one it is. What was captured meanwhile leads to other
   tensors than are saved, if to any, and is not used: see `Recipe.makes`.
3. Little is learnt from such a step: that it came, and what of the plan is as it should be, as a step that leaves out
   nothing may never come again. What has to be compared before it is computed again, and does not come, moves out.
4. What comes after the part that is left out may need memory that the larger kind makes room for only later, and what
   the user keeps for longer may be away in the larger kind. For a known kind it is worked out before, event by event,
   whether there is enough: see `ebbtide.run.covering`. An unknown one may pass the limit, which is found out by
   counting one now and then: see `ebbtide.run.parts`.
"""

from __future__ import annotations

import bisect
import collections
import contextlib
import dataclasses
import itertools
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence

import torch

from ebbtide.errors import RecipeError
from ebbtide.observe.ledger import has_storage, sizes, storage_wrapper_count, use_count
from ebbtide.run.covering import Room, can_run, look_alike, room_to_begin
from ebbtide.run.holdings import Holding
from ebbtide.run.script import ExpectedSave, Script, Treatment
from ebbtide.run.versions import ChangedError


@dataclasses.dataclass(frozen=True, slots=True)
class KnownScript:
    """A script that steps are known to follow.

    Attributes:
        script: the script.
        verified: whether all that it computes again has been compared with the truth.
        keeps_graphs: whether a backward pass of such steps keeps the graph that it goes through.
    """

    script: Script
    verified: bool
    keeps_graphs: bool


class KnownScripts:
    """The scripts that steps are known to follow. It never changes, so what follows from it is worked out once.

    Args:
        known: a script for each kind of step.

    Attributes:
        captures_all: whether any of them needs calls captured, with a mode that has to be on from the step's beginning.
    """

    def __init__(self, known: Sequence[KnownScript]) -> None:
        self.known = known
        self.captures_all = any(each.script.stays_on and each.script.remakes for each in known)
        self._also_held: dict[int, frozenset[int]] = {}
        self._covered: dict[tuple[int, int, int], bool] = {}
        self._rooms: dict[tuple[int, int], Room] = {}
        self._asked_again: dict[int, int] = {}
        self._repeats: dict[int, dict[int, list[tuple[KnownScript, int]]]] = {}

    def renewed(self, known: Sequence[KnownScript]) -> KnownScripts:
        """These scripts, if nothing else is ``known`` now; otherwise others."""
        same = len(known) == len(self.known) and all(
            one.script is two.script and (one.verified, one.keeps_graphs) == (two.verified, two.keeps_graphs)
            for one, two in zip(known, self.known, strict=True)
        )
        return self if same else KnownScripts(known)

    def others(self, script: Script) -> Iterator[KnownScript]:
        """All but ``script``."""
        return (other for other in self.known if other.script is not script)

    def has_like(self, script: Script) -> bool:
        """Whether another one begins like ``script``, or with a tensor of another size; or has something done, in
        whatever way it begins: a step that turns out to be of it is run by it from the first saved tensor on."""
        return any(
            bool(other.script.held) or alike(script, other.script) > 0 or _begin_alike(script, other.script)
            for other in self.others(script)
        )

    def agreeing(self, script: Script, event: int, number: int, tensor: torch.Tensor | None) -> KnownScript | None:
        """Another script that agrees with the events of ``script`` before ``event``, and in which ``tensor`` is saved
        next; or, without one, in which saved tensor ``number`` is asked for next. Of several, which the step may turn
        out to be, one that leaves the others enough memory until they differ, if there is one."""
        found = list(self._agreeing(script, event, number, tensor))
        roomy = (one for one in found if all(self._has_room(one, other) for other in found))
        return next(itertools.chain(roomy, found), None)

    def _has_room(self, one: KnownScript, other: KnownScript) -> bool:
        """Whether steps of the other one surely stay within the limit where they begin by ``one``."""
        return one is other or self.room_to_begin(one.script, other.script).sure_bytes >= 0

    def _agreeing(self, script: Script, event: int, number: int, tensor: torch.Tensor | None) -> Iterator[KnownScript]:
        """All such scripts."""
        expected = ((number if tensor is not None else ~number),)
        for other in self.others(script):
            theirs = other.script
            if (
                theirs.expected[event : event + 1] == expected
                and (tensor is None or is_like(tensor, theirs.saves[number]))
                and alike(script, theirs) >= script.numbers[event]
                and theirs.expected[:event] == script.expected[:event]
            ):
                yield other

    def keeps_graphs(self, script: Script) -> bool:
        """Whether a backward pass of such steps keeps its graph; of what is not known any more nobody can tell."""
        return all(known.keeps_graphs for known in self.known if known.script is script)

    def keeping(self, script: Script, event: int, number: int, *, keeps: bool) -> KnownScript | None:
        """Another script that agrees with the events of ``script`` before ``event``, and in which a backward pass then
        begins that asks for ``number`` and ``keeps`` its graph, or does not."""
        found = self._agreeing(script, event, number, None)
        return next((other for other in found if self._may_keep(other, event, keeps=keeps)), None)

    def _may_keep(self, other: KnownScript, event: int, *, keeps: bool) -> bool:
        """Whether a backward pass that begins at ``event`` may be one that ``keeps`` its graph, or does not."""
        keeps_graphs = other.keeps_graphs
        return keeps_graphs if keeps else not (keeps_graphs and self.asks_again(other.script, event))

    def asks_again(self, script: Script, event: int) -> bool:
        """Whether anything is asked for twice from ``event`` on: then the backward pass that begins there keeps its
        graph, unless nodes ask twice for what they have saved."""
        key = id(script)
        if key not in self._asked_again:
            latest, last = dict[int, int](), -1
            for place, number in enumerate(script.expected):
                last = max(last, latest.get(number, -1))
                latest[number] = place
            self._asked_again[key] = last
        return event <= self._asked_again[key]

    def repeats(self, script: Script) -> Mapping[int, Sequence[tuple[KnownScript, int]]]:
        """By number of a saved tensor: the scripts in which it shows an earlier value again, though it shows a new one
        in ``script``. With each comes the number of the tensor that showed that value first. Scripts are compared as
        far as they are alike."""
        key = id(script)
        if key not in self._repeats:
            found: dict[int, list[tuple[KnownScript, int]]] = {}
            for other in self.others(script):
                saves = other.script.saves[: alike(script, other.script)]
                shown: dict[int, int] = {}
                for number, save in enumerate(saves):
                    earlier = shown.setdefault(save.value, number)
                    if earlier < number and script.saves[number].first:
                        found.setdefault(number, []).append((other, earlier))
            self._repeats[key] = found
        return self._repeats[key]

    def larger(self, script: Script, event: int, tensor: torch.Tensor) -> KnownScript | None:
        """Like `agreeing`, but a script that expects a larger ``tensor`` next; of several, the one of the smallest."""
        number = script.numbers[event]
        found = [
            other
            for other in self.others(script)
            if other.script.expected[: event + 1] == (*script.expected[:event], number)
            and alike(script, other.script) >= number
            and is_smaller(tensor, other.script.saves[number])
        ]
        return min(found, key=lambda other: other.script.saves[number].shape.numel(), default=None)

    def covers(self, script: Script, other: Script, event: int) -> bool:
        """Whether steps of ``other`` can be run by ``script`` from ``event`` of both on: what they save is a part of
        what that expects, and it leaves them enough memory."""
        key = id(script), id(other), event
        if key not in self._covered:
            self._covered[key] = can_run(script, other, event)
        return self._covered[key]

    def room_to_begin(self, script: Script, other: Script) -> Room:
        """What is left where steps of ``other`` begin by ``script``, until they differ."""
        key = id(script), id(other)
        if key not in self._rooms:
            self._rooms[key] = room_to_begin(script, other)
        return self._rooms[key]

    def also_held(self, script: Script) -> frozenset[int]:
        """Numbers of saved tensors that ``script`` keeps and others, as far as they are alike, do something with."""
        key = id(script)  # of those that are known, or of the one that a step has begun with: they live as long
        if key not in self._also_held:
            found: set[int] = set()
            for other in self.others(script):
                held = other.script.held
                found.update(held[: bisect.bisect_left(held, alike(script, other.script))] if held else ())
            self._also_held[key] = frozenset(n for n in found if script.saves[n].treatment == Treatment.KEEP)
        return self._also_held[key]


def is_like(tensor: torch.Tensor, save: ExpectedSave) -> bool:
    """Whether ``tensor`` is of the type and the shape that is expected."""
    return tensor.dtype is save.dtype and sizes(tensor) == save.shape


def is_smaller(tensor: torch.Tensor, save: ExpectedSave) -> bool:
    """Whether ``tensor`` is at most as large as expected, of the same type and as many dimensions."""
    return (
        tensor.dtype is save.dtype
        and has_storage(tensor)
        and tensor.dim() == len(save.shape)
        and tensor.numel() <= save.shape.numel()
    )


def alike(one: Script, other: Script) -> int:
    """How many tensors both save first, one after the other and of the same types and shapes."""
    most = min(len(one.saves), len(other.saves))
    # A prefix is a hash of all that was saved before it: once they differ, they differ.
    same = bisect.bisect_left(range(most), True, key=lambda number: one.prefixes[number] != other.prefixes[number])
    if same < most or not most:
        return max(same - 1, 0)
    last, last_other = one.saves[most - 1], other.saves[most - 1]
    return most - (not look_alike(last, last_other))


def _begin_alike(one: Script, other: Script) -> bool:
    """Whether the first tensors that both save differ in size at most."""
    return all(
        a.dtype is b.dtype and len(a.shape) == len(b.shape)
        for a, b in zip(one.saves[:1], other.saves[:1], strict=False)
    )


def renumbered(script: Script, other: Script, count: int, held: Collection[int]) -> dict[int, int] | None:
    """The values of the first ``count`` saved tensors as ``other`` numbers them, by their numbers in ``script``; None
    where that shows two values that are ``held``, and the other one a single one twice.

    Where it is the other way around, what is held is what was saved first.
    """
    numbers: dict[int, int] = {}
    for one, two in zip(script.saves[:count], other.saves[:count], strict=True):
        numbers.setdefault(one.value, two.value)
    taken = [numbers[value] for value in held]
    return numbers if len(set(taken)) == len(taken) else None


def remade_alike(script: Script, other: Script, count: int) -> set[int]:
    """Values of the first ``count`` saved tensors that both drop as they are saved, and make again in the same way."""
    return {
        one.value
        for one, two in zip(script.saves[:count], other.saves[:count], strict=True)
        if one == two
        and one.treatment == Treatment.REMAKE
        and all(script.known[op] == other.known[op] for remake in one.remakes for op in remake.ops)
    }


def standing(script: Script, event: int) -> tuple[dict[int, str], set[int]]:
    """Where values are just before an event of ``script``.

    Returns:
        The tiers of those whose copies out have been queued, and which are away: those, and others that were dropped.
    """
    sent: dict[int, str] = {}
    away: set[int] = set()
    for number, actions in zip(script.expected[:event], script.actions[:event], strict=True):
        save = script.saves[number if number >= 0 else ~number]
        if number < 0:
            sent.pop(save.value, None)
            away.discard(save.value)
        elif save.first and save.treatment == Treatment.REMAKE:
            away.add(save.value)
        if actions is not None:
            away.update(actions.drops)
            away.update(actions.releases)
            sent.update(actions.outs)
            away.difference_update(actions.loads)
    return sent, away


def catch_up(
    script: Script,
    event: int,
    held: Mapping[int, Holding],
    dropped: Collection[int],
    send: Callable[[Holding, str], None],
) -> None:
    """Bring what is held to where ``script`` has it just before an event: rule 3.

    Args:
        held: holdings by value, as ``script`` numbers them.
        dropped: values that may have been dropped as ``script`` drops them.
        send: queues a copy out to the tier of a name; to any, if that is empty.
    """

    def let_go(leaving: Sequence[Holding]) -> None:
        for holding in leaving:
            send(holding, "")
        for holding in leaving:
            holding.release()

    sent, away = standing(script, event)
    for value, tier in sent.items():
        if value in held:
            send(held[value], tier)
    let_go([held[value] for value in away if value in held])
    others = [holding for value, holding in held.items() if value not in dropped]
    missing = [holding for holding in others if holding.recipe is not None]
    for holding in others:
        holding.recipes = ()
    if missing:
        let_go(_ours_alone(held.values()))
    for holding in missing:
        with contextlib.suppress(ChangedError, RecipeError):  # raised again if it is asked for
            holding.arrive()
        let_go(_ours_alone(held.values()))  # with what its recipe has read


def _ours_alone(held: Collection[Holding]) -> list[Holding]:
    """The holdings whose storage nobody else keeps: what the user has, too, would come back as a second copy."""
    ours = collections.Counter(holding.identity for holding in held if holding.tensor is not None)
    one = storage_wrapper_count()
    return [each for each in held if each.tensor is None or use_count(each.identity) < one + ours[each.identity]]
