"""Links that have become slower, or faster, than they were when they were measured.

A disk has other users, and a virtual one its moods: it may take twice as long an hour after it was measured. Planned
steps show it: what they moved, and how long that kept each link busy, against what the machine's links say. Where these
differ by much, and steps take longer than their plan says, or could take less, it is time to plan anew.
"""

from __future__ import annotations

import dataclasses
import statistics
from collections.abc import Mapping

import torch

from ebbtide.machine import Link, Machine
from ebbtide.run.tiers.devices import DeviceTiers
from ebbtide.run.tiers.queued import QueuedTier
from ebbtide.run.tiers.transfers import SlowTier, Traffic

FIRST_STEPS = 16
"""Steps to look at before the first judgement; after each change twice as many, since planning takes a second."""
SLOWER = 1.25
"""Links have become slower that take more than so many times as long as known."""
FASTER = 0.67
"""Links have become faster that take less than so many times as long as known. One that was calibrated well takes 0.76
to 1.01 times: transfers that queue save some of the latency."""
SLOWER_STEPS = 1.03
"""Links that are slower matter if steps take at least this many times what was predicted."""

_RAM = torch.device("cpu")


class Drift:
    """Watches the links to ``tiers`` over planned steps. Only tiers with worker threads say how long they were busy.

    Those of a GPU wait for it in between: so of what several devices share, the part of RAM is watched.
    """

    def __init__(self, tiers: Mapping[str, SlowTier]) -> None:
        parts = {
            name: tier.of(_RAM) if isinstance(tier, DeviceTiers) else tier
            for name, tier in tiers.items()
            if tier.kind == "disk"
        }
        self._tiers = {name: tier for name, tier in parts.items() if isinstance(tier, QueuedTier)}
        self._wanted = FIRST_STEPS
        self._late: list[float] = []
        self._before = self._totals()

    def after_step(self, seconds: float, predicted_seconds: float, machine: Machine) -> Machine | None:
        """A planned step took ``seconds``, and ``predicted_seconds`` on ``machine`` by its plan.

        Returns:
            The machine as it is now, if enough steps were seen and it is no more what ``machine`` says; else None.
        """
        self._late.append(seconds / predicted_seconds)
        if len(self._late) < self._wanted:
            return None
        is_late, before = statistics.median(self._late) > SLOWER_STEPS, self._before
        self._late, self._before = [], self._totals()
        moved = {name: _since(before[name], self._before[name]) for name in before}
        now = drifted(machine, moved, is_late=is_late)
        if now is not None:
            self._wanted *= 2
        return now

    def _totals(self) -> dict[str, tuple[Traffic, Traffic]]:
        return {
            name: (dataclasses.replace(tier.written), dataclasses.replace(tier.read_back))
            for name, tier in self._tiers.items()
        }


def drifted(machine: Machine, moved: Mapping[str, tuple[Traffic, Traffic]], *, is_late: bool) -> Machine | None:
    """``machine`` with its links as fast as what was ``moved`` shows; None if they are what they were.

    Args:
        machine: what is known.
        moved: by slow tier, what went out and what came back.
        is_late: whether steps take longer than predicted; if not, slower links do not matter.
    """
    times = {}
    for name, (out, back) in moved.items():
        for link, traffic in ((machine.link(machine.fast, name), out), (machine.link(name, machine.fast), back)):
            predicted = traffic.transfers * link.latency_seconds + traffic.size_bytes / link.bandwidth_bytes_per_second
            if traffic.seconds > 0 and predicted > 0:  # less than a block crosses no link, and takes no time there
                times[link.source, link.target] = traffic.seconds / predicted
    slower = is_late and max(times.values(), default=1.0) > SLOWER
    if not slower and min(times.values(), default=1.0) > FASTER:
        return None
    links = tuple(_scaled(link, times.get((link.source, link.target), 1.0)) for link in machine.links)
    return dataclasses.replace(machine, links=links)


def _scaled(link: Link, times: float) -> Link:
    """``link``, with transfers that take so many times as long, and as much from compute as ever for each byte."""
    return dataclasses.replace(
        link,
        latency_seconds=link.latency_seconds * times,
        bandwidth_bytes_per_second=link.bandwidth_bytes_per_second / times,
        duplex_bytes_per_second=link.duplex_bytes_per_second / times,
        compute_slowdown=min(1.0, link.compute_slowdown / times),
    )


def _since(before: tuple[Traffic, Traffic], now: tuple[Traffic, Traffic]) -> tuple[Traffic, Traffic]:
    out, back = (
        Traffic(b.transfers - a.transfers, b.size_bytes - a.size_bytes, b.seconds - a.seconds)
        for a, b in zip(before, now, strict=True)
    )
    return out, back
