"""The memories a plan may use, the links between them, and how fast the device computes. Plain records, no torch."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterator
from pathlib import Path
from typing import Any, Literal, get_args

from ebbtide.documents import check_document, read_json, write_json
from ebbtide.errors import RecordError
from ebbtide.fields import typed, wrong_field
from ebbtide.step import MOST_BYTES, MOST_SECONDS

FORMAT = "ebbtide-machine"
VERSION = 1

TierKind = Literal["device", "host", "disk"]
Kernels = Literal["cpu", "cuda"]


@dataclasses.dataclass(frozen=True, slots=True)
class Tier:
    """A memory: the training device, host RAM, or a file on a disk.

    Attributes:
        name: how links and decisions name it.
        kind: what it is.
        capacity_bytes: how much it can take, or None if not known.
    """

    name: str
    kind: TierKind
    capacity_bytes: int | None = None


@dataclasses.dataclass(frozen=True, slots=True)
class Link:
    """A direction of transfer between two tiers: one transfer at a time, in issue order.

    Attributes:
        source, target: names of tiers.
        latency_seconds: fixed time of a transfer.
        bandwidth_bytes_per_second: with the opposite direction idle.
        duplex_bytes_per_second: with the opposite direction busy too.
        compute_slowdown: share of compute speed lost while a transfer runs; 0.1 means that one second of transfer
            costs 0.1 s of compute.
        compute_seconds: compute time that each transfer costs besides, whatever its size.
    """

    source: str
    target: str
    latency_seconds: float
    bandwidth_bytes_per_second: float
    duplex_bytes_per_second: float
    compute_slowdown: float = 0.0
    compute_seconds: float = 0.0

    def seconds(self, size_bytes: int) -> float:
        """How long one transfer of ``size_bytes`` takes, in seconds, with the opposite direction idle."""
        return self.latency_seconds + size_bytes / self.bandwidth_bytes_per_second

    def lost_seconds(self, size_bytes: int) -> float:
        """Seconds of compute that one transfer of ``size_bytes`` costs."""
        return self.compute_seconds + self.compute_slowdown * self.seconds(size_bytes)


@dataclasses.dataclass(frozen=True, slots=True)
class Compute:
    """How fast the training device computes, for `ebbtide.roofline`.

    Attributes:
        kernels: whose choice of ops PyTorch makes on it.
        peak_flops_per_second: pairs of a type (``float32``, ``tfloat32``, ``bfloat16``, ...) and the rate of matrix
            products in it; ``float32`` must be there and stands for types that are not.
        memory_bytes_per_second: bandwidth of the device's memory, reads and writes together.
        launch_seconds: fixed time of an op, however small.
        efficiencies: pairs of a class of ops, as in `ebbtide.roofline.Work.kind`, and the share of the roofline that
            it reaches; a class that is not there reaches all of it.
    """

    kernels: Kernels
    peak_flops_per_second: tuple[tuple[str, float], ...]
    memory_bytes_per_second: float
    launch_seconds: float
    efficiencies: tuple[tuple[str, float], ...] = ()

    @classmethod
    def from_document(cls, document: dict[str, Any]) -> Compute:
        """The record that ``document`` described; rates and shares stand there by name."""
        pairs = {field: tuple(document[field].items()) for field in ("peak_flops_per_second", "efficiencies")}
        return typed(cls(**{**document, **pairs}))

    def document(self) -> dict[str, Any]:
        """The record as what its JSON says."""
        rates, shares = dict(self.peak_flops_per_second), dict(self.efficiencies)
        return {**dataclasses.asdict(self), "peak_flops_per_second": rates, "efficiencies": shares}


@dataclasses.dataclass(frozen=True, slots=True)
class Machine:
    """What a plan is made for: the training device ``fast`` and the slower tiers reachable from it.

    Attributes:
        name: what people call it.
        fast: name of the tier that is the training device's own memory.
        tiers, links: the memories, and the transfers between them.
        compute: how fast the device computes; None where steps are timed on the machine itself.
        sources: for a machine that was described, not measured: where the figures are from.
        replay_seconds: compute time that each op which runs again costs besides its own.
    """

    name: str
    fast: str
    tiers: tuple[Tier, ...]
    links: tuple[Link, ...]
    compute: Compute | None = None
    sources: tuple[str, ...] = ()
    replay_seconds: float = 0.0

    def tier(self, name: str) -> Tier:
        """The tier called ``name``. Raises `RecordError` if there is none."""
        for tier in self.tiers:
            if tier.name == name:
                return tier
        raise RecordError(f"machine {self.name} has no tier {name!r}; it has {', '.join(t.name for t in self.tiers)}")

    def link(self, source: str, target: str) -> Link:
        """The link from ``source`` to ``target``. Raises `RecordError` if there is none."""
        for link in self.links:
            if (link.source, link.target) == (source, target):
                return link
        raise RecordError(f"machine {self.name} has no link from {source!r} to {target!r}")

    def without(self, names: Collection[str]) -> Machine:
        """The same without the slow tiers of these names, and without their links."""
        tiers = tuple(tier for tier in self.tiers if tier.name not in names)
        links = tuple(link for link in self.links if not {link.source, link.target} & set(names))
        return dataclasses.replace(self, tiers=tiers, links=links)

    def slow_tiers(self) -> tuple[Tier, ...]:
        """The tiers that can take values from the training device and give them back, fastest return first."""
        reachable = {link.target for link in self.links if link.source == self.fast}
        returning = {link.source: link for link in self.links if link.target == self.fast}
        tiers = [tier for tier in self.tiers if tier.name in reachable and tier.name in returning]
        return tuple(sorted(tiers, key=lambda tier: -returning[tier.name].bandwidth_bytes_per_second))

    def save(self, path: str | Path) -> None:
        """Write the machine as JSON; gzip-compressed if the name ends in ``.gz``.

        Raises:
            OSError: if the file cannot be written.
        """
        write_json(path, self.document())

    def document(self) -> dict[str, Any]:
        """The machine as what its JSON says."""
        document = {"format": FORMAT, "version": VERSION, **dataclasses.asdict(self), "sources": list(self.sources)}
        return {**document, "compute": None if self.compute is None else self.compute.document()}

    @classmethod
    def load(cls, path: str | Path) -> Machine:
        """Read a machine that `save` wrote.

        Raises:
            RecordError: if the file is missing, malformed, of another version, or describes an impossible machine.
        """
        return cls.from_document(read_json(path, FORMAT, VERSION), str(path))

    @classmethod
    def from_document(cls, document: dict[str, Any], name: str) -> Machine:
        """The machine that `document` described; ``name`` is what errors call it. Raises `RecordError` as `load`."""
        check_document(document, name, FORMAT, VERSION)
        try:
            machine = typed(
                cls(
                    name=document["name"],
                    fast=document["fast"],
                    tiers=tuple(typed(Tier(**tier)) for tier in document["tiers"]),
                    links=tuple(typed(Link(**link)) for link in document["links"]),
                    compute=Compute.from_document(document["compute"]) if document.get("compute") else None,
                    sources=tuple(document.get("sources", ())),
                    replay_seconds=document.get("replay_seconds", 0.0),
                )
            )
        except (KeyError, TypeError, ValueError, AttributeError, RecursionError) as fault:
            advice = "calibrate again, or mend what was written by hand"
            raise RecordError(f"{name}: not a whole machine: {fault!r}; {advice}") from fault
        check_machine(machine, name)
        return machine


def check_machine(machine: Machine, name: str = "machine") -> None:
    """Check that the machine can exist.

    Raises:
        RecordError: naming what cannot be.
    """
    try:
        _check_machine(machine, name)
    except (TypeError, ValueError, AttributeError) as fault:  # made by hand: others have the right types
        raise RecordError(f"{name}: {wrong_field(_records(machine)) or fault}") from fault


def _records(machine: Machine) -> Iterator[Any]:
    """What a machine is made of, it last, as far as it is what it should be."""
    for parts, kind in ((machine.links, Link), (machine.tiers, Tier), ((machine.compute,), Compute)):
        if isinstance(parts, Collection):
            yield from (part for part in parts if isinstance(part, kind))
    yield machine


def _check_machine(machine: Machine, name: str) -> None:
    names = [tier.name for tier in machine.tiers]
    if machine.fast not in names or len(set(names)) != len(names):
        raise RecordError(f"{name}: the fast tier {machine.fast!r} must be one of its tiers, each with its own name")
    for tier in machine.tiers:
        if tier.capacity_bytes is not None and not 0 <= tier.capacity_bytes < MOST_BYTES:
            raise RecordError(f"{name}: the tier {tier.name} has a capacity of {tier.capacity_bytes} bytes")
    for link in machine.links:
        _check_link(link, names, f"{name}: the link {link.source} -> {link.target}")
    if len({(link.source, link.target) for link in machine.links}) != len(machine.links):
        raise RecordError(f"{name}: two of its links lead from one tier to the same other one")
    if not 0 <= machine.replay_seconds < MOST_SECONDS:
        raise RecordError(
            f"{name}: its replay_seconds is {machine.replay_seconds}; it must be >= 0, and < {MOST_SECONDS:.0e}"
        )
    if machine.compute is not None:
        _check_compute(machine.compute, name)


def _check_link(link: Link, tiers: Collection[str], what: str) -> None:
    """Raises `RecordError` for a link that cannot be between these ``tiers``; ``what`` is what it calls the link."""
    if link.source not in tiers or link.target not in tiers:
        raise RecordError(f"{what} names an unknown tier")
    if link.source == link.target:
        raise RecordError(f"{what} leads nowhere: name another tier")
    for rate in (link.bandwidth_bytes_per_second, link.duplex_bytes_per_second):
        if not (math.isfinite(rate) and rate > 0):
            raise RecordError(f"{what} has bandwidth {rate}; it must be > 0")
        if rate < 1:
            raise RecordError(f"{what} has bandwidth {rate}; that is less than a byte per second")
    costs = (link.latency_seconds, link.compute_slowdown, link.compute_seconds)
    if not all(0 <= cost < MOST_SECONDS for cost in costs):
        raise RecordError(
            f"{what} has latency, slowdown and compute seconds {costs}; they must be >= 0, and < {MOST_SECONDS:.0e}"
        )


def _check_compute(compute: Compute, name: str) -> None:
    if compute.kernels not in get_args(Kernels):
        raise RecordError(f"{name}: its kernels are {compute.kernels!r}; they must be 'cpu' or 'cuda'")
    if "float32" not in dict(compute.peak_flops_per_second):
        raise RecordError(f"{name}: its peak_flops_per_second says nothing of float32")
    rates = {"memory_bytes_per_second": compute.memory_bytes_per_second}
    rates |= {f"rate of {dtype}": rate for dtype, rate in compute.peak_flops_per_second}
    rates |= {f"efficiency of {kind}": share for kind, share in compute.efficiencies}
    for what, rate in rates.items():
        if not (math.isfinite(rate) and rate > 0):
            raise RecordError(f"{name}: its {what} is {rate}; it must be > 0")
    if not 0 <= compute.launch_seconds < MOST_SECONDS:
        raise RecordError(
            f"{name}: its launch_seconds is {compute.launch_seconds}; it must be >= 0, and < {MOST_SECONDS:.0e}"
        )
