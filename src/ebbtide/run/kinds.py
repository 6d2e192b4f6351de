"""One kind of step: what was observed of it, what is planned for it, and how far along it is."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence, Set

from ebbtide.decisions import Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.measured import StepState
from ebbtide.plan import Caution, lower_bound, simulate
from ebbtide.run.comings import Comings
from ebbtide.run.held_bytes import Audited, held_besides, holding_more
from ebbtide.run.keys import step_key
from ebbtide.run.looks import CHANGED_LOOKS
from ebbtide.run.pace import Pace, without_slowdown
from ebbtide.run.refined import as_spared, merged, runs_same_ops, without_reruns
from ebbtide.run.rehearsed import Rehearsed
from ebbtide.run.roomy import LEAST_BLOCK_BYTES, fits, varying_bytes
from ebbtide.run.script import Script, write_script
from ebbtide.run.scrutiny import COUNTS, Scrutiny
from ebbtide.run.solving import plan_for
from ebbtide.run.tiers.layouts import planned_places
from ebbtide.run.tiers.pinned import PlannedPlaces
from ebbtide.run.usage import Usage
from ebbtide.step import Step
from ebbtide.structure import structure

WORTH_SHARE = 0.01
"""Share of a plain step that steps have to gain for a plan to be replaced: to make another one takes about a second,
and three longer steps."""
WORTH_SECONDS = 1e-3
"""Seconds that steps have to gain at least for a plan to be replaced."""
VERIFIES = 4
"""After so many steps that left out nothing, what has not been compared with the truth is not waited for."""
VERIFIES_OF_PARTS = 16
"""After so many steps that left out some, what has not been compared with the truth is not waited for."""
AUDITS_OF_SMALLER = 3
"""Steps to audit where tensors are smaller than planned for, or left out: one with all of them may not come soon."""


class Kind:
    """Steps that have one plan: autograd saves the same tensors in them, in order, asks for them in the same order, and
    keeps graphs or not in all of them.

    Args:
        verify: whether values that are computed again are compared first, as in `Budget`.

    Attributes:
        step: as observed; its durations are refined as planned steps run.
        samples: steps of other sizes each that this one stands for (see `ebbtide.run.roomy`); none if it was observed.
        captures_all: whether the mode that captures its ops has to stay on from beginning to end: see `Recorder`.
        keeps_graphs: whether a backward pass of such steps keeps the graph that it goes through.
        varies: whether the sizes differ of tensors that are not small anyway, so that steps take other blocks each.
        key: what tells its steps from those of other kinds, from `step_key`.
        plan, script: None until planned.
        state: what the next step of this kind is for.
        banned: absences that must not be computed again: their recomputation was seen to differ.
        usage: what was counted of its steps, and whether they hold more than is planned for.
        pace: how long its steps take.
        rehearsed: the places of the blocks of memory that its steps take.
        comings: when its steps came.
        scrutiny: how closely its steps are looked at.
        verifies: how many steps, each that left out nothing as several, compared some of what the plan computes again.
    """

    def __init__(
        self,
        step: Step,
        samples: Sequence[Step] = (),
        *,
        verify: bool = True,
        captures_all: bool = False,
        keeps_graphs: bool = False,
    ) -> None:
        self.step = step
        self.samples = tuple(samples)
        self.captures_all = captures_all
        self.keeps_graphs = keeps_graphs
        self._verify = verify
        self.varies = bool(samples) and max(varying_bytes(samples, step), default=0) >= LEAST_BLOCK_BYTES
        self.key = step_key(step, keeps_graphs=keeps_graphs)
        self.plan: Plan | None = None
        self.script: Script | None = None
        self.state: StepState = "observe"
        self.banned: frozenset[int] = frozenset()
        self.usage = Usage()
        self.pace = Pace()
        self.rehearsed = Rehearsed(varies=self.varies)
        self.comings = Comings()
        self.verifies = 0
        self._unverified: set[tuple[int, int]] = set()
        self._others = 0
        self.scrutiny = Scrutiny()
        self._structure: int | None = None
        self._places_by_tier: dict[str, PlannedPlaces] = {}

    @property
    def observed(self) -> tuple[Step, ...]:
        """The steps that were seen of it."""
        return self.samples or (self.step,)

    @property
    def structure(self) -> int:
        """What kinds have in common whose steps differ in sizes alone."""
        if self._structure is None:
            self._structure = hash((structure(self.observed[0]), self.keeps_graphs))
        return self._structure

    def has_room_for(self, other: Kind) -> bool:
        """Whether steps of the other kind are among those that the plan was made for: of the same structure, and no
        larger in anything."""
        if not self.samples or self.plan is None or (other.captures_all and not self.captures_all):
            return False
        return other.structure == self.structure and fits(other.step, self.step)

    def observed_again(self, step: Step, *, captures_all: bool = False) -> None:
        """Take the later observation, since the first step of a loop makes gradients and optimizer state that later
        ones find. `merged`: the first one has page faults in its times, and only one measures workspaces."""
        if runs_same_ops(step, self.step):
            step = merged(step, self.step)
        self.step, self.captures_all, self._structure = step, captures_all, None

    def note_observation(self, step: Step) -> None:
        """Note whether a step that was observed, though its kind is planned, still runs the same ops."""
        self._others = 0 if runs_same_ops(step, self.step) else self._others + 1

    @property
    def has_changed(self) -> bool:
        """Whether steps run other ops now than the planned one, which matches recipes op by op and would be left each
        time. A single one may be an exception."""
        return self._others >= CHANGED_LOOKS

    def make_plan(self, machine: Machine, limit_bytes: int) -> None:
        """Plan this kind of step. Raises `BudgetError` if no plan meets the limit."""
        self._adopt(plan_for(self.step, machine, limit_bytes, banned=self.banned), machine)

    def plan_again(self, machine: Machine) -> None:
        """Durations are better known now, or the machine has changed: plan anew, if steps will then take less."""
        assert self.plan is not None
        seconds = simulate(self.step, machine, self.plan.decisions).seconds
        self.plan = dataclasses.replace(self.plan, seconds=seconds, bound_seconds=None)
        enough_seconds = seconds - max(WORTH_SHARE * self.plan.plain_seconds, WORTH_SECONDS)
        if enough_seconds < self.plan.plain_seconds:
            return
        caution = Caution.of(machine, timed=True)
        try:
            plan = plan_for(self.step, machine, self.plan.limit_bytes, banned=self.banned, caution=caution)
        except BudgetError:  # the search is no proof: there is a plan, the one that is followed
            return
        if plan.seconds < enough_seconds:
            self.rehearsed.forget()
            self._adopt(plan, machine)

    def _adopt(self, plan: Plan, machine: Machine) -> None:
        self._places_by_tier.clear()
        if self.plan is not None and self.plan.binds != plan.binds:
            self.pace = Pace()  # where nothing bound, nobody took the times of events
        outcome = simulate(self.step, machine, plan.decisions)
        script = write_script(self.step, plan, outcome.memory, captures_all=self.captures_all)
        self.plan = None  # until all is there: an interrupt leaves a kind that is planned for anew
        self.verifies = 0
        self.usage.begin_anew()
        self.scrutiny.begin_anew()
        self.script = script
        self._unverified = {(save.value, later) for save in script.saves for later in range(len(save.remakes))}
        self.state = "idle" if not plan.binds else "verify" if self._verify and script.remakes else "audit"
        self.plan = plan

    def note_verification(self, compared: Set[tuple[int, int]], *, whole: bool) -> None:
        """Note that a step has ``compared`` values with the truth, see `Truth`; ``whole``: it left out nothing.

        Steps that leave out some are evidence of the rest, as one that leaves out nothing may not come soon. In one of
        these, too, a value may have been made by other calls than recorded. What has not been compared after
        `VERIFIES_OF_PARTS` of the former, or `VERIFIES` of the latter, is never computed again.
        """
        assert self.script is not None
        self._unverified -= compared
        if self._unverified:
            self.verifies += VERIFIES_OF_PARTS // VERIFIES if whole else 1
            if self.verifies < VERIFIES_OF_PARTS:
                return
            self.script = self.script.moving({value for value, _ in self._unverified})
        self.state = "audit"

    def note_audit(self, audited: Audited | None, *, whole: bool, rehearses: bool) -> None:
        """Note that a step was counted and kept to the limit: with ``audited`` if it was of the planned sizes,
        ``whole`` if it left out nothing. If it ``rehearses``, the next one may find places for its blocks."""
        self.usage.add_audit(audited)
        if self.state != "audit":
            self.usage.is_trusted = True
        elif whole or self.usage.audits >= AUDITS_OF_SMALLER:
            self.usage.is_trusted = True
            self.state = "rehearse" if rehearses else "planned"

    def note_rehearsal(self) -> None:
        """Note that a step has taken all its blocks: where they lie is known now."""
        self.state = "planned"

    def places_in(self, tier: str) -> PlannedPlaces | None:
        """Where values lie in the arena of ``tier``; None while there is no plan."""
        if self.plan is None:
            return None
        if tier not in self._places_by_tier:
            self._places_by_tier[tier] = planned_places(self.step, self.plan.decisions, tier)
        return self._places_by_tier[tier]

    def reserve_bytes(self, size_bytes: int, machine: Machine) -> None:
        """Plan anew for steps that hold so many bytes more than the observed one: as if these were there all the time.
        Raises `BudgetError`, and changes nothing, if no such plan meets the limit."""
        self._plan_instead(holding_more(self.step, size_bytes), machine)
        if not self.samples:
            self._structure = None

    def _plan_instead(self, step: Step, machine: Machine) -> None:
        assert self.plan is not None
        former, self.step = self.step, step
        try:
            self.make_plan(machine, self.plan.limit_bytes)
        except BaseException:
            self.step = former
            raise
        self.rehearsed.forget()

    def _plan_instead_if_possible(self, step: Step, machine: Machine) -> None:
        if self.plan is not None and step != self.step:
            with contextlib.suppress(BudgetError):
                self._plan_instead(step, machine)

    def inherit(self, like: Sequence[Kind], machine: Machine) -> None:
        """Take over what was learnt of others ``like`` it, if it can: their steps run by its plan from now on."""
        self.usage.inherit(kind.usage for kind in like)
        self._structure = like[0].structure  # as they were observed, whatever of them is spared
        self._plan_instead_if_possible(as_spared(self.step, [kind.step for kind in like]), machine)
        more = max(held_besides(kind.step, kind.observed[0]) for kind in like)
        self._plan_instead_if_possible(holding_more(self.step, more) if more else self.step, machine)

    @property
    def is_under_way(self) -> bool:
        """Whether somebody trains by plans for such steps: one that passes the limit is no reason to end that."""
        return self.usage.is_trusted or (self.state == "idle" and self.comings.count > COUNTS)

    def ban(self, values: set[int]) -> None:
        """Never again compute these values a second time."""
        self.banned |= {i for i, absence in enumerate(self.step.absences) if absence.value in values}

    def spare(self, values: Set[int], machine: Machine) -> None:
        """A step wrote to these values once it had read them, as others may: what reads them is never run again, unless
        there is no plan without."""
        self._plan_instead_if_possible(without_reruns(self.step, values), machine)

    def forget_plan(self) -> None:
        """Steps of this kind do not run as planned: the next one is observed, and planned for anew."""
        self.plan = self.script = None
        self.usage.forget_plan()
        self.state = "observe"
        self.banned = frozenset()
        self.pace = Pace()
        self.rehearsed.forget()
        self._others = 0

    @property
    def settled(self) -> bool:
        """Whether the next step is planned for as all later ones will be, unless the loop or the machine changes."""
        return self.state == "idle" or (self.state == "planned" and (self.pace.settled or not self.is_timed))

    @property
    def is_timed(self) -> bool:
        """Whether the next planned step is to be watched for its durations: not where each has other sizes."""
        return not self.pace.done and not self.varies and not self.knows_durations

    @property
    def knows_durations(self) -> bool:
        """Whether durations are known as observed: a device is kept from waiting for the observer, and planned steps,
        which may wait for the host and for transfers, would say less of its ops."""
        return self.step.device != "cpu" and self.plan is not None and self.plan.binds

    def watch(self, machine: Machine, between: Sequence[float]) -> None:
        """A step ran as planned: now and then refine the durations, and what the plan predicts from them; and plan anew
        once they are good enough: what is observed has the observer and page faults in it.

        ``between`` are the seconds from one event to the next: see `Pace.add`.
        """
        if self.pace.done or self.plan is None or self.knows_durations:
            return
        was_settled = self.pace.settled
        self.pace.add(between)
        if not self.pace.due:
            return
        self.step = without_slowdown(self.pace.refine(self.step), machine, self.plan.decisions)
        seconds = simulate(self.step, machine, self.plan.decisions).seconds
        # The bound changes with the durations, too, but takes too long for the middle of somebody's training.
        self.plan = dataclasses.replace(
            self.plan, seconds=seconds, plain_seconds=self.step.plain_seconds, bound_seconds=None
        )
        if self.pace.settled and not was_settled:
            self.plan_again(machine)

    def bounded_plan(self, machine: Machine) -> Plan:
        """The plan, with the time that no plan can beat on the durations as they are known now."""
        assert self.plan is not None
        if self.plan.bound_seconds is None:
            bound = lower_bound(self.step, machine, self.plan.limit_bytes, banned=self.banned)
            self.plan = dataclasses.replace(self.plan, bound_seconds=bound.seconds)
        return self.plan
