"""`Budget`: the one object that users see."""

from __future__ import annotations

import dataclasses
import tempfile
import threading
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ebbtide.decisions import Plan
from ebbtide.errors import OutOfMemoryError, PlanError, StepError
from ebbtide.machine import Machine
from ebbtide.measured import Measured
from ebbtide.observe.recorder import Recorder
from ebbtide.plan import plain_peak_bytes
from ebbtide.run import allocator
from ebbtide.run.calibrate import machine_for
from ebbtide.run.conductor import Conductor
from ebbtide.run.device import TrainingDevice
from ebbtide.run.gauges import likely_device
from ebbtide.run.hooks import LightWatch, forget_failed_backward, pop_hooks, push_hooks
from ebbtide.run.kinds import Kind
from ebbtide.run.meter import AllocatedMeter, PeakMeter
from ebbtide.run.native import arena_library
from ebbtide.run.rehearsed import Rehearsed
from ebbtide.run.safe import SafePolicy
from ebbtide.run.shortage import is_out_of_memory
from ebbtide.run.tiers import SlowTier
from ebbtide.run.tiers.choose import machine_on, settle, tiers_for
from ebbtide.run.verify import Truth
from ebbtide.step import Step
from ebbtide.units import parse_bytes, parse_fraction

if TYPE_CHECKING:
    from ebbtide.report.summary import Summary

_FIRST_LOOKS = 2
"""Steps to observe first: time and workspace of each op are read in the second, with no page faults in them."""
_LOOKS_AFTER_LEAVING = 4
"""Steps to observe at most after one that left its plan, until an unknown kind has been seen."""
FINAL_STATES = ("planned", "idle")
"""States in which nothing is left to find out."""
_SETTLING_STEPS = 5
_STEPS_BETWEEN_RESTS = 64
"""How often the resident size at rest is measured anew, in steps."""
_RSS_SLACK = 0.06
"""Resident bytes above rest may exceed the planned ones by this share before the heap's holes are given back."""


class Budget:
    """Runs training steps within a number of bytes, with gradients bit for bit those of plain PyTorch.

    The first two steps are observed (under a safe policy that keeps them within the limit too), then a plan is made;
    if it computes values again, the next step verifies them; from then on steps run as planned.

    Args:
        limit: an int, ``"6GiB"``, or ``"50%"`` of the plain peak. On a CPU, bytes of all tensors alive that a step
            touches or makes, parameters and gradients included. On CUDA, all bytes that PyTorch's allocator has handed
            out on the step's device: optimizer state and workspaces, too.
        spill: directory on a disk for tensors that leave; the system's directory for temporary files by default.
        verify: compare every value that is computed again with the truth, once.
        tune_allocator: let glibc's allocator keep its pages while this budget lives. See `ebbtide.run.allocator`.
        machine: the links to plan for; measured on first use by default.
        host: pinned host memory for tensors that leave CUDA devices, at most; half of what is available by default.
        checksum: check the bytes that come back from the disk.
        hard: on CUDA, let PyTorch's allocator refuse, until this budget is closed, what goes beyond the limit, whoever
            asks for it; not in the step that verifies. It counts whole segments: leave room for the holes in them.

    Raises:
        ValueError: if ``limit`` or ``host`` is not a size.
        SpillError: if ``spill`` cannot be used.
    """

    def __init__(
        self,
        limit: int | str,
        *,
        spill: str | Path | None = None,
        verify: bool = True,
        tune_allocator: bool = True,
        machine: Machine | None = None,
        host: int | str | None = None,
        checksum: bool = False,
        hard: bool = False,
    ) -> None:
        self._fraction = parse_fraction(limit) if isinstance(limit, str) else None
        self._limit_bytes = parse_bytes(limit) if self._fraction is None else None
        self._spill = Path(spill) if spill is not None else Path(tempfile.gettempdir())
        self._verify = verify
        self._tune_allocator = tune_allocator
        self._given_machine = machine
        self._measured_machine: Machine | None = None
        self._ground: TrainingDevice | None = None
        self._hard = hard
        self.tiers: dict[str, SlowTier] = tiers_for(
            self._spill, checksum=checksum, host_bytes=parse_bytes(host) if host is not None else None
        )
        self.measured: list[Measured] = []
        self._kinds: dict[int, Kind] = {}
        self._current: Kind | None = None
        self._observations_left = _FIRST_LOOKS
        self._rest_rss_bytes = 0
        self._running: _Running | None = None
        self._lock = threading.Lock()
        self._closed = False

    # --- what users read -----------------------------------------------------------------------------------------

    @property
    def limit_bytes(self) -> int | None:
        """The limit in bytes; None while it is a percentage of a peak that was not observed yet."""
        return self._limit_bytes

    @property
    def machine(self) -> Machine:
        """The machine that plans are made for; measured on first use."""
        if self._given_machine is not None:
            return self._given_machine
        if self._measured_machine is None:
            device = self._ground.device if self._ground is not None else likely_device()
            on_cpu = device.type == "cpu"
            self._measured_machine = machine_for(self._spill) if on_cpu else machine_on(device, self.tiers)
        return self._measured_machine

    @property
    def plan(self) -> Plan | None:
        """The plan of the latest kind of step, or None while it is observed."""
        return self._current.plan if self._current is not None else None

    @property
    def observed(self) -> Step | None:
        """The latest kind of step, as observed."""
        return self._current.step if self._current is not None else None

    @property
    def plain_peak_bytes(self) -> int | None:
        """The peak of that step without a plan."""
        return self.plan.plain_peak_bytes if self.plan is not None else None

    @property
    def state(self) -> str:
        """What the next step is for: ``observe``, ``verify``, ``audit``, ``rehearse``, and from then on ``planned``, or
        ``idle`` if nothing binds."""
        return "observe" if self._observations_left > 0 or self._current is None else self._current.state

    def report(self) -> Summary:
        """What was planned and measured, to print.

        Raises:
            StepError: if no step has been planned yet.
        """
        # The report is a floor above; this is the only call upwards, for the user's convenience.
        from ebbtide.report.summary import summarise

        if self._ground is not None:
            self._ground.readings.collect(wait=True)
        kind = self._current
        if kind is None or kind.plan is None:
            raise StepError("nothing to report yet: run two steps under `with budget.step():` first")
        planned = sorted(m.seconds for m in self.measured if m.state == kind.state and m.seconds and not m.left)
        seconds = planned[len(planned) // 2] if planned else None
        measured = Measured(kind.state, seconds, kind.audited_peak_bytes)
        return summarise(kind.step, self.machine, kind.bounded_plan(self.machine), measured)

    # --- steps ---------------------------------------------------------------------------------------------------

    def step(self) -> _Running:
        """A context in which one training step, forward and backward, runs within the budget.

        Raises:
            StepError: on entry, if another step of this budget is under way, or the budget was closed.
            BudgetError: on exit of an observed step, if no plan can meet the limit.
            SpillError: inside, if tensors cannot be moved.
            OutOfMemoryError: on exit, if memory ran out inside.
        """
        return _Running(self)

    def close(self) -> None:
        """Give back files, threads and the allocator's settings. Saved tensors that are away are lost."""
        if not self._closed:
            self._closed = True
            for tier in self.tiers.values():
                tier.drain()
                tier.close()
            if self._ground is not None:
                self._ground.cap(None)
            if self._tune:
                allocator.set_default()

    def __enter__(self) -> Budget:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _tier(self, name: str = "") -> SlowTier:
        """The tier of that name; without one the first, which has the others behind it."""
        if not name:
            return next(iter(self.tiers.values()))
        if name not in self.tiers:
            raise PlanError(f"the plan moves values to {name!r}; this Budget has {', '.join(self.tiers)}")
        return self.tiers[name]

    @property
    def _tune(self) -> bool:
        """Whether to have a part in the allocator of RAM: it has none in steps elsewhere."""
        return self._tune_allocator and (self._ground is None or self._ground.device.type == "cpu")

    @property
    def _within(self) -> int | None:
        """The limit, or what fits if that is less."""
        return self._ground.within(self._limit_bytes) if self._ground is not None else self._limit_bytes

    def _forget_all(self) -> None:
        """What was learnt was learnt on another device."""
        if self._tune_allocator:
            allocator.set_default()
        self._kinds.clear()
        self._current = self._measured_machine = None

    def _run_short(self, fault: BaseException, kind: Kind | None) -> OutOfMemoryError:
        """Memory ran out in a step of ``kind``: the error to raise. The next step is observed."""
        assert self._ground is not None
        error = self._ground.run_short(fault, kind.plan if kind is not None else None, self._limit_bytes)
        if kind is not None:
            kind.forget_plan()
        self._observations_left = max(1, self._observations_left)
        return error

    def _rest(self) -> int:
        """Resident bytes at rest. To be called as a step begins."""
        # Giving the holes back makes the next step fault them in again: done while things settle, then rarely.
        if len(self.measured) < _SETTLING_STEPS or len(self.measured) % _STEPS_BETWEEN_RESTS == 0:
            allocator.trim()
            self._rest_rss_bytes = allocator.rss_bytes()
        return self._rest_rss_bytes

    def _learn(self, step: Step) -> None:
        """A step was observed: plan it, or take it as a second look at a known kind."""
        self._observations_left -= 1
        kind = self._kinds.setdefault(Kind(step).key, Kind(step))
        self._current = kind
        if kind.plan is not None:
            return
        kind.observed_again(step)
        if self._observations_left > 0 and len(self._kinds) == 1:
            return  # look once more, without the page faults of the first time
        if self._limit_bytes is None:
            assert self._fraction is not None
            self._limit_bytes = int(self._fraction * plain_peak_bytes(step))
        limit_bytes = self._within
        assert limit_bytes is not None
        kind.make_plan(self.machine, limit_bytes, self._verify)
        self._observations_left = 0


class _Running:
    """The context of one step."""

    def __init__(self, budget: Budget) -> None:
        self._budget = budget
        self._recorder: Recorder | None = None
        self._policy: SafePolicy | None = None
        self._conductor: Conductor | None = None
        self._ground: TrainingDevice
        self._meter: PeakMeter | AllocatedMeter | None = None
        self._truth: Truth | None = None
        self._light: LightWatch | None = None
        self._places: Rehearsed | None = None
        self._kind: Kind | None = None
        self._state = "observe"
        self._began: Any = None

    def __enter__(self) -> None:
        budget = self._budget
        with budget._lock:
            if budget._closed:
                raise StepError("this Budget was closed; make a new one")
            if budget._running is not None:
                raise StepError(
                    "a step of this Budget is under way already (nested, or in another thread); "
                    "leave it first, or use one Budget for each loop"
                )
            budget._running = self
        try:
            self._ground = budget._ground = budget._ground or TrainingDevice()
            self._state = budget.state
            self._kind = None if self._state == "observe" else budget._current
            self._begin()
        except BaseException:
            budget._running = None
            raise
        self._began = self._ground.clock.mark()

    def _begin(self) -> None:
        budget, kind, memory = self._budget, self._kind, self._ground.memory
        if budget._hard:
            if memory is None:
                raise StepError("hard=True is for steps on CUDA, and nothing is there yet; leave it out on a CPU")
            # The step that verifies holds true values besides those computed again.
            self._ground.cap(None if self._state == "verify" else budget._limit_bytes)
        settle(budget.tiers, kind.places_in if kind is not None else _unplanned, self._ground.device)
        if kind is None or kind.script is None or kind.plan is None:
            self._observe()
        elif self._state == "idle":
            self._light = LightWatch(next(iter(kind.step.saved), None))
            push_hooks(self._light.pack, self._light.unpack)
        else:
            self._truth = Truth() if self._state == "verify" else None
            self._conductor = Conductor(
                kind.script,
                [k.script for k in budget._kinds.values() if k.script is not None and k is not kind],
                budget._tier,
                SafePolicy(kind.plan.limit_bytes, budget._tier, other_bytes=_assumed_bytes(kind.plan), memory=memory),
                self._truth,
                None if kind.places.serves else self._trimmer(kind.plan.peak_bytes - kind.plan.resting_bytes),
                self._ground.clock if self._state == "planned" and not kind.pace.done else None,
            )
            if self._state == "audit":
                self._meter = PeakMeter() if memory is None else AllocatedMeter(memory)
                self._meter.enter()
            push_hooks(self._conductor.pack, self._conductor.unpack)
            self._conductor.start()
        if kind is not None and self._state in ("rehearse", *FINAL_STATES) and budget._tune:
            self._places = kind.places
            self._places.begin()

    def _observe(self) -> None:
        budget = self._budget
        again = bool(budget._kinds)
        if budget._tune:
            allocator.set_tuned() if again else allocator.set_exact()
        probe = allocator.arena_probe() if budget._tune and again else None
        memory = self._ground.memory
        self._recorder = Recorder(probe, clock=self._ground.clock, memory=memory)
        trimmer = None
        if again and budget._limit_bytes is not None and budget.observed is not None:
            trimmer = self._trimmer(budget._limit_bytes - budget.observed.resting_bytes)
        self._policy = SafePolicy(budget._within, budget._tier, self._recorder, trimmer=trimmer, memory=memory)
        push_hooks(self._policy.pack, self._policy.unpack)
        self._recorder.enter()

    def _trimmer(self, above_rest_bytes: int) -> allocator.Trimmer | None:
        """A trimmer for a step that is to have at most so many live bytes above those at rest."""
        budget = self._budget
        if not budget._tune:
            return None
        rest = budget._rest()
        return allocator.Trimmer(rest, rest + int(above_rest_bytes * (1 + _RSS_SLACK)))

    def __exit__(
        self, kind: type[BaseException] | None, fault: BaseException | None, traceback: TracebackType | None
    ) -> None:
        ended = self._ground.clock.mark()
        budget, short = self._budget, None
        try:
            self._take_down()
            if fault is not None:
                if is_out_of_memory(fault):
                    short = budget._run_short(fault, self._kind)
                forget_failed_backward()
                for tier in budget.tiers.values():
                    tier.drain()
            else:
                self._note(ended)
        finally:
            budget._running = None
        if short is not None:
            try:
                raise short from fault
            finally:
                del short  # it and this frame would keep each other, and with them the tensors of the step

    def _take_down(self) -> None:
        if self._conductor is not None:
            self._conductor.stop()
        if self._recorder is not None:
            self._recorder.leave()
        if self._meter is not None:
            self._meter.leave()
        if self._places is not None:
            self._places.end(exact=self._conductor.finished if self._conductor is not None else self._light is not None)
        if self._light is None or self._light.watching:
            pop_hooks()

    def _note(self, ended: Any) -> None:
        budget, kind, conductor = self._budget, self._kind, self._conductor
        left = conductor.left if conductor is not None else self._light.left if self._light is not None else ""
        peak = self._meter.peak_bytes if self._meter is not None else None
        self._time(ended, Measured(self._state, None, peak, left=left))
        if self._recorder is not None and self._policy is not None:
            if self._ground.was_right(self._policy.seen_bytes):
                budget._learn(self._recorder.finish())
            else:
                budget._forget_all()
        elif left:
            budget._observations_left = _LOOKS_AFTER_LEAVING
        elif kind is not None and conductor is not None:
            self._advance(kind, conductor, peak)

    def _time(self, ended: Any, measured: Measured) -> None:
        """Note what was measured, its time as soon as the device is done; and watch the pace of planned steps."""
        budget, kind, conductor = self._budget, self._kind, self._conductor
        script = kind.script if kind is not None and self._watched(kind, measured.left) else None
        number = len(budget.measured)
        budget.measured.append(measured)

        def then(seconds: float, between: list[float]) -> None:
            budget.measured[number] = dataclasses.replace(measured, seconds=seconds)
            # It may have been planned for anew meanwhile.
            if kind is not None and script is not None and kind.script is script:
                kind.watch(budget.machine, between)

        stamps = conductor.stamps if conductor is not None else []
        self._ground.readings.add(self._began, stamps, ended, then)
        self._ground.readings.collect()

    def _watched(self, kind: Kind, left: str) -> bool:
        """Whether the step ran from beginning to end as steps of its kind will, so that its pace tells theirs."""
        conductor = self._conductor
        if left or self._state not in FINAL_STATES:
            return False
        return conductor is None or (conductor.finished and conductor.script is kind.script)

    def _advance(self, kind: Kind, conductor: Conductor, peak: int | None) -> None:
        """Move the kind of step along, if the step ran as planned from beginning to end."""
        budget = self._budget
        for other in budget._kinds.values():
            if other.script is conductor.script:
                budget._current = other
        if not conductor.finished or conductor.script is not kind.script:
            return
        if self._truth is not None:
            kind.state = "audit"
            if self._truth.differing:
                kind.ban(self._truth.differing)
                kind.make_plan(budget.machine, kind.plan.limit_bytes if kind.plan else 0, budget._verify)
        elif self._state == "audit":
            kind.audited_peak_bytes = peak
            if kind.plan is not None and peak is not None and peak > kind.plan.limit_bytes:
                kind.hold_more(peak - kind.plan.peak_bytes)
                kind.make_plan(budget.machine, kind.plan.limit_bytes, budget._verify)
                return
            kind.state = "rehearse" if budget._tune and arena_library() is not None else "planned"
        elif self._state == "rehearse":
            kind.state = "planned"


def _unplanned(_tier: str) -> None:
    """Nothing is known of what comes."""


def _assumed_bytes(plan: Plan) -> int:
    """Bytes that a step which left its plan is assumed to have alive besides what is held: rest and working set."""
    return plan.resting_bytes + (plan.limit_bytes - plan.resting_bytes) // 4
