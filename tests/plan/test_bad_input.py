"""Bad input to the planner: one clear error each, never a traceback from inside, and never a wrong plan."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import gzip
import json
import math
import os
import random
import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import pytest

from ebbtide.bundle import Bundle, load_step
from ebbtide.decisions import Plan
from ebbtide.errors import ArgumentError, BudgetError, EbbtideError, PolicyError, RecordError
from ebbtide.machine import Machine, check_machine
from ebbtide.machines import load_machine
from ebbtide.plan import least_peak_bytes, lower_bound, plain_peak_bytes, simulate, solve, whole_bound
from ebbtide.plan.frontier import frontier
from ebbtide.plan.published.registry import POLICIES
from ebbtide.step import Step
from ebbtide.step_checks import check_agreement
from tests.plan.random_steps import KIB, Tape, disk_machine, lone_machine, network_step, random_step, tiny_step

MACHINE = disk_machine()
EMPTY = Step((), (), (), (), ())


def deep(levels: int) -> list[Any]:
    """Lists within lists."""
    item: list[Any] = []
    for _ in range(levels):
        item = [item]
    return item


def forward_only() -> Step:
    """Ops that save tensors which nobody asks for."""
    tape = Tape()
    value = tape.external(64 * KIB)
    for _ in range(4):
        value = tape.op([value], [64 * KIB], name="aten.relu.default")[0]
        tape.pack(value)
    return tape.step()


def decided(step: Step, limit_bytes: int) -> dict[str, Any]:
    """The decisions of each policy, or `PolicyError` of those that refuse the step."""
    found: dict[str, Any] = {}
    for name, policy in POLICIES.items():
        try:
            found[name] = policy(step, MACHINE, limit_bytes).decisions
        except PolicyError:
            found[name] = PolicyError
    return found


def altered(record: Step | Machine | Plan, path: tuple[str | int, ...], item: Any) -> dict[str, Any]:
    """The document of ``record`` with another item at ``path``."""
    document: dict[str, Any] = json.loads(json.dumps(record.document()))
    part: Any = document
    for key in path[:-1]:
        part = part[key]
    part[path[-1]] = item
    return document


@pytest.mark.parametrize("compressed", [False, True], ids=["plain", "gzip"])
@pytest.mark.parametrize("share", [0.0, 0.3, 0.97])
def test_truncated_files(share: float, compressed: bool, tmp_path: Path) -> None:
    path = tmp_path / ("step.json.gz" if compressed else "step.json")
    network_step(4).save(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(share * len(data))])
    for load in (Step.load, load_step):
        with pytest.raises(RecordError, match=r"step\.json.*(not JSON|cut short)"):
            load(path)


def test_damaged_files(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    network_step(4).save(path)
    data = bytearray(path.read_bytes())
    for place in range(12, len(data), 41):
        broken = data.copy()
        broken[place] ^= 0x5A
        path.write_bytes(broken)
        with pytest.raises(RecordError, match=r"step\.json"):
            Step.load(path)
    path.write_bytes(gzip.compress(b"[" * 200_000))
    with pytest.raises(RecordError, match="not JSON"):
        Step.load(path)


def test_files_that_are_compressed_twice(tmp_path: Path) -> None:
    path = tmp_path / "step.json.gz"
    network_step(4).save(path)
    path.write_bytes(gzip.compress(path.read_bytes()))
    with pytest.raises(RecordError, match=r"step\.json\.gz: compressed twice; unpack it once"):
        Step.load(path)


@pytest.mark.parametrize("data", [b"\x89PNG\r\n\x1a\n", b"BZh91AY&SY\xff\xfe"])
def test_files_that_are_no_text(data: bytes, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_bytes(data)
    with pytest.raises(RecordError, match=r"step\.json: not JSON, which is text: damaged, or a file of another kind$"):
        Step.load(tmp_path / "step.json")


@pytest.mark.parametrize("half", [b"\\ud800", b"\\uDCE4", b"\xed\xa0\x80"])
def test_names_that_are_no_text(half: bytes, tmp_path: Path) -> None:
    """JSON has room for halves of characters, escaped or not; no page or table can show them."""
    path = tmp_path / "step.json"
    network_step(4).save(path)
    data = path.read_bytes()
    path.write_bytes(data.replace(b"aten.", b"aten." + half, 1))
    with pytest.raises(RecordError, match=r"step\.json: not JSON, or cut short: .*surrogates not allowed"):
        Step.load(path)
    path.write_bytes(data.replace(b"aten.", b"aten.\\ud83d\\ude00\xed\x95\x9c", 1))
    assert Step.load(path).ops[0].name.startswith("aten.\U0001f600\ud55c")


def test_steps_and_plans_that_come_by_a_pipe(tmp_path: Path) -> None:
    """They can be read but once."""
    made = network_step(3)
    plan = solve(made, MACHINE, plain_peak_bytes(made))
    made.save(tmp_path / "step.json")
    Bundle(made, MACHINE, plan).save(tmp_path / "plan.json")
    for name, machine in (("step.json", None), ("plan.json", MACHINE)):
        reading, writing = os.pipe()
        with os.fdopen(writing, "wb") as file:  # it is small enough for a pipe to hold it
            file.write((tmp_path / name).read_bytes())
        assert load_step(f"/dev/fd/{reading}") == (made, machine)
        os.close(reading)


def test_files_without_end(tmp_path: Path) -> None:
    """They are told from ours before they fill the memory."""
    for load in (Step.load, load_step, Machine.load, Bundle.load):
        with pytest.raises(RecordError, match=r"/dev/zero: not a file of ebbtide's, but a device"):
            load("/dev/zero")
    packed = tmp_path / "step.json.gz"
    with gzip.open(packed, "wb", 1) as file:
        for _ in range(5):
            file.write(bytes(1 << 26))
    sparse = tmp_path / "step.json"
    with sparse.open("wb") as file:
        file.truncate(1 << 34)
    for path in (packed, sparse):
        with pytest.raises(RecordError, match=r"step\.json.*: not a file of ebbtide's: none holds 256 MiB"):
            Step.load(path)


@pytest.mark.parametrize("text", ["[]", "3", "null", '"step"', '{"format": "other"}', '{"format": "ebbtide-step"}'])
def test_files_of_another_kind(text: str, tmp_path: Path) -> None:
    (tmp_path / "step.json").write_text(text)
    for load in (Step.load, load_step):
        with pytest.raises(RecordError, match=r"not a file of|version None"):
            load(tmp_path / "step.json")


@pytest.mark.parametrize(
    ("path", "item", "expected"),
    [
        (("ops", "rows", 0, 4), -1.0, "has duration -1.0; it must be >= 0"),
        (("ops", "rows", 0, 4), math.nan, "has duration nan; it must be >= 0"),
        (("ops", "rows", 0, 4), math.inf, "has duration inf; it must be >= 0"),
        (("ops", "rows", 0, 4), 1e308, "it must be >= 0, and < 1e"),
        (("ops", "rows", 0, 4), 10**400, "Op 0: its duration_seconds is 10"),
        (("ops", "rows", 0, 4), "long", "Op 0: its duration_seconds is 'long'"),
        (("ops", "rows", 0, 6), "opaqe", "Op 0: its replay is 'opaqe'"),
        (("ops", "rows", 0, 1), [99999], "names value 99999, which does not exist"),
        (("ops", "rows", 0, 1), 3, "Op 0: its inputs is 3"),
        (("ops", "rows", 0, 3), [[0, 99999]], "names value 99999, which does not exist"),
        (("values", "rows", 1, 0), 0.5, "Value 1: its size_bytes is 0.5"),
        (("values", "rows", 1, 0), True, "Value 1: its size_bytes is True"),
        (("values", "rows", 1, 0), -8, "value 1 is impossible"),
        (("values", "rows", 1, 0), 10**30, "its values take more bytes than there are"),
        (("values", "rows", 1, 1), 10**30, "value 1 is impossible"),
        (("values", "rows", 1, 2), 10**6, "value 1 is impossible"),
        (("values", "rows", 1, 3), [10**6], "value 1 is impossible"),
        (("values", "rows", 1, 3), [2, 1], "value 1 is impossible"),
        (("ops", "rows", 0, 5), 10**30, "has a workspace of 10"),
        (("events", "rows", 2, 1), 10**6, "event 2 is impossible"),
        (("absences", "rows", 0, 2), 10**6, "absence 0 is impossible"),
        (("absences", "rows", 0, 2), 42, "absence 0 is impossible"),  # an op, where nobody asks for anything
        (("absences", "rows", 0, 0), 2, "absence 0 is impossible"),  # nobody saved that value
        (("absences", "rows", 0, 1), 0, "absence 0 is impossible"),  # it is made then
        (("values", "rows", 3, 4), 0, "value 3 is impossible: it dies before it is made"),
        (("saved", "rows", 0, 2), deep(900), "not a whole step: RecursionError"),
        (("absences", "rows"), {}, "not a whole step"),
        (("ops",), None, "not a whole step"),
    ],
)
def test_impossible_steps(path: tuple[str | int, ...], item: Any, expected: str) -> None:
    with pytest.raises(RecordError, match=expected.replace("[", r"\[").replace("(", r"\(")) as caught:
        Step.from_document(altered(network_step(3), path, item), "step.json")
    assert str(caught.value).startswith("step.json: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize("ops", [[math.inf], [1.0], [True, 2], ["1"], [None]])
def test_impossible_recipes(ops: list[Any]) -> None:
    made = network_step(3)
    plan = solve(made, MACHINE, plain_peak_bytes(made))
    with pytest.raises(RecordError, match=r"not a whole plan: .*unknown decision"):
        Plan.from_document(altered(plan, ("decisions", 0), ["recompute", ops]), "plan.json")


@pytest.mark.parametrize("limit_bytes", [-1, -(10**30)])
def test_budgets_below_nothing(limit_bytes: int) -> None:
    with pytest.raises(BudgetError, match="cannot be met: the least reachable peak is"):
        solve(network_step(4), MACHINE, limit_bytes, seconds=0)


def test_budgets_beyond_all_memory() -> None:
    assert not solve(network_step(4), MACHINE, 10**30).binds


def leaves(item: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """Paths of everything in a document that is not a list or an object."""
    if isinstance(item, dict):
        for key, part in item.items():
            yield from leaves(part, (*path, key))
    elif isinstance(item, list):
        for number, part in enumerate(item):
            yield from leaves(part, (*path, number))
    else:
        yield path


STRANGE = [-1, 0, 1, 3, 7, 10**30, 1.5, -1e-3, math.nan, math.inf, "x", "backward", None, True, [], [1], [[1, 2]], {}]


@hypothesis.settings(max_examples=80)
@hypothesis.given(st.integers(0, 2**32))
def test_one_strange_item_gives_a_plan_or_one_error(seed: int) -> None:
    dice = random.Random(seed)
    step = random_step(seed % 5, length=5)
    path = dice.choice(list(leaves(step.document())))
    document = altered(step, path, copy.deepcopy(dice.choice(STRANGE)))
    with contextlib.suppress(EbbtideError):
        read = Step.from_document(document, "step.json")
        plan = solve(read, MACHINE, int(0.6 * plain_peak_bytes(read)), seconds=0.001)
        assert plan.peak_bytes <= plan.limit_bytes
        assert math.isfinite(plan.seconds)


@pytest.mark.parametrize("duration", [-1e-3, math.nan, math.inf])
def test_durations_made_in_memory(duration: float) -> None:
    """Not read from a file: the planners check what they are given."""
    step = network_step(3)
    ops = (dataclasses.replace(step.ops[0], duration_seconds=duration), *step.ops[1:])
    wrong = dataclasses.replace(step, ops=ops)
    limit_bytes = int(0.9 * plain_peak_bytes(step))
    for planner in (solve, lower_bound, POLICIES["capuchin"], POLICIES["rotor"]):
        with pytest.raises(RecordError, match="has duration"):
            planner(wrong, MACHINE, limit_bytes)


@pytest.mark.parametrize("value", [10**6, -(10**6), "x", None])
def test_absences_of_values_that_there_are_not(value: Any) -> None:
    """Which of them are final was asked before anybody looked."""
    step = network_step(3)
    limit_bytes = int(0.9 * plain_peak_bytes(step))
    decisions = solve(step, MACHINE, limit_bytes, seconds=0).decisions
    wrong = dataclasses.replace(step, absences=(dataclasses.replace(step.absences[0], value=value), *step.absences[1:]))
    calls: list[Callable[[], Any]] = [
        lambda: solve(wrong, MACHINE, limit_bytes, seconds=0),
        lambda: simulate(wrong, MACHINE, decisions),
        lambda: lower_bound(wrong, MACHINE, limit_bytes),
        lambda: whole_bound(wrong, MACHINE, limit_bytes, 1.0),
        lambda: least_peak_bytes(wrong, MACHINE),
        lambda: frontier(wrong, MACHINE, points=2, seconds=0),
        *(functools.partial(policy, wrong, MACHINE, limit_bytes) for policy in POLICIES.values()),
    ]
    for call in calls:
        with pytest.raises(RecordError, match=r"^step: "):
            call()


@pytest.mark.parametrize("planner", [solve, simulate, lower_bound, whole_bound, least_peak_bytes, frontier])
def test_planners_say_that_they_refuse_such_steps(planner: Callable[..., Any]) -> None:
    assert "RecordError: " in (planner.__doc__ or "")


@pytest.mark.parametrize("bandwidth", [0.0, -1.0, math.nan, math.inf])
def test_bandwidths(bandwidth: float, tmp_path: Path) -> None:
    machine = disk_machine(bandwidth, 1e9)
    step = network_step(3)
    for planner in (solve, lower_bound, POLICIES["offload-all"], POLICIES["pofo"]):
        with pytest.raises(RecordError, match=r"ram -> disk has bandwidth .*; it must be > 0"):
            planner(step, machine, int(0.9 * plain_peak_bytes(step)))
    document = {**MACHINE.document()}
    document["links"][0]["bandwidth_bytes_per_second"] = bandwidth
    (tmp_path / "machine.json").write_text(json.dumps(document))
    with pytest.raises(RecordError, match="it must be > 0"):
        Machine.load(tmp_path / "machine.json")


@pytest.mark.parametrize(
    ("path", "item", "expected"),
    [
        (("links", 0, "bandwidth_bytes_per_second"), "3e9", "Link: its bandwidth_bytes_per_second is '3e9'"),
        (("links", 0, "bandwidth_bytes_per_second"), 10**400, "Link: its bandwidth_bytes_per_second is 10"),
        (
            ("links", 1, "bandwidth_bytes_per_second"),
            1e-320,
            "disk -> ram has bandwidth 1e-320; that is less than a byte",
        ),
        (("links", 0, "latency_seconds"), None, "Link: its latency_seconds is None"),
        (("links", 0, "latency_seconds"), 1e308, "they must be >= 0, and < 1e+12"),
        (("tiers", 1, "capacity_bytes"), "1TB", "Tier: its capacity_bytes is '1TB'"),
        (("tiers", 1, "capacity_bytes"), math.nan, "Tier: its capacity_bytes is nan"),
        (("tiers", 1, "capacity_bytes"), -1, "the tier disk has a capacity of -1 bytes"),
        (("tiers", 1, "kind"), "disc", "Tier: its kind is 'disc'; it must be 'device' or 'host' or 'disk'"),
        (("replay_seconds",), "1e-5", "Machine: its replay_seconds is '1e-5'"),
        (("name",), None, "Machine: its name is None"),
        (("compute", "launch_seconds"), [], "Compute: its launch_seconds is []"),
        (("compute", "efficiencies", "matmul"), "70%", "Compute: its efficiencies is"),
    ],
)
def test_impossible_machines(path: tuple[str | int, ...], item: Any, expected: str) -> None:
    machine = dataclasses.replace(MACHINE, compute=load_machine("h200").compute)
    with pytest.raises(RecordError, match=re.escape(expected)) as caught:
        Machine.from_document(altered(machine, path, item), "machine.json")
    assert str(caught.value).startswith("machine.json: ")
    assert len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("path", "item", "expected"),
    [
        (("limit_bytes",), "6GiB", "Plan: its limit_bytes is '6GiB'"),
        (("peak_bytes",), None, "Plan: its peak_bytes is None"),
        (("peak_bytes",), -1, "its peak_bytes is -1; it must be >= 0"),
        (("seconds",), math.nan, "its seconds is nan; it must be >= 0 and finite"),
        (("plain_seconds",), [], "Plan: its plain_seconds is []"),
        (("bound_seconds",), math.inf, "its bound_seconds is inf; it must be >= 0 and finite"),
        (("method",), 3, "Plan: its method is 3"),
        (("decisions", 0), ["away"], "unknown decision ['away']"),
    ],
)
def test_impossible_plans(path: tuple[str | int, ...], item: Any, expected: str) -> None:
    step = network_step(3)
    plan = solve(step, MACHINE, plain_peak_bytes(step))
    assert Plan.from_document(plan.document(), "plan.json") == plan
    with pytest.raises(RecordError, match=re.escape(expected)) as caught:
        Plan.from_document(altered(plan, path, item), "plan.json")
    assert str(caught.value).startswith("plan.json: ")


@pytest.mark.parametrize("machine", [MACHINE, lone_machine()], ids=["disk", "lone"])
@pytest.mark.parametrize("limit_bytes", [-1, 0, 1])
def test_a_budget_below_the_largest_op(limit_bytes: int, machine: Machine) -> None:
    step = network_step(5)
    with pytest.raises(
        BudgetError, match=r"the least reachable peak is .*, at op \d+ aten\.\w+.*; ask for at"
    ) as caught:
        solve(step, machine, limit_bytes, seconds=0.01)
    error = caught.value
    assert (error.limit_bytes, error.op) == (limit_bytes, step.ops[error.tick].name)
    assert error.reachable_bytes == least_peak_bytes(step, machine)
    assert lower_bound(step, machine, limit_bytes).seconds == math.inf or limit_bytes > 0


def test_an_empty_step() -> None:
    plan = solve(EMPTY, MACHINE, 0)
    assert (plan.decisions, plan.peak_bytes, plan.seconds, plan.bound_seconds) == ((), 0, 0.0, 0.0)
    assert simulate(EMPTY, MACHINE, ()).peak_bytes == least_peak_bytes(EMPTY, MACHINE) == 0
    with pytest.raises(BudgetError, match="-1 B cannot be met"):
        solve(EMPTY, MACHINE, -1)
    assert set(decided(EMPTY, 0).values()) <= {(), PolicyError}


def test_a_step_without_a_backward_pass() -> None:
    """Nothing is asked for, so nothing may leave: the plain peak is the least."""
    step = forward_only()
    plain = plain_peak_bytes(step)
    assert step.absences == ()
    assert solve(step, MACHINE, plain).decisions == ()
    with pytest.raises(BudgetError, match=r"least reachable peak.*no backward pass: call backward\(\)") as caught:
        solve(step, MACHINE, plain - 1)
    assert caught.value.reachable_bytes == plain
    assert set(decided(step, plain).values()) <= {(), PolicyError}
    with pytest.raises(PolicyError, match="no backward pass"):
        POLICIES["rotor"](step, MACHINE, plain)


@pytest.mark.parametrize("wrong", ["5", None, [1]])
def test_records_made_by_hand_with_fields_of_other_types(wrong: Any) -> None:
    no_size: Any = wrong or "x"
    made = forward_only()
    link, tier, op, value = MACHINE.links[0], MACHINE.tiers[0], made.ops[0], made.values[0]
    machines = [
        (dataclasses.replace(link, bandwidth_bytes_per_second=wrong), "links", "Link: its bandwidth_bytes_per_second"),
        (dataclasses.replace(link, latency_seconds=wrong), "links", "Link: its latency_seconds"),
        (dataclasses.replace(tier, capacity_bytes=no_size), "tiers", "Tier: its capacity_bytes"),
    ]
    for part, parts, expected in machines:
        changed: dict[str, Any] = {parts: (part, *getattr(MACHINE, parts)[1:])}
        machine = dataclasses.replace(MACHINE, **changed)
        with pytest.raises(RecordError, match=f"^machine: {expected} is "):
            solve(made, machine, 1 << 30)
    with pytest.raises(RecordError, match=r"^machine: Machine: its replay_seconds is "):
        solve(made, dataclasses.replace(MACHINE, replay_seconds=wrong), 1 << 30)
    steps = [
        (dataclasses.replace(op, duration_seconds=wrong), "ops", "Op: its duration_seconds"),
        (dataclasses.replace(value, size_bytes=wrong), "values", "Value: its size_bytes"),
    ]
    for part, parts, expected in steps:
        changed = {parts: (part, *getattr(made, parts)[1:])}
        step = dataclasses.replace(made, **changed)
        with pytest.raises(RecordError, match=f"^step: {expected} is "):
            solve(step, MACHINE, 1 << 30)


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_search_that_would_never_begin_or_end(seconds: float) -> None:
    step = network_step(4)
    with pytest.raises(ArgumentError, match=r"^seconds=.*: it must be a number of seconds, 0 or more, and finite"):
        solve(step, MACHINE, plain_peak_bytes(step) - 1, seconds=seconds)


@pytest.mark.parametrize(
    ("table", "row", "fields", "expected"),
    [
        ("absences", 0, {"opens": 1}, "absence 0 is impossible: an op reads its value meanwhile"),
        ("ops", 1, {"inputs": (7,)}, "op 1 (aten.op.default) reads value 7, which is made later"),
        ("ops", 2, {"mutated": ((1, 3),)}, "op 2 (aten.op.default) cannot write value 3 in place of value 1"),
        ("values", 1, {"maker": 1}, "makes value 1, which says it does not"),
        ("values", 1, {"dies": 12}, "value 1 is impossible: it is read after it is gone"),
        ("values", 1, {"uses": ()}, "value 1 is not read by the ops that it names as its uses"),
        ("saved", 0, {"unpacked": (1,)}, "saved tensor 0 is asked for where no event is"),
    ],
)
def test_steps_whose_records_contradict_each_other(table: str, row: int, fields: dict[str, Any], expected: str) -> None:
    records = list(getattr(tiny_step(1, 3), table))
    records[row] = dataclasses.replace(records[row], **fields)
    changed: dict[str, Any] = {table: tuple(records)}
    with pytest.raises(RecordError, match=re.escape(expected)):
        check_agreement(dataclasses.replace(tiny_step(1, 3), **changed))


def test_absences_that_overlap() -> None:
    step = tiny_step(1, 3)
    with pytest.raises(RecordError, match="absence 1 is impossible: it overlaps another of its value"):
        check_agreement(dataclasses.replace(step, absences=(step.absences[0], *step.absences)))


def test_links_that_contradict_each_other() -> None:
    out, back = disk_machine().links
    with pytest.raises(RecordError, match="two of its links lead from one tier to the same other one"):
        check_machine(dataclasses.replace(disk_machine(), links=(out, back, out)))
