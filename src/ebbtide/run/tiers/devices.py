"""One slower memory for several devices, each with streams and places of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from ebbtide.machine import TierKind
from ebbtide.run.backends.base import ComputeStreams
from ebbtide.run.tiers.transfers import Load, Slot, SlowTier


class DeviceTiers:
    """Sends every storage to the tier of its device, which is made when the first one comes.

    Args:
        name, kind: how machines and plans name this tier, and what it is.
        make: makes the tier of a device.
        expect: see `SlowTier.expect`; it makes no tier.
    """

    def __init__(
        self,
        name: str,
        kind: TierKind,
        make: Callable[[torch.device], SlowTier],
        expect: Callable[[torch.device], ComputeStreams | None],
    ) -> None:
        self.name = name
        self.kind = kind
        self.expect = expect
        self._make = make
        self._tiers: dict[torch.device, SlowTier] = {}
        self._lock = threading.Lock()

    def of(self, device: torch.device) -> SlowTier:
        """The tier of ``device``. Raises `SpillError` if it cannot be made."""
        tier = self._tiers.get(device)
        if tier is None:
            with self._lock:
                if device not in self._tiers:
                    self._tiers[device] = self._make(device)
                tier = self._tiers[device]
        return tier

    @property
    def made(self) -> tuple[SlowTier, ...]:
        """The tiers of the devices that there have been."""
        return tuple(self._tiers.values())

    def write(self, storage: torch.UntypedStorage) -> Slot:
        """See `SlowTier.write`."""
        return self.of(storage.device).write(storage)

    def read(self, slot: Slot, into: torch.UntypedStorage | None = None) -> Load:
        """See `SlowTier.read`."""
        return self.of(slot.device).read(slot, into)

    def free(self, slot: Slot) -> None:
        """See `SlowTier.free`."""
        self.of(slot.device).free(slot)

    def drain(self) -> None:
        """See `SlowTier.drain`."""
        for tier in self.made:
            tier.drain()

    def close(self) -> None:
        """See `SlowTier.close`."""
        for tier in self.made:
            tier.close()
