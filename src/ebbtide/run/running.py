"""One step under a budget: what observes, conducts and watches it while it runs."""

from __future__ import annotations

import contextlib
import functools
import os
import sys
import threading
import warnings
from types import TracebackType

from ebbtide.decisions import Plan
from ebbtide.errors import StepError
from ebbtide.measured import StepState
from ebbtide.observe.clock import Mark
from ebbtide.observe.garbage import put_back_if_left
from ebbtide.observe.hooks import Pack, Show, disabled, drop_hooks, push_hooks, take_off
from ebbtide.observe.inductor import compiled_as_ops
from ebbtide.observe.recorder import Recorder
from ebbtide.observe.uncompiled import is_compiling, never_compiled, uncompiled
from ebbtide.run import allocator, held_bytes
from ebbtide.run.conductor import Conductor
from ebbtide.run.device import TrainingDevice
from ebbtide.run.forks import KnownScripts
from ebbtide.run.held_bytes import Held
from ebbtide.run.hooks import LightWatch, forget_failed_backward
from ebbtide.run.kinds import Kind
from ebbtide.run.lessons import Ended, learn_from, spare_rewritten
from ebbtide.run.loop import TRUSTED_STATES, Loop
from ebbtide.run.meter import AllocatedMeter, PeakMeter
from ebbtide.run.rehearsed import Rehearsed
from ebbtide.run.safe import SafePolicy
from ebbtide.run.script import Script
from ebbtide.run.shortage import is_out_of_memory
from ebbtide.run.tiers.choose import settle
from ebbtide.run.verify import Truth

_LEFT_ELSEWHERE = "a step was left in another thread than it began in"
_BLIND = (
    "a backward pass of this step ran in another thread than the step began in. Nobody sees what it takes there: the"
    " budget does not hold for it. Run it in the thread of the step"
)
_RSS_SLACK = 0.06
"""Resident bytes above rest may exceed the planned ones by this share before the heap's holes are given back."""


class Running:
    """The context of one step of a loop."""

    def __init__(self, loop: Loop) -> None:
        self._loop = loop
        self._process, self._thread = os.getpid(), 0
        self._recorder: Recorder | None = None
        self._policy: SafePolicy | None = None
        self._conductor: Conductor | None = None
        self._ground: TrainingDevice
        self._meter: PeakMeter | AllocatedMeter | None = None
        self._light: LightWatch | None = None
        self._places: Rehearsed | None = None
        self._turn: int | None = None
        self._held: Held | None = None
        self._kind: Kind | None = None
        self._state: StepState = "observe"
        self._began: Mark = None
        self._has_begun = False
        self._hooks: tuple[Pack, Show] | None = None
        self._compiled = contextlib.ExitStack()

    @never_compiled
    def __enter__(self) -> None:
        loop = self._loop
        if (reason := disabled()) is not None:
            raise StepError(f"a step cannot begin here ({reason}); put it around the transform, not into it")
        if not loop.compiles and is_compiling():
            raise StepError(
                "steps run uncompiled by now, as was warned, and cannot begin within what torch.compile made; put the"
                " step around it"
            )
        is_ours = False
        try:
            with loop.lock:
                self._check_begins()
                is_ours, loop.running = True, self
                self._has_begun, self._thread = True, threading.get_ident()
            self._ground = loop.ground = loop.ground or TrainingDevice()
            self._state = loop.state
            self._kind = None if self._state == "observe" else loop.expected
            self._compiled.enter_context(compiled_as_ops() if loop.compiles else uncompiled(warns=False))
            self._begin()
            self._began = self._ground.clock.mark()
        except BaseException:
            if is_ours:
                try:
                    self._take_down(began=False)
                finally:
                    self._end()
            raise

    def _check_begins(self) -> None:
        loop = self._loop
        if loop.closed:
            raise StepError("this Budget was closed; make a new one")
        if loop.running is not None:
            raise StepError(
                "a step of this Budget is under way already (nested, or in another thread); "
                "leave it first, or use one Budget for each loop"
            )
        if self._has_begun:
            raise StepError("a context is for one step only: write `with budget.step():` anew for each")

    def _push_hooks(self, pack: Pack, unpack: Show) -> None:
        self._hooks = pack, unpack
        push_hooks(pack, unpack)

    def _begin(self) -> None:
        loop, kind, memory = self._loop, self._kind, self._ground.memory
        put_back_if_left()
        if loop.hard:
            if memory is None:
                raise StepError("hard=True is for steps on CUDA, and nothing is there yet; leave it out on a CPU")
            # The step that verifies has parts of true values besides those computed again.
            self._ground.cap(None if self._state == "verify" else loop.limit_bytes)
        latest = loop.measured.latest
        grows = latest is None or latest.state != "verify"  # true values never come again
        settle(loop.tiers, kind.places_in if kind is not None else None, self._ground.device, grows=grows)
        if kind is None or kind.script is None or kind.plan is None:
            self._observe()
        else:
            library = loop.kinds.library
            if loop.tunes_allocator:
                self._turn = held_bytes.begin()
            kind.scrutiny.step_begins(kind, is_weighed=self._turn is not None, on_cpu=memory is None)
            is_light = self._state == "idle" and not kind.scrutiny.claim_close_look(kind, library)
            if is_light and not loop.parts.is_due(len(loop.measured)):
                self._light = LightWatch(next(iter(kind.step.saved), None))
                self._push_hooks(self._light.pack, self._light.unpack)
            else:
                self._conduct(kind, kind.script, kind.plan, library)
        if kind is not None and self._state in TRUSTED_STATES and loop.tunes_allocator:
            self._places = kind.rehearsed
            self._places.begin(rehearses=self._meter is None)  # under a mode, as a meter is, some ops take other blocks
        elif loop.tunes_allocator:
            allocator.leave_regions()

    def _conduct(self, kind: Kind, script: Script, plan: Plan, library: KnownScripts) -> None:
        loop, memory = self._loop, self._ground.memory
        trims = plan.binds and not kind.rehearsed.serves
        self._conductor = Conductor(
            script,
            library,
            loop.tier,
            SafePolicy(plan.limit_bytes, loop.tier, other_bytes=_assumed_bytes(plan), memory=memory),
            truth=Truth() if self._state == "verify" else None,
            new_truth=functools.partial(_new_truth, loop, self._ground),
            trimmer=self._trimmer(plan.peak_bytes - plan.resting_bytes) if trims else None,
            clock=self._ground.clock if self._state == "planned" and kind.is_timed else None,
        )
        is_trusted = self._state in TRUSTED_STATES
        counts = is_trusted and (kind.scrutiny.claim_count(kind) or loop.claim_count_of_parts())
        if self._state == "audit" or counts:
            self._meter = PeakMeter(loop.tiers.values()) if memory is None else AllocatedMeter(memory)
            self._meter.enter()
        self._push_hooks(self._conductor.pack, self._conductor.unpack)
        self._conductor.start()

    def _observe(self) -> None:
        loop = self._loop
        again = bool(loop.kinds)
        if loop.tunes_allocator:
            loop.allocator_lease.take(exact=not again)
        probe = allocator.arena_probe() if loop.tunes_allocator and again else None
        memory = self._ground.memory
        note = functools.partial(loop.tier().expect, self._ground.device)
        first = len(loop.kinds) <= 1
        self._recorder = Recorder(probe, clock=self._ground.clock, memory=memory, collects_all=first, note=note)
        trimmer = None
        latest = loop.kinds.current
        if latest is not None and loop.limit_bytes is not None:
            trimmer = self._trimmer(loop.limit_bytes - latest.step.resting_bytes)
        self._policy = SafePolicy(
            loop.within,
            loop.tier,
            self._recorder,
            trimmer=trimmer,
            memory=memory,
            growth_bytes=loop.kinds.growth_bytes,
            resting_bytes=loop.kinds.resting_bytes,
        )
        loop.kinds.latest_ledger = self._recorder.ledger
        self._push_hooks(self._policy.pack, self._policy.unpack)
        self._recorder.enter()

    def _trimmer(self, above_rest_bytes: int) -> allocator.Trimmer | None:
        """A trimmer for a step that is to have at most so many live bytes above those at rest."""
        loop = self._loop
        if not loop.tunes_allocator:
            return None
        rest = loop.resting_size.before(len(loop.measured))
        return allocator.Trimmer(rest, rest + int(above_rest_bytes * (1 + _RSS_SLACK)))

    @never_compiled
    def __exit__(
        self, error_type: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if sys.is_finalizing():
            return  # with a generator that nobody closed: all goes anyway, and a backward pass would abort the process
        loop, short, late = self._loop, None, None
        if loop.running is not self:
            raise StepError("this step is not under way: it was not entered, or is over")
        try:
            try:
                ended = self._ground.clock.mark()
            finally:  # a device that has failed may not even take the time
                self._take_down()
            late = self._recorder.interrupts.take() if self._recorder is not None else None
            if fault is not None or late is not None or self._is_child():
                short = self._note_out_of_memory(fault) if fault is not None and is_out_of_memory(fault) else None
                forget_failed_backward()
                for tier in loop.tiers.values():
                    tier.drain()
                if self._meter is not None and self._kind is not None and self._state in TRUSTED_STATES:
                    self._kind.scrutiny.count_failed()
            if self._conductor is not None and self._conductor.refused is not None and not self._is_child():
                spare_rewritten(loop, self._conductor, self._conductor.refused)
            if fault is None and late is None and not self._is_child():
                if self._recorder is not None and self._recorder.is_blind:
                    warnings.warn(_BLIND, stacklevel=2)
                learn_from(loop, self._what_ended(ended))
        finally:
            self._end()
        error = late if late is not None and fault is None else short
        if error is not None:
            try:
                raise error from fault
            finally:
                # They and this frame would keep each other, and with them the tensors of the step.
                del error, late, short

    def _note_out_of_memory(self, fault: BaseException) -> BaseException | None:
        """Note that memory ran out. Returns the error to raise; None, for PyTorch's own, if the step ran on an
        unexpected device."""
        if self._policy is not None and not self._ground.follow(self._policy.seen_bytes):
            self._loop.forget_all()
            return None
        ran = self._loop.kinds.running(self._conductor.script) if self._conductor is not None else None
        return self._loop.note_out_of_memory(fault, ran or self._kind)

    def _end(self) -> None:
        """Another step may begin."""
        try:
            self._compiled.close()
        finally:
            self._loop.running = None

    def _take_down(self, *, began: bool = True) -> None:
        """Undo `_begin`, each part of it, whatever becomes of the others; that may not have ``began`` in full."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._take_off_hooks)
            stack.callback(self._leave_places, exact=began)
            if self._meter is not None:
                stack.callback(self._meter.leave)
            if self._recorder is not None:
                stack.callback(self._loop.allocator_lease.retake)
                stack.callback(self._recorder.leave)
            if self._conductor is not None:
                stack.callback(self._conductor.stop)

    def _leave_places(self, *, exact: bool) -> None:
        self._held = held_bytes.end(self._turn)
        if self._places is not None:
            self._places.end(exact=exact and self._went_through() and self._meter is None)

    def _take_off_hooks(self) -> None:
        if self._is_child():
            drop_hooks()
        elif self._thread != threading.get_ident():
            # Nothing can be taken off there from here; it goes by itself as that thread saves something.
            if self._policy is not None:
                self._policy.retire()
            if self._conductor is not None:
                self._conductor.retire(_LEFT_ELSEWHERE)
            raise StepError(
                f"{_LEFT_ELSEWHERE}, and nothing is learnt from it; leave it where it began, as by closing a "
                "generator that yields within it there"
            )
        elif self._hooks is not None:
            take_off(*self._hooks)

    def _is_child(self) -> bool:
        """Whether this is a child that was forked within the step: what it does is no part of the step."""
        return self._process != os.getpid()

    def _what_ended(self, ended: Mark) -> Ended:
        """The step, and what took part in it; ``ended`` is a mark of the device's clock."""
        return Ended(
            state=self._state,
            kind=self._kind,
            began=self._began,
            ended=ended,
            conductor=self._conductor,
            light=self._light,
            recorder=self._recorder,
            policy=self._policy,
            meter=self._meter,
            held=self._held,
            went_through=self._went_through(),
        )

    def _went_through(self) -> bool:
        """Whether the step has taken the blocks that steps of its kind take."""
        if self._conductor is None:
            return self._light is not None and not (self._light.left or self._light.is_empty)
        varies = self._kind is not None and self._kind.varies
        return self._conductor.followed if varies else self._conductor.finished


def _new_truth(loop: Loop, ground: TrainingDevice) -> Truth:
    """What compares in a step that turned out to be of a kind which is still to be verified."""
    if loop.hard:
        ground.cap(None)
    return Truth()


def _assumed_bytes(plan: Plan) -> int:
    """Bytes that a step which left its plan is assumed to have alive besides what is held: rest and working set."""
    return plan.resting_bytes + (plan.limit_bytes - plan.resting_bytes) // 4
