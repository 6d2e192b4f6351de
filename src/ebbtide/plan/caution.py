"""How far a plan trusts what it predicts: measured transfers vary, and systems see bytes that no plan counts."""

from __future__ import annotations

import dataclasses
import math

import numpy as np

from ebbtide.machine import Machine


@dataclasses.dataclass(frozen=True, slots=True)
class Caution:
    """What a plan leaves free around its transfers and below its budget.

    The defaults are for plans that really run, over links as steady as a device's; `of` says what suits a machine.

    Schedules leave this much time free around each transfer, and for those that it queues behind, too: compute that is
    quicker than when it was observed does to a queue what a slower link would. Plans are compared as if each transfer
    took longer by half of it: a plan that is a little faster if all goes as predicted, and much slower if not, is not
    the better one.

    Attributes:
        out_share, out_seconds: how much longer than predicted a copy out may take, as a share of its time and in
            seconds: what does not depend on size, threads waking up, the clock of a busy machine.
        in_share, in_seconds: the same for a copy back.
        physical_share: what the system may see above rest, workspaces of ops included, as a multiple of the budget
            above rest, wherever the step allows it. The last hundredth is for what nobody plans: the allocator's own
            slack, transfer buffers.
        near_share: how near the lower bound a plan is good enough for the search to stop.
    """

    out_share: float = 0.1
    out_seconds: float = 3e-5
    in_share: float = 0.1
    in_seconds: float = 3e-5
    physical_share: float = 0.99
    near_share: float = 1e-4

    @classmethod
    def of(cls, machine: Machine, *, timed: bool = False) -> Caution:
        """What a plan for ``machine`` leaves free: more than usual where everything that moves goes to disks.

        A disk may take twice as long some minutes later. And the steps of a CPU are observed with page faults and with
        the observer in them, 10 to 30 % too long, so that compute seems to hide more transfers than it does. On links
        twice as slow as measured, ResNet-50 at a quarter took 1.140 times plain with this much left free, and 1.280
        times with as much as usual.

        But time left free is memory that is full, and then blocks do not pack. So half as much is left free where the
        durations are those of planned steps, which are more exact.

        Args:
            machine: whose links they are.
            timed: whether the step's durations are those of planned steps.
        """
        if all(tier.kind == "disk" for tier in machine.slow_tiers()):
            share = TIMED_DISK_SHARE if timed else DISK_SHARE
            return cls(share, DISK_OUT_SECONDS, share, DISK_IN_SECONDS)
        return cls()

    def eased(self, share: float) -> Caution:
        """A caution that leaves only this ``share`` of the time around transfers free, and is the same otherwise."""
        return dataclasses.replace(
            self,
            out_share=share * self.out_share,
            out_seconds=share * self.out_seconds,
            in_share=share * self.in_share,
            in_seconds=share * self.in_seconds,
        )

    @property
    def allows_for_lateness(self) -> bool:
        """Whether a transfer may take longer than predicted."""
        return any((self.out_share, self.out_seconds, self.in_share, self.in_seconds))

    def ceiling_bytes(self, limit_bytes: int, resting_bytes: int) -> int:
        """Most bytes that the system may see within the budget ``limit_bytes``, those at rest included."""
        if math.isinf(self.physical_share):
            return NO_CEILING
        return resting_bytes + int(self.physical_share * max(0, limit_bytes - resting_bytes))


DISK_OUT_SECONDS = 1e-3
"""`Caution.out_seconds` where everything that moves goes to disks."""
DISK_IN_SECONDS = 2e-3
"""`Caution.in_seconds` where everything that moves goes to disks."""
DISK_SHARE = 1.5
"""`Caution.out_share` and `Caution.in_share` where everything that moves goes to disks."""
TIMED_DISK_SHARE = 0.75
"""`Caution.out_share` and `Caution.in_share` where everything that moves goes to disks, and the step's durations are
those of planned steps."""
EXPECTED = 0.5
"""Where plans are compared, transfers are taken to be longer by this share of what caution allows for. On recorded
steps with a disk, plans chosen with a half took as long as those chosen with nothing if all went as predicted, and on
the average 5-13 % less time beyond plain where transfers took 10-40 % longer."""
NO_CEILING = int(np.iinfo(np.int64).max // 4)
"""More bytes than there are; sums of some of them still are numbers."""

NO_CAUTION = Caution(0.0, 0.0, 0.0, 0.0, math.inf, 1e-6)
"""Predictions are exact and only the budget counts: the rules of the lower bound and of the published policies."""
