"""POFO: checkpointing and offloading of chains, together.

Beaumont, Eyraud-Dubois, Shilova: "Efficient combination of rematerialization and offloading for training DNNs",
NeurIPS 2021.

NOTE [The recurrence]
What the first forward sweep keeps may go out during it and come back during the backward sweep: of each stage either
all that it saves (case 1), or, for a run of stages ``i..j``, the input of ``i`` alone (case 2), from which Rotor's
optimal schedule recomputes the run. A state is the stage, whether its input is all that the stage before saved, and the
bytes of `Labels`; memory of what is queued is freed byte by byte, as in `beaumont`. With ``room`` the memory less what
is kept and the input:

1. ``F_all i`` and ``B_i`` wait for what they lack of ``room``, less what is queued.
2. ``F_ck i, F_empty i+1..j`` waits once, before it, for the most that any of its stages will lack if the queue drains
   meanwhile. Its backward takes ``(max(c, t) + c + t) / 2``: ``c`` is Rotor's optimum in ``room``, ``t`` the time to
   bring back what is there early; the truth lies between full overlap and none.

A public port takes the stage's input off ``room`` once more for Rotor. That counts it twice; without, a link of no
bandwidth gives Rotor's own optimum, as it should. Costs here are what is added to the plain time of the chain; states
that cost more than Rotor alone are left out.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ebbtide.arrays import Floats
from ebbtide.decisions import Plan
from ebbtide.machine import Machine
from ebbtide.plan.published.chain import Action, ChainPlan
from ebbtide.plan.published.cut import stages_of
from ebbtide.plan.published.labels import Labels, trail, waiting
from ebbtide.plan.published.mapping import fitted, slow_links
from ebbtide.plan.published.rotor import Table, rounded_up, table
from ebbtide.plan.published.switches import check_count
from ebbtide.step import Step

SLOTS = 50
"""Into how many equal parts memory is divided to tell states apart; Rotor's table has its own."""

MOST_STAGES = 48
"""Of a longer chain neighbours are joined: the time of the program grows with the square of their number."""

METHOD = "pofo"


@dataclasses.dataclass(frozen=True, slots=True)
class Links:
    """Bandwidths out and in; 0 for a link that there is not."""

    out_bytes_per_second: float
    in_bytes_per_second: float


def pofo_plan(rotor: Table, links: Links, memory_bytes: float, slots: int = SLOTS) -> ChainPlan | None:
    """The best schedule of the chain of ``rotor`` within ``memory_bytes``, its input included; None if there is none.

    Time O(stages^2 slots^3) at most; usually few states are met.
    """
    chain = rotor.chain
    alone = rotor.plan(memory_bytes)
    worst = math.inf if alone is None else alone.seconds - chain.plain_seconds
    search = _Search(rotor, links, memory_bytes, worst * (1 + 1e-9) + 1e-12)
    count = len(chain.stages)
    for node in range(2 * count):
        search.settle(node, memory_bytes / slots)
        search.keep_all(node)
        for last in range(node // 2, count):
            search.keep_input(node, last)
    found = search.best(memory_bytes / slots)
    # Of states that share a slot only the cheapest stays: the one by which Rotor alone goes may be gone.
    return alone if found is None or (alone is not None and alone.seconds < found.seconds) else found


class _Search:
    """The dynamic program. Node ``2 i + 1`` is stage ``i`` after case 1, node ``2 i`` after case 2 or at the start."""

    def __init__(self, rotor: Table, links: Links, memory_bytes: float, worst_seconds: float) -> None:
        self.rotor, self.links, self.memory_bytes, self.worst_seconds = rotor, links, memory_bytes, worst_seconds
        self.stages, self.read = rotor.chain.stages, rotor.chain.boundary_bytes
        nodes = 2 * len(self.stages) + 2
        self.coming: list[list[Labels]] = [[] for _ in range(nodes)]
        self.fronts: dict[int, Labels] = {}
        self.coming[0].append(Labels.start())

    def settle(self, node: int, cell_bytes: float) -> None:
        """Join the states that came to ``node``, and keep the cheapest in each cell of ``cell_bytes``."""
        parts = self.coming[node]
        if parts:
            self.fronts[node] = Labels.joined(parts).thinned(cell_bytes)
            parts.clear()

    def item_bytes(self, node: int) -> int:
        """Size of the input of the stage of ``node``."""
        stage = node // 2
        if node % 2:
            return self.stages[stage - 1].saved_bytes + self.stages[stage - 1].fixed_bytes
        return self.read[stage]

    def keep_all(self, node: int) -> None:
        """Case 1."""
        if node not in self.fronts:
            return
        place, labels = node // 2, self.fronts[node]
        stage = self.stages[place]
        saved = stage.saved_bytes + stage.fixed_bytes
        room = self.memory_bytes - labels.kept - self.item_bytes(node)
        need_out = saved + stage.forward_overhead_bytes
        need_in = saved + self.read[place] + self.read[place + 1] + stage.backward_overhead_bytes
        short_out = np.maximum(0.0, need_out - (room - labels.out))
        short_in = np.maximum(0.0, need_in - (room - labels.back))
        idle = waiting(short_out, self.links.out_bytes_per_second) + waiting(short_in, self.links.in_bytes_per_second)
        self._move(
            node,
            2 * (place + 1) + 1,
            stage.forward_seconds * self.links.out_bytes_per_second + short_out,
            stage.backward_seconds * self.links.in_bytes_per_second + short_in,
            np.where(room >= max(need_out, need_in), labels.seconds + idle, np.inf),
            0,
        )

    def keep_input(self, node: int, last: int) -> None:
        """Case 2 for the stages from that of ``node`` to ``last``."""
        if node not in self.fronts:
            return
        first, labels = node // 2, self.fronts[node]
        run = self.stages[first : last + 1]
        room = self.memory_bytes - labels.kept - self.item_bytes(node)
        most, at_once = self._sweep_bytes(first, last)
        short = np.maximum(0.0, most - (room - labels.out))
        forward = math.fsum(stage.forward_seconds for stage in run)
        plain = forward + math.fsum(stage.backward_seconds for stage in run)
        fixed = sum(stage.fixed_bytes for stage in run)
        again = self.rotor.part_seconds(first, last, room - fixed)
        arriving = waiting(labels.back, self.links.in_bytes_per_second)
        backward = (np.maximum(again, arriving) + again + arriving) / 2
        cost = forward + waiting(short, self.links.out_bytes_per_second) + backward - plain
        # A run that does not fit has an infinite backward; nothing crosses then.
        finite = np.where(np.isfinite(backward), backward, 0.0)
        self._move(
            node,
            2 * (last + 1),
            forward * self.links.out_bytes_per_second + short,
            finite * self.links.in_bytes_per_second,
            np.where(room >= at_once, labels.seconds + cost, np.inf),
            fixed,
        )

    def _sweep_bytes(self, first: int, last: int) -> tuple[float, int]:
        """What a sweep lacks at its start if the queue drains during it, and the most that it holds at once."""
        most, at_once, drained, fixed = -math.inf, 0, 0.0, 0
        for place in range(first, last + 1):
            stage = self.stages[place]
            fixed += stage.fixed_bytes
            held = self.read[place + 1] + stage.forward_overhead_bytes + fixed
            held += self.read[place] if place > first else 0
            most, at_once = max(most, held - drained), max(at_once, held)
            drained += stage.forward_seconds * self.links.out_bytes_per_second
        return most, at_once

    def _move(
        self, node: int, target: int, crossed_out: Floats, crossed_in: Floats, seconds: Floats, stays_bytes: int
    ) -> None:
        labels, item = self.fronts[node], self.item_bytes(node)
        seconds = np.where(seconds <= self.worst_seconds, seconds, np.inf)
        for offload in (False, True):
            if offload and not (item and self.links.out_bytes_per_second and self.links.in_bytes_per_second):
                continue
            moved = labels.moved(node, item, crossed_out, crossed_in, seconds, offload)
            if len(moved.seconds):
                self.coming[target].append(dataclasses.replace(moved, kept=moved.kept + stays_bytes))

    def best(self, cell_bytes: float) -> ChainPlan | None:
        """The cheapest way to the loss, both queues drained there."""
        found: tuple[float, int, int] | None = None
        for node in (2 * len(self.stages), 2 * len(self.stages) + 1):
            self.settle(node, cell_bytes)
            if node not in self.fronts:
                continue
            labels = self.fronts[node]
            drain = waiting(labels.out, self.links.out_bytes_per_second)
            drain = drain + waiting(labels.back, self.links.in_bytes_per_second)
            room = self.memory_bytes - labels.kept - self.item_bytes(node)
            total = np.where(room >= self.read[-1], labels.seconds + drain, np.inf)
            row = int(np.lexsort((-labels.kept, total))[0])
            if math.isfinite(total[row]) and (found is None or total[row] < found[0]):
                found = float(total[row]), node, row
        return None if found is None else self._plan(*found)

    def _plan(self, extra_seconds: float, node: int, row: int) -> ChainPlan:
        forward: list[Action] = []
        backward: list[list[Action]] = []
        offloaded: set[int] = set()
        steps = trail(self.fronts, node, row)
        for (start, start_row, out), (end, _, _) in zip(steps, [*steps[1:], (node, row, False)], strict=True):
            first, last = start // 2, end // 2 - 1
            if out:
                offloaded.add(first)
            if end % 2:
                forward.append(Action("forward_all", first))
                backward.append([Action("backward", first)])
                continue
            forward.append(Action("forward_keep", first))
            forward += [Action("forward_drop", stage) for stage in range(first + 1, last + 1)]
            fixed = sum(stage.fixed_bytes for stage in self.stages[first : last + 1])
            room = self.memory_bytes - float(self.fronts[start].kept[start_row]) - self.item_bytes(start)
            backward.append(self.rotor.part_actions(first, last, room - fixed))
        actions = [*forward, *(action for part in reversed(backward) for action in part)]
        return ChainPlan(tuple(actions), self.rotor.chain.plain_seconds + extra_seconds, frozenset(offloaded))


def pofo(step: Step, machine: Machine, limit_bytes: int, *, slots: int = SLOTS) -> Plan:
    """The best mix of keeping, offloading and recomputing for the chain that ``step`` can be cut into.

    Raises:
        BudgetError: if no such schedule was found that stays within ``limit_bytes``.
        PolicyError: if the step is no chain, or ``slots`` is less than 1.
    """
    check_count("pofo's slots", slots)
    stages = stages_of(step, machine, MOST_STAGES)
    pair = slow_links(machine)
    links = Links(0.0, 0.0) if pair is None else Links(*(link.bandwidth_bytes_per_second for link in pair))
    rotor = table(stages.chain, rounded_up(stages.chain))
    return fitted(
        stages, limit_bytes, rounded_up(stages.chain), lambda memory: pofo_plan(rotor, links, memory, slots), METHOD
    )
