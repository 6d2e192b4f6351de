"""What steps of one kind hold beyond what is planned for: whether that passes the limit, and what is done about it."""

from __future__ import annotations

import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

from ebbtide.decisions import Plan
from ebbtide.errors import BudgetError
from ebbtide.machine import Machine
from ebbtide.run.held_bytes import Audited, Held, is_trifle
from ebbtide.units import format_bytes

if TYPE_CHECKING:
    from ebbtide.run.kinds import Kind

GIVEN_UP = 5
"""When steps hold more so many times, or there is no plan for what they hold, their kind is not planned for again."""


class Usage:
    """What was counted of the steps of a kind, and whether they hold more than they are planned for.

    Attributes:
        audited: the step of the planned sizes that was counted under the plan, None until then.
        audited_peak_bytes: the peak counted in a planned step, None until then.
        audits: how many steps were audited under the plan.
        is_trusted: whether steps ran by a plan for this kind that was audited.
    """

    def __init__(self) -> None:
        self.audited: Audited | None = None
        self.audited_peak_bytes: int | None = None
        self.audits = 0
        self.is_trusted = False
        self._more_times = 0
        self._has_warned = False
        self._held_late: Held | None = None

    def begin_anew(self) -> None:
        """There is another plan, under which no step was counted yet."""
        self.audited = self._held_late = None
        self.audits = 0

    def forget_plan(self) -> None:
        """Steps do not run as planned: what they held more than that tells nothing of the next plan."""
        self.audited = self.audited_peak_bytes = None
        self._more_times = 0
        self._has_warned = False

    def inherit(self, others: Iterable[Usage]) -> None:
        """Take over what was learnt of other kinds, whose steps run by this one's plan from now on."""
        known = list(others)
        self.is_trusted = any(other.is_trusted for other in known)
        self._has_warned = any(other._has_warned for other in known)
        self._more_times = max(other._more_times for other in known)

    def add_audit(self, audited: Audited | None) -> None:
        """Note that a step was counted and kept to the limit: with ``audited`` if it was of the planned sizes."""
        if audited is not None:
            self.audited, self.is_trusted = audited, True
        self.audits += 1

    def note(self, kind: Kind, held: Held, machine: Machine) -> None:
        """Note what a step of ``kind`` has ``held``: if that passes the limit, plan with so much less from now on.

        If there is no such plan, steps are counted before anybody is warned: only large blocks are known here, and with
        them what ops take inside themselves, which may be more in one step and does not count against the limit.
        """
        more = self._find_excess_bytes(kind, held)
        if not more:
            return
        assert kind.plan is not None
        assert self.audited is not None
        reason = self._leave_free(kind, self.audited.peak_bytes + more - kind.plan.peak_bytes, machine)
        if reason and is_over(held, kind.plan):
            kind.scrutiny.recounts.ask_for_next_like(kind.comings.count)

    def note_peak(self, kind: Kind, peak_bytes: int, machine: Machine) -> None:
        """Note the peak of a step that was counted once more, which is above the limit: as `note` does."""
        more = peak_bytes - kind.plan.peak_bytes if kind.plan is not None and not self._has_warned else 0
        if more and (reason := self._leave_free(kind, more, machine)):
            assert kind.plan is not None
            self._more_times, self._has_warned = GIVEN_UP, True
            warnings.warn(
                f"a step held {format_bytes(more)} more than is planned for, and passed the limit of "
                f"{format_bytes(kind.plan.limit_bytes)}. The plan stays, and such steps will pass it again: {reason}",
                stacklevel=2,
            )

    def note_uncompared(self, kind: Kind, held: Held) -> None:
        """Note what a step has ``held`` that cannot be compared with a counted one: if it may pass the limit, count the
        next steps, and those that come as it did."""
        if kind.plan is not None and is_over(held, kind.plan) and not self._has_warned:
            kind.scrutiny.recounts.ask_for_next_like(kind.comings.count)

    def note_late(self, plan: Plan | None, held: Held) -> bool:
        """Note what a step has ``held`` that went over to the plan. Returns whether it `exceeds` the first such one."""
        if self._held_late is None:
            self._held_late = held
        return self.exceeds(plan, held, self._held_late)

    def watch_closely_if_over(self, kind: Kind, held: Held) -> None:
        """Watch the next steps closely if what one that was hardly looked at has ``held`` passes the limit."""
        if self._find_excess_bytes(kind, held):
            kind.scrutiny.look_again()

    def exceeds(self, plan: Plan | None, held: Held, other: Held) -> bool:
        """Whether a step that ran by the plan has ``held`` more than the ``other`` one, and may have passed the
        limit."""
        if plan is None or self._more_times >= GIVEN_UP:
            return False
        return is_over(held, plan) and not is_trifle(held.above(other), plan)

    def _leave_free(self, kind: Kind, size_bytes: int, machine: Machine) -> str:
        """Plan with so much less from now on. Returns why that was not done, or an empty string."""
        self._more_times += 1
        if self._more_times >= GIVEN_UP:
            return "that was not the first time that they held more"
        try:
            kind.reserve_bytes(size_bytes, machine)
        except BudgetError as error:
            return str(error)
        return ""

    def _find_excess_bytes(self, kind: Kind, held: Held) -> int:
        """Find out how many bytes a step held above the audited one, if that passes the limit and is no trifle. Where
        what it held does not tell, ask for steps to be counted. Returns 0 then, and where it kept to the limit."""
        if self.audited is None:
            self.note_uncompared(kind, held)
            return 0
        more = held.above(self.audited.held)
        if not self._passes(kind.plan, more):
            self.audited.rest.forget_gone()
            if self._passes(kind.plan, held.above_at_most(self.audited.held)):
                kind.scrutiny.recounts.ask(kind.comings.count)
        elif more > self.audited.rest.gone_bytes:
            return more
        else:
            kind.scrutiny.recounts.ask(kind.comings.count)
        return 0

    def _passes(self, plan: Plan | None, more_bytes: int) -> bool:
        """Whether so much above the audited step passes the limit, and is no trifle."""
        if plan is None or self.audited is None or self._more_times >= GIVEN_UP:
            return False
        return not is_trifle(more_bytes, plan) and self.audited.peak_bytes + more_bytes > plan.limit_bytes


def is_over(held: Held, plan: Plan) -> bool:
    """Whether a step that has ``held`` so much may have passed the plan's limit: what it took may be above all rest."""
    return plan.resting_bytes + held.taken_bytes > plan.limit_bytes
