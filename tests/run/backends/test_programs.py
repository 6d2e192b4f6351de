"""Whole programs over copies that are late, slow or in another order give bit for bit the numbers of plain PyTorch."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

import hypothesis
import hypothesis.strategies as st
import pytest
import torch
from torch import Tensor, nn

import ebbtide
import tests.run.programs_rare  # noqa: F401  (registers its programs)
from ebbtide.decisions import Offload
from ebbtide.machine import Machine, Tier
from ebbtide.run.backends import ComputeStreams
from ebbtide.run.tiers import Arena, DiskTier, Load, Slot, StagedTier, StreamTier
from ebbtide.run.tiers.pinned import GROWTH_BYTES
from tests.run.backends.threads import InlineBackend, Temper
from tests.run.harness import (
    FAST_DISK,
    SLOW_DISK,
    STEPS,
    Guard,
    Program,
    Record,
    Solver,
    allowed_raises,
    assert_identical_within,
    compare,
    divided,
    fast_machine,
    once,
    run_plain,
)
from tests.run.inside import latest_kind
from tests.run.programs import PROGRAMS, SAID_BY_PYTORCH, Chain, mlp
from tests.run.test_identical import Forbidden
from tests.run.tiers.stand_ins import MIB

pytestmark = [pytest.mark.usefixtures("nothing_left", "quick_plans"), *SAID_BY_PYTORCH]

TIERS = ("stream", "overflowing", "staged")


@once
def plain(kind: type[Program]) -> list[Record]:
    """The records of a plain run, made once."""
    return run_plain(kind)


def streams(backend: InlineBackend, kind: str, spill: Path) -> Callable[[ebbtide.Budget], None]:
    """What gives a budget a tier of streams of ``backend`` for its disk."""

    def prepare(memory: ebbtide.Budget) -> None:
        memory.tiers["disk"].close()
        if kind == "stream":
            memory.tiers["disk"] = StreamTier(backend, Arena(torch.UntypedStorage, 64 * MIB, 64 * MIB), name="disk")
        elif kind == "overflowing":
            arena = Arena(torch.UntypedStorage, MIB // 4, MIB // 4)
            memory.tiers["disk"] = StreamTier(backend, arena, name="disk", overflow=StagedTier(spill, backend))
        else:
            memory.tiers["disk"] = StagedTier(spill, backend)

    return prepare


@hypothesis.settings(max_examples=hypothesis.settings().max_examples // 12)
@hypothesis.given(
    name=st.sampled_from(sorted(PROGRAMS)),
    seed=st.integers(0, 1000),
    temper=st.sampled_from([None, *Temper]),
    limit=st.sampled_from(["90%", "60%", "40%"]),
    machine=st.sampled_from([FAST_DISK, FAST_DISK, SLOW_DISK]),
    kind=st.sampled_from(TIERS),
)
def test_identical_to_plain(
    name: str, seed: int, temper: Temper | None, limit: str, machine: Machine, kind: str,
    tmp_path_factory: pytest.TempPathFactory,
) -> None:  # fmt: skip
    program, spill = PROGRAMS[name], tmp_path_factory.mktemp("spill")
    with InlineBackend(seed, temper=temper) as backend:
        assert_identical_within(
            program,
            plain(program),
            limit,
            machine,
            spill,
            streams(backend, kind, spill),
            may_raise_limit=allowed_raises(program),
        )


@pytest.mark.parametrize("kind", TIERS)
def test_values_did_move(kind: str, tmp_path: Path) -> None:
    tiers: list[StreamTier | StagedTier] = []
    with InlineBackend(temper=Temper.SLOW) as backend:
        prepare = streams(backend, kind, tmp_path)

        def prepared(memory: ebbtide.Budget) -> None:
            prepare(memory)
            tier = memory.tiers["disk"]
            assert isinstance(tier, StreamTier | StagedTier)
            tiers.append(tier)

        trial = assert_identical_within(Chain, plain(Chain), "60%", FAST_DISK, tmp_path, prepared)
    assert any(isinstance(decision, Offload) for decision in trial.decisions)
    assert all(tier.read_bytes > 0 for tier in tiers)
    assert all(tier.places_in_use == 0 for tier in tiers if kind != "staged")


@pytest.mark.parametrize("temper", [Temper.LATE, Temper.SLOW])
def test_a_forbidden_in_place_op_is_still_refused(temper: Temper, tmp_path: Path) -> None:
    """Also while the value is being copied out, so that what is away may be neither the old nor the new one."""
    with InlineBackend(temper=temper, pause_seconds=3e-3) as backend:
        assert_identical_within(
            Forbidden,
            plain(Forbidden),
            "60%",
            FAST_DISK,
            tmp_path,
            streams(backend, "stream", tmp_path),
            may_raise_limit=1,
        )


def test_the_arena_becomes_as_large_as_the_plan_needs(tmp_path: Path) -> None:
    """In the first steps all of it goes to the disk behind; in the planned ones nothing does."""
    behind: list[int] = []
    with InlineBackend(1) as backend:
        arena, disk = Arena(torch.UntypedStorage, 64 * MIB), StagedTier(tmp_path, backend)
        tier = StreamTier(backend, arena, name="disk", overflow=disk)
        program = Chain()
        with ebbtide.Budget("60%", spill=tmp_path, machine=FAST_DISK) as memory:
            memory.tiers["disk"].close()
            memory.tiers["disk"] = tier
            for index, record in enumerate(plain(Chain)):
                compare(record, program.run(index, memory.step), f"step {index}")
                behind.append(disk.written_bytes)
            kind = latest_kind(memory)
            assert kind is not None
            planned = kind.places_in("disk")
            assert planned is not None
            assert sum(planned.sizes_bytes) > 0
            assert planned.footprint_bytes <= arena.size_bytes <= planned.footprint_bytes + 2 * GROWTH_BYTES
    assert behind[-1] == behind[-4], "nothing overflows in planned steps"
    assert tier.read_bytes > 0


class TwoThreads(Program):
    """Two models of one step, each of whose backward passes runs in a thread of its own, as on two devices."""

    steady = False

    def build(self) -> nn.Module:
        return nn.ModuleList(mlp(64, *[256] * 6, 4) for _ in range(2))

    def compute(self, index: int, guard: Guard) -> Record:
        faults: list[BaseException] = []

        def backward(loss: Tensor) -> None:
            try:
                loss.backward()
            except BaseException as fault:
                faults.append(fault)

        with guard():
            inputs = self.data(index, 64, 64)
            losses = [model(inputs).square().mean() for model in self.model]
            threads = [threading.Thread(target=backward, args=(loss,)) for loss in losses]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert faults == []
        return {"loss": losses[0], "other loss": losses[1]}


@pytest.mark.filterwarnings("ignore:a backward pass of this step ran in another thread")  # here as on a device
def test_two_threads_of_autograd(tmp_path: Path) -> None:
    """Autograd has a thread for each device: saved tensors are asked for by several at once, but served in turn."""
    overlaps: list[str] = []

    class Alone(StreamTier):
        inside = False

        def read(self, slot: Slot, into: torch.UntypedStorage | None = None) -> Load:
            overlaps.extend(["read"] * self.inside)
            self.inside = True
            time.sleep(1e-3)
            try:
                return super().read(slot, into)
            finally:
                self.inside = False

    program, states = TwoThreads(), []
    with InlineBackend() as backend, ebbtide.Budget("80%", spill=tmp_path, machine=FAST_DISK) as memory:
        memory.tiers["disk"].close()
        tier = Alone(backend, Arena(torch.UntypedStorage, 64 * MIB, 64 * MIB), name="disk")
        memory.tiers["disk"] = tier
        for index, record in enumerate(plain(TwoThreads)):
            states.append(memory.state)
            compare(record, program.run(index, memory.step), f"step {index} ({states[-1]})")
    assert tier.read_bytes > 0
    assert overlaps == []


def test_what_may_move_is_expected_where_it_is_saved(tmp_path: Path) -> None:
    """Under the safe policy and as planned: so the stream that made it is known, whichever is current when it goes."""

    class Expecting(StreamTier):
        expected = writes = 0

        def expect(self, device: torch.device) -> ComputeStreams:
            self.expected += 1
            return super().expect(device)

        def write(self, storage: torch.UntypedStorage) -> Slot:
            self.writes += 1
            assert self.expected >= self.writes
            return super().write(storage)

    limit: int | str | None = "60%"
    for state, steps in (("planned", STEPS), ("observe", 1)):
        program, writes = Chain(), dict[str, int]()
        assert limit is not None
        with (
            InlineBackend() as backend,
            ebbtide.Budget(limit, spill=tmp_path, machine=FAST_DISK, verify=False) as memory,
        ):
            memory.tiers["disk"].close()
            tier = Expecting(backend, Arena(torch.UntypedStorage, 64 * MIB, 64 * MIB), name="disk")
            memory.tiers["disk"] = tier
            for index, record in enumerate(plain(Chain)[:steps]):
                before, now = tier.writes, memory.state
                compare(record, program.run(index, memory.step), f"step {index}")
                writes[now] = tier.writes - before
            limit = memory.limit_bytes
        assert writes[state] > 0


@pytest.mark.parametrize("case", ["planned", "verified", "again", "observed"])
def test_compute_streams_are_told_of_what_dies_early_and_comes_late(
    case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is moved, and what is made again, under the safe policy, as it is verified, and as planned."""
    told = dict.fromkeys(("share", "lead"), 0)
    for name in told:

        def tell(self: ComputeStreams, *storage: torch.UntypedStorage, name: str = name) -> None:
            told[name] += 1

        monkeypatch.setattr(ComputeStreams, name, tell)
    machine = SLOW_DISK if case in ("again", "verified") else FAST_DISK
    program, limit = Chain(), "70%"
    with InlineBackend() as backend, ebbtide.Budget(limit, spill=tmp_path, machine=machine) as memory:
        memory.tiers["disk"].close()
        memory.tiers["disk"] = StreamTier(backend, Arena(torch.UntypedStorage, 64 * MIB, 64 * MIB), name="disk")
        for index, record in enumerate(plain(Chain)):
            before, now = dict(told), memory.state
            if case == "observed" and now == "planned":
                memory._loop.looks.left = 1
                now = memory.state
            compare(record, program.run(index, memory.step), f"step {index} ({now})")
            if now == {"observed": "observe", "verified": "verify"}.get(case, "planned") and index > 1:
                break
        gone = told["share"] - before["share"], told["lead"] - before["lead"]
    assert gone[0] == 2 * gone[1] > 0, "each value as it goes, and as it is there again"


def test_memory_for_true_values_does_not_stay(tmp_path: Path) -> None:
    """What is verified has no place in the plan: what was kept of it in one step made pinned memory larger for good."""

    class Wide(Chain):
        def build(self) -> nn.Module:
            return mlp(64, *[256] * 12, 16)

        def forward(self, index: int) -> Tensor:
            return self.model(self.data(index, 2048, 64))

    with InlineBackend() as backend, ebbtide.Budget("70%", spill=tmp_path, machine=SLOW_DISK) as memory:
        arena = Arena(torch.UntypedStorage, 1 << 30, MIB)
        memory.tiers["disk"].close()
        memory.tiers["disk"] = StreamTier(backend, arena, name="disk", overflow=StagedTier(tmp_path, backend))
        program, states, most_bytes = Wide(), list[str](), 0
        for index in range(STEPS):
            states.append(memory.state)
            program.run(index, memory.step)
            kind = latest_kind(memory)
            if kind is not None and (planned := kind.places_in("disk")) is not None:
                most_bytes = max(most_bytes, planned.footprint_bytes)
        assert "verify" in states
        assert arena.size_bytes <= max(most_bytes, MIB) + GROWTH_BYTES


def test_two_tiers_in_one_plan(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, quick_plans: Solver) -> None:
    """Values go to two tiers in turn: the plan says which, and the numbers are the same."""
    monkeypatch.setattr("ebbtide.run.solving.solve", divided(quick_plans, "disk", "host"))
    machine = fast_machine("ram", Tier("disk", "disk"), Tier("host", "host"))
    with InlineBackend(3) as backend:
        hosts: list[StreamTier] = []
        disks: list[DiskTier] = []

        def prepare(memory: ebbtide.Budget) -> None:
            host, disk = StreamTier(backend, Arena(torch.UntypedStorage, 64 * MIB, 64 * MIB)), memory.tiers["disk"]
            assert isinstance(disk, DiskTier)
            memory.tiers["host"] = host
            hosts.append(host)
            disks.append(disk)

        trial = assert_identical_within(Chain, plain(Chain), "50%", machine, tmp_path, prepare, may_raise_limit=1)
        assert hosts[-1].read_bytes > 0
        assert disks[-1].read_bytes > 0
    assert {d.tier for d in trial.decisions if isinstance(d, Offload)} == {"disk", "host"}
