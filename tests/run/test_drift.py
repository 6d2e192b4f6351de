"""A disk that has become slower or faster since it was measured is seen, and planned for anew."""

from __future__ import annotations

import contextlib
import time
from pathlib import Path

import pytest
import torch

import ebbtide
from ebbtide.decisions import Offload
from ebbtide.machine import Machine
from ebbtide.run.drift import FASTER, SLOWER, Drift, drifted
from ebbtide.run.tiers.disk import DiskTier
from ebbtide.run.tiers.transfers import QueuedLoad, Slot, Traffic
from tests.run.harness import FAST_DISK, compare
from tests.run.programs import Chain

MIB = 1 << 20
DISK = Machine(
    "paper",
    "ram",
    FAST_DISK.tiers,
    (ebbtide.Link("ram", "disk", 1e-3, 1e9, 5e8, 0.1), ebbtide.Link("disk", "ram", 2e-3, 5e8, 5e8, 0.3)),
)


def moved(out_times: float, in_times: float) -> dict[str, tuple[Traffic, Traffic]]:
    """Ten transfers each way of 100 MB in all, that took so many times as long as the links of `DISK` say."""
    return {"disk": (Traffic(10, 10**8, 0.11 * out_times), Traffic(10, 10**8, 0.22 * in_times))}


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("times", [FASTER + 0.01, 1.0, SLOWER - 0.01])
def test_links_are_what_they_were(times: float, is_late: bool) -> None:
    assert drifted(DISK, moved(times, 1.0), is_late=is_late) is None
    assert drifted(DISK, moved(1.0, times), is_late=is_late) is None
    assert drifted(DISK, {}, is_late=is_late) is None


def test_slower_links_matter_where_steps_are_late() -> None:
    assert drifted(DISK, moved(1.1, 3.0), is_late=False) is None
    machine = drifted(DISK, moved(1.1, 3.0), is_late=True)
    assert machine is not None
    out, back = machine.links
    assert (out.latency_seconds, back.latency_seconds) == pytest.approx((1.1e-3, 6e-3))
    assert (out.bandwidth_bytes_per_second, back.bandwidth_bytes_per_second) == pytest.approx((1e9 / 1.1, 5e8 / 3))
    assert (out.compute_slowdown, back.compute_slowdown) == pytest.approx((0.1 / 1.1, 0.1))
    assert (machine.name, machine.tiers) == (DISK.name, DISK.tiers)
    assert drifted(machine, moved(1.1, 3.0), is_late=True) is None


def test_faster_links_matter_in_any_case() -> None:
    machine = drifted(DISK, moved(1.0, 0.5), is_late=False)
    assert machine is not None
    assert machine.link("disk", "ram").bandwidth_bytes_per_second == pytest.approx(1e9)


def test_traffic_is_what_keeps_a_link_busy(tmp_path: Path) -> None:
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        storages = [torch.zeros(MIB, dtype=torch.uint8).untyped_storage() for _ in range(4)]
        began = time.perf_counter()
        slots = [tier.write(storage) for storage in storages]
        for slot in slots:
            slot.wait()
        for load in [tier.read(slot) for slot in slots]:
            load.wait()
        tier.drain()
        taken = time.perf_counter() - began
        for traffic in (tier.written, tier.read_back):
            assert (traffic.transfers, traffic.size_bytes) == (4, 4 * MIB)
        assert 0 < tier.written.seconds + tier.read_back.seconds <= taken
        for slot in slots:
            tier.free(slot)


def test_transfers_of_less_than_a_block_say_nothing_of_a_link(tmp_path: Path) -> None:
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        slot = tier.write(torch.zeros(100, dtype=torch.uint8).untyped_storage())
        tier.read(slot).wait()
        assert (tier.written.transfers, tier.read_back.transfers) == (1, 1)
        for is_late in (False, True):
            assert drifted(DISK, {"disk": (tier.written, tier.read_back)}, is_late=is_late) is None


def test_each_change_is_waited_for_longer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.run.drift.FIRST_STEPS", 2)
    with contextlib.closing(DiskTier(tmp_path)) as tier:
        drift, machine, seen = Drift({"disk": tier}), DISK, []
        for step in range(14):
            times = 2.0 if step < 8 else 6.0
            tier.written = Traffic(10 * (step + 1), (step + 1) * 10**8, tier.written.seconds + 0.11 * times)
            now = drift.after_step(1.2, 1.0, machine)
            if now is not None:
                seen.append(step)
                machine = now
        assert seen == [1, 9]
        out = machine.link("ram", "disk")
        assert out.latency_seconds == pytest.approx(4e-3)  # half of the steps seen took six times as long


@pytest.mark.usefixtures("nothing_left")
def test_a_disk_that_becomes_slow_is_planned_for_anew(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("ebbtide.run.drift.FIRST_STEPS", 2)
    monkeypatch.setattr("ebbtide.run.loop.machine_for", lambda _: FAST_DISK)
    slow = [0.0]

    class Disk(DiskTier):
        def _store(self, slot: Slot, start: int, stop: int) -> None:
            time.sleep(slow[0])
            super()._store(slot, start, stop)

        def _fetch(self, load: QueuedLoad, start: int, stop: int) -> None:
            time.sleep(slow[0])
            super()._fetch(load, start, stop)

    monkeypatch.setattr("ebbtide.run.tiers.choose.DiskTier", Disk)
    plain, program = Chain(), Chain()
    plans: list[ebbtide.Plan] = []
    with ebbtide.Budget("80%", spill=tmp_path) as memory:
        for index in range(30):
            slow[0] = 0.02 if index > 5 else 0.0
            expected = plain.run(index, contextlib.nullcontext)
            compare(expected, program.run(index, memory.step), f"step {index} ({memory.state})")
            plan = memory.plan
            if plan is not None and (not plans or plan.decisions != plans[-1].decisions):
                plans.append(plan)
        assert memory.state == "planned"
    sent = [sum(isinstance(decision, Offload) for decision in plan.decisions) for plan in plans]
    assert sent[-1] < sent[0]
    assert plans[-1].peak_bytes <= plans[-1].limit_bytes
