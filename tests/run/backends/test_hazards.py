"""No scenario goes wrong while all waits are there; each wait that is left out makes one of them go wrong."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from ebbtide.run.backends import ComputeStreams
from ebbtide.run.holdings import Holding
from ebbtide.run.tiers import Arena, Load, SlowTier, StagedTier, StreamTier, peer_memory, stream
from ebbtide.run.tiers.stream import StreamSlot
from tests.run.backends.rig import SIZE, Device, close, host_tier
from tests.run.backends.scenarios import SCENARIOS, Scenario, at_random
from tests.run.backends.threads import Temper

SEEDS = 8
"""Ways of the streams to behave in which every scenario must do right."""
MOST_SEEDS = 60
"""And in which a scenario may do right although a wait is missing."""

HOST_WAITS = {
    "StreamTier.write": "a copy out begins before the value is made",
    "StreamSlot.wait": "memory is let go of before the copy out has read it",
    "StreamTier.read": "memory is taken for what comes back while compute reads it; or it is read before it is written",
    "StreamLoad.wait": "a value is used before it has arrived",
    "StreamTier._collect": "memory is let go of while a copy back still writes it",
    "seen_on": "memory goes back to a stream while another reads it",
    "Holding._adopt": "a stream finds a value that another one has waited for",
}

pytestmark = pytest.mark.usefixtures("nothing_left")

Make = Callable[[Device], SlowTier]


def run(scenario: Scenario, seed: int, make: Make, ignored: str = "") -> tuple[list[str], set[str]]:
    """What goes wrong in a scenario, and the waits in it."""
    device = Device(seed, ignored=ignored)
    tier = make(device)
    scenario(device, tier)
    return close(device, tier), device.sites


def found(scenarios: tuple[Scenario, ...], make: Make, ignored: str = "") -> str:
    """The first thing that goes wrong in one of the scenarios, for some seed."""
    for seed in range(MOST_SEEDS):
        for scenario in scenarios:
            faults, _ = run(scenario, seed, make, ignored)
            if faults:
                return faults[0]
    return ""


@pytest.fixture
def staged_tier(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    monkeypatch.setattr(StagedTier, "part_bytes", SIZE // 4)
    return lambda device: StagedTier(tmp_path, device)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_goes_wrong(scenario: Scenario) -> None:
    for seed in range(SEEDS):
        assert run(scenario, seed, host_tier)[0] == [], f"seed {seed}"


def waits(make: Make) -> list[str]:
    """All waits that there are."""
    sites = set().union(*(run(scenario, 0, make)[1] for scenario in SCENARIOS))
    return sorted(where for where in sites if not where.startswith("StreamTier._finish"))


def test_each_wait_is_needed() -> None:
    sites = waits(host_tier)
    assert {where.partition("+")[0] for where in sites} == HOST_WAITS.keys()
    assert [where for where in sites if not found(SCENARIOS, host_tier, where)] == []


def _current_only_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeStreams, "wait", lambda self, event: self.note().wait_event(event))


def _current_only_records(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ComputeStreams, "record", lambda self: (self.note().record_event(),))


def _nobody_expects(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StreamTier, "expect", lambda self, device: self.compute)


def _used_where_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "seen_on", lambda backend, home, storage, like: storage)


def _nobody_shares(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Device, "used_on", lambda self, storage, stream: None)


def _what_leaves_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Holding.share
    monkeypatch.setattr(Holding, "share", lambda self: share(self) if self.slot is None else None)


def _what_comes_back_is_not_shared(monkeypatch: pytest.MonkeyPatch) -> None:
    share = Holding.share
    monkeypatch.setattr(Holding, "share", lambda self: share(self) if self.slot is not None else None)


def _loads_are_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    read = StreamTier.read

    def forgetful(tier: StreamTier, slot: StreamSlot) -> Load:
        load = read(tier, slot)
        slot.unwaited.clear()
        return load

    monkeypatch.setattr(StreamTier, "read", forgetful)


@pytest.mark.parametrize(
    "break_it",
    [
        _current_only_waits,
        _current_only_records,
        _nobody_expects,
        _used_where_it_is,
        _nobody_shares,
        _what_leaves_is_not_shared,
        _what_comes_back_is_not_shared,
        _loads_are_not_kept,
    ],
)
def test_each_other_guard_is_needed(
    break_it: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_it(monkeypatch)
    assert found(SCENARIOS, host_tier)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_nothing_goes_wrong_with_a_disk(scenario: Scenario, staged_tier: Make) -> None:
    for seed in range(SEEDS // 2):
        assert run(scenario, seed, staged_tier)[0] == [], f"seed {seed}"


def test_each_wait_of_both_hops_is_needed(staged_tier: Make) -> None:
    sites = waits(staged_tier)
    assert {where.partition("+")[0] for where in sites} == {
        "StagedTier._store",
        "StagedTier._fetch",
        "seen_on",
        "Holding._adopt",
    }
    assert [where for where in sites if not found(SCENARIOS, staged_tier, where)] == []


def test_what_has_no_place_goes_to_the_disk(staged_tier: Make, tmp_path: Path) -> None:
    overflows = []

    def make(device: Device) -> SlowTier:
        overflows.append(StagedTier(tmp_path, device))
        return StreamTier(device, Arena(torch.UntypedStorage, SIZE, SIZE), overflow=overflows[-1])

    for seed in range(SEEDS):
        assert run(at_random, seed, make)[0] == [], f"seed {seed}"
    assert sum(tier.written_bytes for tier in overflows) > 10 * SIZE


def test_two_devices_at_once() -> None:
    """Each in a thread of its own, with its own streams and its own tier."""
    faults: list[list[str]] = []

    def drive(first: int) -> None:
        faults.extend(run(at_random, seed, host_tier)[0] for seed in range(first, first + SEEDS))

    threads = [threading.Thread(target=drive, args=(100 * index,)) for index in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert faults == [[]] * (2 * SEEDS)


def test_memory_of_a_peer_that_is_still_at_work() -> None:
    """What the peer's kernels still use is not written over by what comes from the other device."""
    for seed in range(SEEDS):
        device, peer = Device(seed), Device(seed, temper=Temper.SLOW)
        former = peer.new(1)
        peer.look(former, 1, "on the peer")
        del former
        tier = StreamTier(device, Arena(peer_memory(peer), SIZE, SIZE), kind="device")
        slot = tier.write(device.new(2))
        device.look(tier.read(slot).wait(), 2, "came back from the peer")
        assert close(device, tier) == [], f"seed {seed}"
        peer.close()
        assert peer.faults == [], f"seed {seed}"


def test_several_threads_of_one_device() -> None:
    """As autograd's threads: they share the tier and its streams, and each has a compute stream of its own."""
    for seed in range(SEEDS // 2):
        device = Device(seed, values=400)
        tier = host_tier(device, places=200)

        def drive(device: Device = device, tier: SlowTier = tier) -> None:
            with device.on(device.new_stream("worker")):
                at_random(device, tier)

        threads = [threading.Thread(target=drive) for _ in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert close(device, tier) == [], f"seed {seed}"
