"""What a loop learns from a step that is over: its time, what it held, and how far along its kind is."""

from __future__ import annotations

import dataclasses

from ebbtide.errors import BudgetError
from ebbtide.measured import Measured, StepState
from ebbtide.observe.clock import Mark
from ebbtide.observe.recorder import Recorder
from ebbtide.run.conductor import Conductor
from ebbtide.run.held_bytes import Audited, Held, Rest
from ebbtide.run.hooks import LightWatch
from ebbtide.run.keys import step_key
from ebbtide.run.kinds import Kind
from ebbtide.run.loop import FINAL_STATES, TRUSTED_STATES, Loop
from ebbtide.run.meter import AllocatedMeter, PeakMeter
from ebbtide.run.native import arena_library
from ebbtide.run.safe import SafePolicy
from ebbtide.units import format_bytes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Ended:
    """A step that has ended without a fault, and what took part in it.

    Attributes:
        state: what it was for.
        kind: the kind by whose plan it began; None if it was observed.
        began, ended: marks of the device's clock.
        conductor: has run it by a plan.
        light: has looked at its beginning, as nothing binds in its kind.
        recorder, policy: have observed it, and kept it within its limit meanwhile.
        meter: has counted its bytes.
        held: what it held; None if nobody looked.
        went_through: whether it has taken the blocks that steps of its kind take.
    """

    state: StepState
    kind: Kind | None
    began: Mark
    ended: Mark
    conductor: Conductor | None
    light: LightWatch | None
    recorder: Recorder | None
    policy: SafePolicy | None
    meter: PeakMeter | AllocatedMeter | None
    held: Held | None
    went_through: bool

    @property
    def left(self) -> str:
        """Why it left its plan, or an empty string."""
        conductor = self.conductor
        if conductor is None:
            return self.light.left if self.light is not None else ""
        return conductor.left or ("" if conductor.left_some_out or conductor.is_empty else conductor.differs)

    @property
    def is_empty(self) -> bool:
        """Whether nothing that its kind saves came to the hooks: it evaluates, or others' hooks have it."""
        watch = self.conductor or self.light
        return watch is not None and watch.is_empty

    @property
    def peak_bytes(self) -> int | None:
        """The most bytes that it held, if they were counted."""
        return self.meter.peak_bytes if self.meter is not None else None

    @property
    def is_typical(self) -> bool:
        """Whether it ran from beginning to end as steps of its kind will, so that its pace tells theirs."""
        if self.left or self.is_empty or self.state not in FINAL_STATES or self.meter is not None:
            return False
        conductor, kind = self.conductor, self.kind
        return conductor is None or (conductor.finished and kind is not None and conductor.script is kind.script)


def learn_from(loop: Loop, step: Ended) -> None:
    """Learn from ``step``, the latest of ``loop``. Raises what `Loop.learn` does, and `BudgetError` where no plan has
    room for what the step held, or makes what was found to differ when it was computed again."""
    kind, conductor, left = step.kind, step.conductor, step.left
    ran = loop.kinds.running(conductor.script) if conductor is not None else None
    key = _key_of(step, ran)
    _time(loop, step, key)
    number = len(loop.measured) - 1
    if kind is not None and step.state in TRUSTED_STATES:
        kind.scrutiny.was_weighed = step.held is not None
        if step.held is not None and not step.is_empty:
            _weigh(loop, step, kind, step.held)
    if step.recorder is not None and step.policy is not None:
        assert loop.ground is not None
        if loop.ground.follow(step.policy.seen_bytes):
            loop.learn(step.recorder)
        else:
            loop.forget_all()
    elif step.is_empty and kind is not None and key is not None:
        if key in loop.kinds:
            loop.kinds.met(loop.kinds[key], number)
        loop.parts.met_empty(ran or kind, key, number, step.peak_bytes, step.held)
    elif left:
        loop.looks.again(number, ops_only=conductor is not None and not conductor.left)
    elif kind is not None and conductor is not None and ran is not None and key is not None:
        loop.kinds.met(loop.kinds.get(key, ran), number)
        _advance(loop, step, key, kind, ran, conductor)
    elif kind is not None and step.light is not None:
        loop.kinds.met(kind, number)


def spare_rewritten(loop: Loop, conductor: Conductor, more: set[int]) -> None:
    """A step failed as it wrote to what values were to be computed from, as others of its kind may do from now on;
    ``more`` are such values that are known already."""
    ran = loop.kinds.running(conductor.script)
    if ran is not None:
        ran.spare(conductor.rewritten() | more, loop.machine)


def _key_of(step: Ended, ran: Kind | None) -> int | None:
    """The key of the kind, known or not, that a step was of which ``ran`` by the plan of a known one; None if it was
    observed."""
    conductor = step.conductor
    if step.is_empty and step.kind is not None:
        return step_key(step.kind.step, end=0, keeps_graphs=False)  # of steps that save nothing
    if ran is None or conductor is None:
        return step.kind.key if step.kind is not None else None
    missing, end, keeps_graphs = conductor.missing, conductor.ended_at, conductor.keeps_graphs
    if not missing and end is None and keeps_graphs == ran.keeps_graphs:
        return ran.key
    return step_key(ran.step, missing, end, keeps_graphs=keeps_graphs)


def _time(loop: Loop, step: Ended, key: int | None) -> None:
    """Note what was measured of a step of the kind with this key, its time as soon as the device is done; and watch the
    pace of planned steps."""
    assert loop.ground is not None
    kind, conductor = step.kind, step.conductor
    measured = Measured(step.state, None, step.peak_bytes, left=step.left, kind=key)
    script = kind.script if kind is not None and step.is_typical else None
    number = loop.measured.add(measured)

    def then(seconds: float, between: list[float]) -> None:
        loop.measured.correct(number, dataclasses.replace(measured, seconds=seconds))
        # It may have been planned for anew meanwhile.
        if kind is not None and script is not None and kind.script is script:
            kind.watch(loop.machine, between)
            loop.watch_links(kind, seconds)

    stamps = conductor.stamps if conductor is not None else []
    loop.ground.readings.add(step.began, stamps, step.ended, then)
    loop.ground.readings.collect()


def _weigh(loop: Loop, step: Ended, kind: Kind, held_now: Held) -> None:
    """See whether the step held more than was planned for."""
    conductor, scrutiny = step.conductor, kind.scrutiny
    if conductor is None:
        scrutiny.was_comparable = True
        kind.usage.watch_closely_if_over(kind, held_now)
    elif conductor.script is kind.script and conductor.went_through and not kind.varies:
        scrutiny.was_comparable = True
        kind.usage.note(kind, held_now, loop.machine)
    elif conductor.script is kind.script and conductor.followed:  # of other sizes than the audited one
        scrutiny.was_comparable = False
        if step.peak_bytes is None:  # otherwise it is known
            kind.usage.note_uncompared(kind, held_now)


def _advance(loop: Loop, step: Ended, key: int, kind: Kind, ran: Kind, conductor: Conductor) -> None:
    """Move the kind of step that ``ran`` along, if it ran as planned from beginning to end, but for what it left out;
    it may not be the ``kind`` by whose plan the step began."""
    peak = step.peak_bytes
    if ran.script is not conductor.script:
        return  # it was planned for anew meanwhile
    if not (conductor.followed or conductor.is_part or conductor.went_over):
        return
    if key not in loop.kinds and conductor.truth is None:
        _note_part(loop, step, key, ran)
        if ran.script is not conductor.script:
            return  # room was left for such steps
    if conductor.truth is not None and conductor.truth.differing:
        # Until there is another plan, steps of this one verify: whatever happens, none goes unseen that differs.
        ran.ban(conductor.truth.differing)
        assert ran.plan is not None
        ran.make_plan(loop.machine, ran.plan.limit_bytes)
    elif conductor.truth is not None:
        ran.note_verification(conductor.truth.compared, whole=conductor.followed)
    elif ran is not kind:  # what else there is to find out begins with the step
        _weigh_late(loop, step, ran, peak)
    elif peak is not None:
        _note_audit(loop, step, kind, conductor, peak)
    elif step.state == "rehearse" and step.went_through:
        kind.note_rehearsal()


def _note_part(loop: Loop, step: Ended, key: int, ran: Kind) -> None:
    """What the step left of the plan of ``ran`` is of an unknown kind with this key. If it was counted, and has passed
    the limit, such steps are observed, or room is left for them."""
    number, peak = len(loop.measured) - 1, step.peak_bytes
    remedy = loop.parts.met(ran, key, number, peak, step.held)
    if remedy == "observe":
        loop.looks.again(number, ops_only=False)
        loop.looks.at(loop.parts.due)
    elif remedy == "plan" and peak is not None:
        ran.usage.note_peak(ran, peak, loop.machine)


def _weigh_late(loop: Loop, step: Ended, ran: Kind, peak: int | None) -> None:
    """See whether a step that went over to the plan of ``ran`` held more than the first one that did.

    No step begins as one of these, so they are counted only by chance. If one has held more, steps are counted now, one
    of which may be the next such one, and again when another one that holds more is due: see NOTE [When the next one
    is due] in `ebbtide.run.recurrence`.
    """
    if ran.plan is None:
        return
    recounts, following = ran.scrutiny.recounts, ran.comings.count
    if peak is not None and peak > ran.plan.limit_bytes:
        ran.usage.note_peak(ran, peak, loop.machine)
    elif peak is None and step.held is not None and ran.usage.note_late(ran.plan, step.held):
        recounts.ask_for_next_like(following - 1)
        loop.late_counts.ask(len(loop.measured))
    if recounts.awaits(following):
        loop.late_counts.ask_around(ran.comings.due, len(loop.measured))


def _note_audit(loop: Loop, step: Ended, kind: Kind, conductor: Conductor, peak: int) -> None:
    """A step was counted: if it held more than the limit, what the observed one did not hold is planned for now."""
    usage = kind.usage
    former = usage.audited_peak_bytes if usage.audits else None  # of a plan that is not followed any more
    usage.audited_peak_bytes = max(peak, former or 0)
    # One that left out some is of another kind: what it held is no reason to plan for less in steps of this one.
    if kind.plan is not None and peak > kind.plan.limit_bytes and not conductor.is_part:
        if not kind.is_under_way:
            more = peak - kind.plan.peak_bytes
            try:
                kind.reserve_bytes(more, loop.machine)
            except BudgetError as error:
                if not kind.scrutiny.recounts.claim_second_count():
                    error.add_note(
                        f"This step held {format_bytes(more)} that the observed one did not: gradients that it adds to,"
                        " perhaps, or an optimizer's state, if that steps within it."
                    )
                    raise
            return
        usage.note_peak(kind, peak, loop.machine)  # in the middle of somebody's training, which goes on
        if kind.script is not conductor.script or kind.state != "audit":
            return
    audited = None
    if conductor.finished and step.held is not None and isinstance(step.meter, PeakMeter):
        audited = Audited(peak, step.held, Rest(step.meter.rest()))
    rehearses = loop.tunes_allocator and arena_library() is not None
    kind.note_audit(audited, whole=conductor.finished, rehearses=rehearses)
