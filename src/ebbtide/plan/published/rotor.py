"""Rotor: optimal checkpointing of heterogeneous chains.

Beaumont, Eyraud-Dubois, Herrmann, Joly, Shilova: "Optimal checkpointing for heterogeneous chains: how to train deep
neural networks with limited memory", Inria RR-9302, arXiv 1911.13214 (2019); ACM TOMS (2024).

Each stage's first forward keeps all that it saves, or its input, or nothing. The dynamic program is optimal among
*persistent* schedules, those in which what is stored stays until its backward.
"""

from __future__ import annotations

import dataclasses
import math

import numpy as np
import numpy.typing as npt

from ebbtide.arrays import Floats, Ints
from ebbtide.compiled import compiled
from ebbtide.decisions import Plan
from ebbtide.errors import PolicyError
from ebbtide.machine import Machine
from ebbtide.plan.problem import Problem
from ebbtide.plan.published.best_of_parts import ALL, best_of_parts
from ebbtide.plan.published.chain import Action, Chain, ChainPlan
from ebbtide.plan.published.cut import cut, stages_of
from ebbtide.plan.published.mapping import Mapped, best_mapped, fitted
from ebbtide.plan.published.remembered import remembered
from ebbtide.plan.published.switches import check_count
from ebbtide.step import Step
from ebbtide.units import format_bytes

SLOTS = 500
"""Into how many equal parts memory is divided; sizes are rounded up to them."""

MOST_BYTES = 4 << 30
"""Of memory that the table may take while it is made: enough for some 920 stages with `SLOTS` slots."""

METHOD = "rotor"


@dataclasses.dataclass(frozen=True, slots=True)
class Table:
    """Best times of all parts of a chain, the loss appended as its last stage.

    Attributes:
        chain: the chain.
        slot_bytes: size of a slot.
        seconds: by first stage, last stage and slots, ``C`` of NOTE [The recurrence] in `best_of_parts`.
        choice: what attains it, by the same indices.
        input_slots, saved_slots, fixed_slots: slots of each stage's input, of what it saves, and of what must stay.
    """

    chain: Chain
    slot_bytes: float
    seconds: Floats
    choice: npt.NDArray[np.int16]
    input_slots: Ints
    saved_slots: Ints
    fixed_slots: Ints

    def part_seconds(self, first: int, last: int, free_bytes: Floats) -> Floats:
        """Best times of stages ``first..last`` for each of ``free_bytes``; infinite where that is too little."""
        slots = self._slots(free_bytes)
        return np.where(slots >= 0, self.seconds[first, last, np.maximum(slots, 0)], np.inf)

    def part_actions(self, first: int, last: int, free_bytes: float) -> list[Action]:
        """A schedule that takes `part_seconds`, which must be finite."""
        top = self.seconds.shape[2] - 1
        actions: list[Action] = []
        todo: list[tuple[int, int, int] | Action] = [(first, last, int(self._slots(np.array(free_bytes))))]
        while todo:
            item = todo.pop()
            if isinstance(item, Action):
                actions.append(item)
                continue
            start, end, slots = item
            if start == end:
                actions += [Action("forward_all", start), Action("backward", start)]
                continue
            stage = int(self.choice[start, end, slots])
            if stage == ALL:
                actions.append(Action("forward_all", start))
                todo += [Action("backward", start), (start + 1, end, slots - int(self.saved_slots[start]))]
                continue
            actions.append(Action("forward_keep", start))
            actions += [Action("forward_drop", stage_between) for stage_between in range(start + 1, stage)]
            back = min(top, slots + int(self.fixed_slots[stage : end + 1].sum()))
            todo += [(start, stage - 1, back), (stage, end, slots - int(self.input_slots[stage]))]
        return actions

    def plan(self, memory_bytes: float) -> ChainPlan | None:
        """The best schedule of the whole chain within ``memory_bytes``, its input included; None if there is none."""
        last = len(self.chain.stages)
        free = memory_bytes - (int(self.input_slots[0]) + int(self.fixed_slots.sum())) * self.slot_bytes
        seconds = float(self.part_seconds(0, last, np.array(free)))
        if not math.isfinite(seconds):
            return None
        return ChainPlan(tuple(self.part_actions(0, last, free)), seconds)

    def _slots(self, size_bytes: Floats) -> Ints:
        slots = np.floor(size_bytes / self.slot_bytes + 1e-9).astype(np.int64)
        capped: Ints = np.minimum(slots, self.seconds.shape[2] - 1)
        return capped


@remembered
def table(chain: Chain, memory_bytes: float, slots: int = SLOTS) -> Table:
    """Solve ``chain`` for every memory up to ``memory_bytes``. Time O(stages^3 slots), memory O(stages^2 slots).

    Raises:
        PolicyError: if that memory is more than `MOST_BYTES`.
    """
    wanted_bytes = (len(chain.stages) + 1) ** 2 * (slots + 1) * (8 + 2)
    if wanted_bytes > MOST_BYTES:
        raise PolicyError(
            f"rotor's table of {len(chain.stages)} stages and {slots} slots would take {format_bytes(wanted_bytes)};"
            " ask for fewer slots, or plan with pofo, which joins neighbouring stages"
        )
    slot_bytes = max(memory_bytes, 1) / slots
    sizes = _sizes(chain, slot_bytes)
    forward = np.array([*(stage.forward_seconds for stage in chain.stages), 0.0])
    own = forward + np.array([*(stage.backward_seconds for stage in chain.stages), 0.0])
    seconds, choice = compiled(best_of_parts)(slots, *sizes, forward, own)
    x, xb, _, _, fixed = sizes
    return Table(chain, slot_bytes, seconds, choice, x[:-1], xb, fixed)


def _sizes(chain: Chain, slot_bytes: float) -> tuple[Ints, Ints, Ints, Ints, Ints]:
    """``x``, ``xb``, ``f``, ``b`` and what stays of each stage, and of the loss behind them, in slots."""
    stages = chain.stages
    return (
        _in_slots([*chain.boundary_bytes, 0], slot_bytes),
        _in_slots([*(stage.saved_bytes for stage in stages), 0], slot_bytes),
        _in_slots([*(stage.forward_overhead_bytes for stage in stages), 0], slot_bytes),
        _in_slots([*(stage.backward_overhead_bytes for stage in stages), 0], slot_bytes),
        _in_slots([*(stage.fixed_bytes for stage in stages), 0], slot_bytes),
    )


def _in_slots(sizes: list[int], slot_bytes: float) -> Ints:
    """Sizes in slots, rounded up."""
    return np.ceil(np.array(sizes, dtype=np.float64) / slot_bytes - 1e-9).astype(np.int64)


def rounded_up(chain: Chain, slots: int = SLOTS) -> int:
    """The least memory in which ``chain`` fits with nothing computed again, each size rounded up to a slot of it.

    Where that would be more than twice what the chain holds, as for some hundreds of stages, slots would be too coarse
    for all that is planned with less: then it is less, and no schedule of a table keeps everything.
    """
    low, high = chain.plain_bytes - 1, 2 * chain.plain_bytes
    if _plain_slots(chain, high, slots) > slots:
        return math.ceil(chain.plain_bytes * (1 + (len(chain.stages) + 4) / slots))
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if _plain_slots(chain, middle, slots) <= slots else (middle, high)
    return high


def _plain_slots(chain: Chain, memory_bytes: int, slots: int) -> int:
    """How many slots of ``memory_bytes / slots`` each `Table.plan` needs to keep everything: the conditions of
    NOTE [The recurrence] along ``F_all`` alone."""
    x, xb, f, b, fixed = _sizes(chain, max(memory_bytes, 1) / slots)
    before = np.cumsum(xb) - xb
    alone = np.maximum(x[1:] + xb + f, x[:-1] + x[1:] + xb + b) + np.cumsum(fixed)
    sweep = x[:-2] + x[1:-1] + f[:-1]
    later = np.append(np.maximum.accumulate(sweep[:0:-1])[::-1], 0)
    onwards = np.maximum(x[1:-1] + f[:-1], later) + fixed.sum()
    return int(x[0] + max((before + alone).max(), (before[:-1] + onwards).max()))


def rotor_schedule(problem: Problem, limit_bytes: int, most_stages: int, banned: frozenset[int]) -> Mapped:
    """The schedule that `rotor` finds, or that of its least peak, for at most ``most_stages`` stages.

    Args:
        problem: the step and the machine.
        limit_bytes: the budget.
        most_stages: of more, neighbours are joined.
        banned: values that no recipe may make.

    Raises:
        PolicyError: if the step is no chain.
    """
    stages = cut(problem, most_stages, banned)
    whole = rounded_up(stages.chain)
    return best_mapped(stages, limit_bytes, whole, table(stages.chain, whole).plan)


def rotor(step: Step, machine: Machine, limit_bytes: int, *, slots: int = SLOTS) -> Plan:
    """Optimal persistent checkpointing of the chain that ``step`` can be cut into. No transfers.

    Raises:
        BudgetError: if no such schedule was found that stays within ``limit_bytes``.
        PolicyError: if the step is no chain or too long a one, or ``slots`` is less than 1.
    """
    check_count("rotor's slots", slots)
    stages = stages_of(step, machine)
    whole = rounded_up(stages.chain, slots)
    return fitted(stages, limit_bytes, whole, table(stages.chain, whole, slots).plan, METHOD)
