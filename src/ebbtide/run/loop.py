"""What a budget knows of the training loop that it runs in."""

from __future__ import annotations

import contextlib
import threading
import warnings
from pathlib import Path

from ebbtide.errors import BudgetError, OutOfMemoryError, PlanError
from ebbtide.machine import Machine
from ebbtide.measured import Measurements, StepState
from ebbtide.observe.recorder import Recorder
from ebbtide.plan import plain_peak_bytes
from ebbtide.run import allocator
from ebbtide.run.allocator_lease import AllocatorLease
from ebbtide.run.beginning import may_be_skipped, whole_of
from ebbtide.run.calibrate import machine_for
from ebbtide.run.device import TrainingDevice
from ebbtide.run.drift import Drift
from ebbtide.run.gauges import likely_device
from ebbtide.run.kinds import Kind
from ebbtide.run.known_kinds import KnownKinds
from ebbtide.run.late_counts import LateCounts
from ebbtide.run.links import machine_on
from ebbtide.run.looks import Looks
from ebbtide.run.parts import Parts
from ebbtide.run.roomy import MOST_SIZES, in_place_of, latest_and_largest
from ebbtide.run.solving import tell_of_garbage
from ebbtide.run.tiers import SlowTier

FINAL_STATES = ("planned", "idle")
"""States in which nothing is left to find out."""
TRUSTED_STATES = ("rehearse", *FINAL_STATES)
"""States of steps by whose plan values were compared and bytes were counted, if there was anything to find out so."""
MOST_STRANGERS = 8
"""Kinds that came but once. Where there are more of them, each step may be another one, and a plan of no use: kinds are
planned for once they come again, or all at once if they differ in sizes alone."""


class Loop:
    """The limit, the memories and the kinds of steps of one training loop.

    Args:
        limit_bytes: the limit; None if it is ``fraction`` of a plain peak that is to be observed.
        tiers: slow memories by name.
        spill: directory for which the disk's links are measured, if ``machine`` is not given.
        verify, tune_allocator, hard: as in `Budget`.

    Attributes:
        limit_bytes, tiers, verify, hard: as given; the limit is known once a step was observed.
        compiles: whether what `torch.compile` made runs in steps, as long as the limit can be met so.
        measured: what was measured of the latest steps; its length counts all.
        kinds: the kinds of steps that are known.
        looks: which steps are to be observed.
        parts: steps which leave out some of what is planned for.
        late_counts: which steps are counted as one may go over to another plan.
        allocator_lease: this loop's part in the settings of the allocator of RAM.
        ground: the device that steps run on; None before the first step.
        resting_size: this process's, between steps.
        running: the step under way, if any.
        lock: guards ``running``.
        closed: whether no step may begin any more.
    """

    def __init__(
        self,
        limit_bytes: int | None,
        fraction: float | None,
        tiers: dict[str, SlowTier],
        spill: Path,
        machine: Machine | None,
        *,
        verify: bool,
        tune_allocator: bool,
        hard: bool,
    ) -> None:
        self.limit_bytes = limit_bytes
        self._fraction = fraction
        self._spill = spill
        self.verify = verify
        self.hard = hard
        self.compiles = True
        self._tune_allocator = tune_allocator
        self.allocator_lease = AllocatorLease()
        self._given_machine = machine
        self._measured_machine: Machine | None = None
        self._drift: Drift | None = None
        self.ground: TrainingDevice | None = None
        self.tiers = tiers
        self.measured = Measurements()
        self.kinds = KnownKinds()
        self._too_large: set[int] = set()
        self.looks = Looks()
        self.parts = Parts()
        self.late_counts = LateCounts()
        self.resting_size = allocator.RestingSize()
        self.running: object | None = None
        self.lock = threading.Lock()
        self.closed = False

    @property
    def machine(self) -> Machine:
        """The machine that plans are made for; measured on first use."""
        if (given := self._given_machine) is not None:
            missing = [tier.name for tier in given.slow_tiers() if tier.name not in self.tiers]
            if missing and self.ground is not None:  # before the first step, tiers of devices are not known
                raise PlanError(
                    f"plans for the machine {given.name!r} may move values to {missing[0]!r}, but all that this Budget"
                    f" has is {', '.join(self.tiers)}; give it another machine, or none: then this one is measured"
                )
            return given
        if self._measured_machine is None:
            device = self.ground.device if self.ground is not None else likely_device()
            on_cpu = device.type == "cpu"
            self._measured_machine = machine_for(self._spill) if on_cpu else machine_on(device, self.tiers)
        return self._measured_machine

    @property
    def state(self) -> StepState:
        """What the next step is for: ``observe``, ``verify``, ``audit``, ``rehearse``, and from then on ``planned``, or
        ``idle`` if nothing binds."""
        looks = self.looks.are_due(len(self.measured))
        return "observe" if looks or self.expected is None else self.expected.state

    @property
    def settled(self) -> bool:
        """Whether the next step runs as all later ones will."""
        return self.state != "observe" and self.expected is not None and self.expected.settled

    @property
    def expected(self) -> Kind | None:
        """The kind by whose plan to run the next step."""
        return self.kinds.expected_at(len(self.measured))

    @property
    def _latest(self) -> int:
        """Number of the step that was measured last."""
        return len(self.measured) - 1

    def close(self) -> None:
        """Give back files, threads and the allocator's settings, each of them, whatever becomes of the others."""
        if not self.closed:
            self.closed = True
            with contextlib.ExitStack() as stack:
                stack.callback(self.allocator_lease.give_back)
                if self.ground is not None:
                    stack.callback(self.ground.cap, None)
                for tier in reversed(self.tiers.values()):
                    stack.callback(tier.close)
                    stack.callback(tier.drain)

    def tier(self, name: str = "") -> SlowTier:
        """The tier of that name; without one the first, which has the others behind it."""
        if not name:
            return next(iter(self.tiers.values()))
        if name not in self.tiers:
            raise PlanError(f"the plan moves values to {name!r}; this Budget has {', '.join(self.tiers)}")
        return self.tiers[name]

    @property
    def tunes_allocator(self) -> bool:
        """Whether to have a part in the allocator of RAM: it has none in steps elsewhere."""
        return self._tune_allocator and (self.ground is None or self.ground.device.type == "cpu")

    @property
    def within(self) -> int | None:
        """The limit, or what fits if that is less."""
        return self.ground.within(self.limit_bytes) if self.ground is not None else self.limit_bytes

    def forget_all(self) -> None:
        """What was learnt was learnt on another device."""
        self.allocator_lease.give_back()
        self.kinds.forget_all()
        self._measured_machine = self._drift = None

    def note_out_of_memory(self, fault: BaseException, kind: Kind | None) -> OutOfMemoryError:
        """Note that memory ran out in a step of ``kind``: the next one is observed. Returns the error to raise."""
        assert self.ground is not None
        error = self.ground.note_out_of_memory(fault, kind.plan if kind is not None else None, self.limit_bytes)
        if kind is not None:
            kind.forget_plan()
        self.looks.take_another()
        return error

    def watch_links(self, kind: Kind, seconds: float) -> None:
        """A step of ``kind`` ran as planned: see whether the links still are what they were when they were measured."""
        is_timed = kind.pace.done or kind.knows_durations
        if self._given_machine is not None or kind.plan is None or not kind.plan.binds or not is_timed:
            return
        if self._drift is None:
            self._drift = Drift(self.tiers)
            return
        machine = self._drift.after_step(seconds, kind.plan.seconds, self.machine)
        if machine is not None:
            self._measured_machine = machine
            for known in self.kinds.values():
                if known.state == "planned":
                    known.plan_again(machine)

    def learn(self, recorder: Recorder) -> None:
        """A step was observed: plan it, or take it as a second look at a known kind."""
        step, captures_all = recorder.finish(), recorder.captures_all
        # Evaluation before the first training step: a percentage is not of its peak, and it has no limit itself.
        tells_limit = self.limit_bytes is not None or bool(step.saved) or step.has_backward_pass
        if tells_limit:
            self.looks.note_observed()
        seen = Kind(step, verify=self.verify, captures_all=captures_all, keeps_graphs=recorder.keeps_graphs)
        kind = self._find_unplanned(seen)
        if kind is None:
            self.looks.note_nothing_new()
            return
        self.looks.note_new_kind()
        kind.observed_again(step, captures_all=captures_all)
        if not tells_limit or (self.looks.left > 0 and (len(self.kinds) == 1 or self.limit_bytes is None)):
            return  # look once more, without the page faults of the first time
        limit_bytes = self._find_limit()
        if limit_bytes is None or self._try_leave_to_another(kind, alike=True):
            return
        if may_be_skipped(kind, self.kinds.values()) and self.looks.claim_one_for_skipped():
            return
        is_one_of_many = self._is_one_of_many(kind)
        if self._try_shared_plan(kind, is_one_of_many) or is_one_of_many:
            self.looks.have_enough()
            return
        self._plan(kind, limit_bytes, recorder)

    def _find_unplanned(self, seen: Kind) -> Kind | None:
        """Note that the latest step was of the kind ``seen``, or of one that has room for it. Returns the kind that is
        to be planned for; None if its steps run by the plan that there is."""
        roomy = next((known for known in self.kinds.values() if known.has_room_for(seen)), None)
        if roomy is not None:
            self.kinds.met(roomy, self._latest)
            return None
        kind = self.kinds.setdefault(seen.key, seen)
        self.kinds.met(kind, self._latest)
        if kind.plan is not None:
            kind.note_observation(seen.step)
            # In calls of what was compiled, and in transforms, a plan's capture mode must not go on and off.
            if not kind.has_changed and (kind.captures_all or not seen.captures_all):
                return None
            kind.forget_plan()
        return kind

    def _is_one_of_many(self, kind: Kind) -> bool:
        """Whether ``kind`` came but once, as more others did than are planned for each by itself."""
        strangers = sum(known.comings.count == 1 for known in self.kinds.values())
        return kind.comings.count == 1 and strangers > MOST_STRANGERS

    def _plan(self, kind: Kind, limit_bytes: int, recorder: Recorder) -> None:
        """Plan for ``kind``, which ``recorder`` has observed, or else leave its steps to another, or run them
        uncompiled. Raises `BudgetError` if none of these is possible."""
        try:
            kind.make_plan(self.machine, limit_bytes)
        except BudgetError as error:
            if self._try_leave_to_another(kind, alike=False):
                return
            if not self.compiles or not recorder.runs_compiled:
                tell_of_garbage(error, recorder.storages.garbage_bytes())
                raise
            self._stop_compiling(error)
        else:
            self.looks.have_enough()

    def _find_limit(self) -> int | None:
        """The limit of the next plan. A percentage is of the largest plain peak of the observed steps that have a
        backward pass; while none has, of those that there are, and is not fixed by that. None if they hold nothing."""
        if self.limit_bytes is None:
            assert self._fraction is not None
            # Of all that was seen: the second step may be a short batch, or one that was left out.
            observed = [step for kind in self.kinds.values() for step in kind.observed]
            training = [step for step in observed if step.has_backward_pass]
            limit_bytes = int(self._fraction * max(map(plain_peak_bytes, training or observed)))
            if not training or not limit_bytes:
                return limit_bytes or None
            self.limit_bytes = limit_bytes
            self.kinds.forget_plans_above(limit_bytes)
        return self.within

    def claim_count_of_parts(self) -> bool:
        """Claim a count, if one is left, for the step that begins now. Returns whether it is counted, as one that may
        leave out some of what is planned for, or go over to another plan."""
        number = len(self.measured)
        is_late = self.late_counts.claim(number)
        return self.parts.claim_count(number) or is_late

    def _try_shared_plan(self, kind: Kind, is_one_of_many: bool) -> bool:
        """Make one plan for all steps that differ from those of ``kind`` in sizes alone, where what differs is a
        trifle, where there are many, or where there is such a plan already. Returns whether it serves from now on."""
        limit_bytes = self.within
        like = [known for known in self.kinds.values() if known.structure == kind.structure]
        if limit_bytes is None or kind.structure in self._too_large or len(like) < 2:
            return False
        samples = latest_and_largest([step for known in like for step in known.observed])
        is_many = is_one_of_many or len(like) > MOST_SIZES or any(known.samples for known in like)
        for step in in_place_of(samples, limit_bytes, is_many):
            flags = {"captures_all": kind.captures_all, "keeps_graphs": kind.keeps_graphs}
            one = Kind(step, samples, verify=self.verify, **flags)
            one.banned = frozenset[int]().union(*(known.banned for known in like))
            try:
                one.make_plan(self.machine, limit_bytes)
            except BudgetError:
                continue
            one.inherit(like, self.machine)
            for known in like:
                self.kinds.forget(known)
            self.kinds[one.key] = one
            self.kinds.met(one, self._latest)
            return True
        if is_many:  # with so much room there is no plan: each runs by its own, or by the safe policy
            self._too_large.add(kind.structure)
        return False

    def _try_leave_to_another(self, kind: Kind, *, alike: bool) -> bool:
        """Forget ``kind`` where its steps save something, have no backward pass and are but the beginnings of others,
        as those of skipped batches are: they run by the plans of these as far as they come. Returns whether it was so.

        Args:
            kind: the kind of the observed step.
            alike: whether what it saves has to be what the others begin with; else there is no plan for it otherwise.
        """
        is_skipped = kind.step.saved and not kind.step.has_backward_pass
        whole = whole_of(kind, self.kinds.values(), alike=alike) if is_skipped else None
        if whole is None:
            return False
        self.kinds.forget(kind)
        self.kinds.met(whole, self._latest)
        if whole.plan is None:
            self.looks.take_another()
        else:
            self.looks.note_nothing_new()
        return True

    def _stop_compiling(self, error: BudgetError) -> None:
        """A compiled graph needs all that it reads at once; its ops, one by one, may do with less."""
        warnings.warn(
            f"with what torch.compile made, {error}. From now on steps run uncompiled, so that each of their ops "
            "can be planned for. To have them compiled, compile the model's blocks instead of the whole model",
            stacklevel=2,
        )
        self.compiles = False
        self.kinds.forget_all()
        self.looks.begin_anew()
