"""The device that the steps of a budget run on: where that is, how its times are read, how much it can give."""

from __future__ import annotations

import weakref
from collections.abc import Mapping

import torch

from ebbtide.decisions import Plan
from ebbtide.errors import OutOfMemoryError
from ebbtide.observe.clock import Clock
from ebbtide.run.gauges import DeviceMemory, gauges_of, likely_device
from ebbtide.run.readings import Readings
from ebbtide.run.shortage import out_of_memory

MORE_ELSEWHERE = 1.25
"""Another device has to have so many times the bytes to be the one: of a model on two of them, now one, now the other
would be, and each time nothing is known."""


class TrainingDevice:
    """The device that a budget's steps run on. Before the first step it is guessed; an observed step shows which it is.

    Attributes:
        readings: times of steps there that were not read yet.
        fits_bytes: the largest budget that may fit, as far as running out of memory has shown; None if it never did.
    """

    def __init__(self) -> None:
        self.fits_bytes: int | None = None
        self._cap_bytes: int | None = None
        self._uncap: weakref.finalize[..., TrainingDevice] | None = None
        self._move(likely_device())

    def _move(self, device: torch.device) -> None:
        self._gauges = gauges_of(device)
        self.readings = Readings(self._gauges.clock)

    @property
    def device(self) -> torch.device:
        """The device."""
        return self._gauges.device

    @property
    def clock(self) -> Clock:
        """What steps are timed by."""
        return self._gauges.clock

    @property
    def memory(self) -> DeviceMemory | None:
        """The device's memory; None on a CPU, where a budget counts the storages that a step touches or makes."""
        return self._gauges.memory

    def follow(self, seen_bytes: Mapping[torch.device, int]) -> bool:
        """Expect the next step where an observed one ran. Returns whether that is where it was expected.

        Args:
            seen_bytes: by device, bytes that autograd saved there.
        """
        device = max(seen_bytes, key=lambda device: seen_bytes[device], default=self.device)
        if device != self.device and seen_bytes[device] > MORE_ELSEWHERE * seen_bytes.get(self.device, 0):
            self.cap(None)
            self.fits_bytes = None
            self._move(device)
            return False
        return True

    def cap(self, limit_bytes: int | None) -> None:
        """Let the allocator refuse what goes beyond ``limit_bytes``, as long as this lives; None: what goes beyond the
        device."""
        if self.memory is not None and limit_bytes != self._cap_bytes:
            if self._uncap is None:
                self._uncap = weakref.finalize(self, self.memory.cap, None)
                self._uncap.atexit = False
            self.memory.cap(limit_bytes)
            self._cap_bytes = limit_bytes
            if limit_bytes is None:
                self._uncap.detach()
                self._uncap = None

    def within(self, limit_bytes: int | None) -> int | None:
        """``limit_bytes``, or what fits if that is less."""
        return min((size for size in (limit_bytes, self.fits_bytes) if size is not None), default=None)

    def note_out_of_memory(self, fault: BaseException, plan: Plan | None, limit_bytes: int | None) -> OutOfMemoryError:
        """Note that memory ran out, as ``fault`` says, in a step with this plan and budget, if any. Returns the error
        to raise."""
        error = out_of_memory(fault, self.device, self.memory, plan, limit_bytes)
        self.fits_bytes = self.within(error.fits_bytes)
        return error
