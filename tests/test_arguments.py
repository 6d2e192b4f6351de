"""Arguments of public calls that cannot be: one error of ebbtide's each, which names the argument."""

from __future__ import annotations

import copy
import functools
import math
import pickle
from collections.abc import Callable
from decimal import Decimal
from fractions import Fraction
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import ebbtide
from ebbtide import sequence
from ebbtide.errors import (
    ArgumentError,
    BudgetError,
    EbbtideError,
    OutOfMemoryError,
    StepError,
)
from ebbtide.observe.fake import observe_fake
from ebbtide.plan import least_peak_bytes, lower_bound, plain_peak_bytes, simulate, solve, whole_bound
from ebbtide.plan.batch import largest_batch
from ebbtide.plan.frontier import frontier
from ebbtide.plan.published.capuchin import capuchin
from ebbtide.plan.published.hascoet import hascoet
from ebbtide.plan.published.registry import POLICIES
from ebbtide.run.calibrate import calibrate, machine_for
from tests.plan.random_steps import disk_machine, network_step

NO_SIZES: tuple[Any, ...] = (
    None,
    "lots",
    "",
    True,
    -1,
    0,
    math.nan,
    2.5,
    "1.5",
    "0.5 B",
    b"1",
    [],
    np.int64(-1),
    torch.tensor(2.5),
    torch.ones(2),
)
NO_PATHS: tuple[Any, ...] = ("", [""], 3, True, 2.5, b"/tmp", {}, torch.tensor(1), [None], ["/tmp", 3], object)

BUDGET_SWITCHES = ("verify", "tune_allocator", "checksum", "hard")

weight = torch.eye(4, requires_grad=True)


def scan(**options: Any) -> Any:
    state, ys = ebbtide.scan(
        lambda u, x: (torch.tanh(u @ weight + x),) * 2, torch.zeros(1, 4), torch.zeros(9, 4), **options
    )
    state.sum().backward()
    return ys


def run(**options: Any) -> Any:
    given = {"forward": lambda u, _: u + 1, "reverse": lambda u, adjoint, _: adjoint, "n": 9, "turn": lambda u: u}
    return sequence.run(**{"state": np.zeros(8), "memory": 4096, **given, **options}).steps


def choose(**options: Any) -> Any:
    given = {"n": 9, "state_bytes": 100, "step_seconds": 1.0, "reverse_seconds": 2.0, "memory": 4096}
    return sequence.choose(**{**given, **options}).schedule


@pytest.mark.parametrize("size", NO_SIZES, ids=repr)
def test_what_is_no_size(size: Any) -> None:
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("limit", lambda: ebbtide.Budget(size)),
        ("memory", lambda: scan(memory=size)),
        ("memory", lambda: run(memory=size)),
        ("memory", lambda: choose(memory=size)),
    ]
    if size is not None:
        calls.append(("host", lambda: ebbtide.Budget("50%", host=size)))
    for name, call in calls:
        with pytest.raises(ArgumentError, match=rf"^{name}: (a size|cannot read)"):
            call()


@pytest.mark.parametrize("path", NO_PATHS, ids=repr)
def test_what_is_no_path(path: Any) -> None:
    expected = r"^spill=.*: it must be the path of a directory, a str or a Path"
    for call in (scan, run, lambda spill: ebbtide.Budget("50%", spill=spill), calibrate, machine_for):
        with pytest.raises(ArgumentError, match=expected):
            call(spill=path)


def test_a_budget_has_one_directory(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match=r"^spill=.*: it must be the path of a directory, a str or a Path$"):
        ebbtide.Budget("50%", spill=[tmp_path])  # type: ignore[arg-type]


def test_a_machine_is_no_name() -> None:
    with pytest.raises(ArgumentError, match=r"^machine='h200': it must be a Machine$"):
        ebbtide.Budget("50%", machine="h200")  # type: ignore[arg-type]


def test_whole_numbers_of_other_libraries(tmp_path: Path) -> None:
    for size in (np.int64(10**6), np.uint8(200), torch.tensor(10**6)):
        with ebbtide.Budget(size, spill=tmp_path) as memory:  # type: ignore[arg-type]
            assert type(memory.limit_bytes) is int
    assert len(scan(memory=np.int64(10**6), truncate=torch.tensor(4), spill=[tmp_path])) == 9
    assert run(memory=torch.tensor(4096), n=np.int32(9), spill=(tmp_path,)) == 9
    assert type(choose(n=np.int64(9)).n) is int


@pytest.mark.parametrize("second", [np.float32(1.0), np.array(1.0), torch.tensor(1.0), Fraction(1), Decimal(1)])
def test_numbers_of_seconds_of_other_libraries(second: Any) -> None:
    """What comes back is a float: a tensor of seconds would not."""
    given = {"n": 9, "state_bytes": 100, "memory": 400, "step_seconds": second, "reverse_seconds": 2 * second}
    found = sequence.choose(**given)
    assert type(found.seconds) is float
    assert found == sequence.choose(**{**given, "step_seconds": 1.0, "reverse_seconds": 2.0})
    made = solve(network_step(4), disk_machine(), plain_peak_bytes(network_step(4)) * 4 // 5, seconds=0 * second)
    assert type(made.seconds) is float


@pytest.mark.parametrize(
    "value", ["no", "off", "false", "", 0, 1, [], torch.tensor(False), np.zeros(2, bool)], ids=repr
)
def test_what_is_no_switch(value: Any, tmp_path: Path) -> None:
    """None of these is taken for what it counts as: most people would be surprised."""
    problem = network_step(4), disk_machine(), 10**9
    calls: list[tuple[str, Callable[..., Any]]] = [
        *((name, functools.partial(ebbtide.Budget, "50%", spill=tmp_path)) for name in BUDGET_SWITCHES),
        *((name, call) for name in ("check", "progress") for call in (scan, run)),
        *((name, functools.partial(hascoet, *problem)) for name in ("copy_stream", "helper_thread", "prefetch")),
        ("recompute", functools.partial(capuchin, *problem)),
    ]
    for name, call in calls:
        with pytest.raises(ArgumentError, match=rf"^{name}=.*: it must be True or False$"):
            call(**{name: value})


def test_switches_of_numpy(tmp_path: Path) -> None:
    options: dict[str, Any] = dict.fromkeys(BUDGET_SWITCHES, np.False_)
    ebbtide.Budget("50%", spill=tmp_path, **options).close()
    assert run(check=np.True_, progress=np.False_) == len(scan(check=np.True_, progress=np.False_)) == 9


def test_only_the_bar_is_up_to_ebbtide_if_it_is_none(tmp_path: Path) -> None:
    assert run(progress=None) == len(scan(progress=None)) == 9
    budget = functools.partial(ebbtide.Budget, "50%", spill=tmp_path)
    calls: list[tuple[str, Callable[..., Any]]] = [("check", scan), ("check", run), ("hard", budget)]
    for name, call in calls:
        with pytest.raises(ArgumentError, match=rf"^{name}=None: it must be True or False$"):
            call(**{name: None})


@pytest.mark.parametrize("name", ["forward", "reverse", "turn"])
def test_what_cannot_be_called(name: str) -> None:
    """It is said before the first step, not after the last one."""
    with pytest.raises(ArgumentError, match=rf"^{name}=None cannot be called; give a function$"):
        run(**{name: None})


def test_a_cell_that_cannot_be_called() -> None:
    with pytest.raises(ArgumentError, match=r"^cell=3 cannot be called; give a function$"):
        ebbtide.scan(3, torch.zeros(4), torch.zeros(9, 4))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("call", "argument", "expected"),
    [
        (run, {"schedule": "revolve"}, "^schedule='revolve': it must be a Schedule, .* give `.schedule`$"),
        (run, {"name": 3, "spill": "/tmp"}, "name=3 cannot be that of a folder"),
        (run, {"reverse_seconds": -1.0}, "reverse_seconds=-1.0: it must be a number of seconds, 0 or more"),
        (run, {"reverse_seconds": "long"}, "reverse_seconds='long'"),
        (run, {"n": "all"}, "n='all': it must be a whole number"),
        (scan, {"truncate": "often"}, "truncate='often': it must be a whole number, at least 1"),
        (scan, {"truncate": 2.5}, "truncate=2.5: it must be a whole number, at least 1"),
        (scan, {"truncate": 0}, "truncate=0: it must be a whole number, at least 1"),
        (scan, {"truncate": True}, "truncate=True: it must be a whole number, at least 1"),
        (choose, {"n": math.inf}, "n=inf: it must be a whole number"),
        (choose, {"n": None}, "n=None: it must be a whole number"),
        (choose, {"step_seconds": None}, "step_seconds=None: it must be a number of seconds"),
        (choose, {"reverse_seconds": math.inf}, "reverse_seconds=inf"),
        (choose, {"step_seconds": np.ones(2)}, "step_seconds=array.*: it must be a number of seconds"),
        (choose, {"step_seconds": 10**400}, "step_seconds=1000.*: it must be a number of seconds"),
        (run, {"reverse_seconds": torch.ones(2)}, "reverse_seconds=tensor.*: it must be a number of seconds"),
    ],
)
def test_chains_that_cannot_be(call: Callable[..., Any], argument: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArgumentError, match=expected):
        call(**argument)


@pytest.mark.parametrize(
    ("argument", "expected"),
    [
        ({"state_bytes": 2.5}, "state_bytes=2.5: it must be a whole number"),
        ({"state_bytes": -1}, "state_bytes=-1: it must be a whole number, at least 0"),
        ({"tiers": disk_machine()}, "tiers=.*: it must be a SlowMemory"),
        ({"tiers": [None]}, "tiers=None: it must be a SlowMemory"),
    ],
)
def test_choices_that_cannot_be(argument: dict[str, Any], expected: str) -> None:
    with pytest.raises(ArgumentError, match=expected):
        choose(**argument)


@pytest.mark.parametrize("limit", ["50%", None, math.nan, 1e6])
def test_plans_are_made_for_bytes(limit: Any) -> None:
    with pytest.raises(ArgumentError, match=r"^limit_bytes=.*: it must be a whole number"):
        solve(network_step(4), disk_machine(), limit)


def test_a_search_has_a_time_and_a_seed() -> None:
    step, machine = network_step(4), disk_machine()
    limit_bytes: Any = np.int64(0.8 * plain_peak_bytes(step))
    with pytest.raises(ArgumentError, match=r"^seconds='long': it must be a number of seconds, 0 or more, and finite"):
        solve(step, machine, limit_bytes, seconds="long")  # type: ignore[arg-type]
    with pytest.raises(ArgumentError, match=r"^seconds=array.*: it must be a number of seconds, 0 or more, and finite"):
        solve(step, machine, limit_bytes, seconds=np.ones(2))  # type: ignore[arg-type]
    for seed in (-1, 2.5, "x"):
        with pytest.raises(ArgumentError, match=r"^seed=.*: it must be a whole number, at least 0"):
            solve(step, machine, limit_bytes, seed=seed)  # type: ignore[arg-type]
    made = solve(step, machine, limit_bytes, seconds=0)
    assert type(made.limit_bytes) is int


@pytest.mark.parametrize(
    "error",
    [
        BudgetError("too little", limit_bytes=1, reachable_bytes=2, tick=3, op="aten.mm.default", module="layer"),
        OutOfMemoryError("no more", planned_bytes=1, asked_bytes=None, fits_bytes=3),
        ArgumentError("limit: no size"),
    ],
    ids=lambda error: type(error).__name__,
)
def test_errors_go_from_one_process_to_another(error: EbbtideError) -> None:
    for other in (pickle.loads(pickle.dumps(error)), copy.copy(error)):
        assert type(other) is type(error)
        assert (str(other), vars(other)) == (str(error), vars(error))


@pytest.mark.parametrize("duplicate", [copy.copy, copy.deepcopy, pickle.dumps])
def test_a_budget_is_not_copied(duplicate: Callable[[Any], Any]) -> None:
    """Nor what holds it, as the arguments of a process that is started, or a trainer's callbacks."""
    with ebbtide.Budget("50%") as memory:
        for item in (memory, {"memory": memory}):
            if duplicate is copy.copy and item is not memory:
                continue  # it holds the same budget
            with pytest.raises(EbbtideError, match=r"^a Budget belongs to its process and its training loop") as caught:
                duplicate(item)
            assert isinstance(caught.value, TypeError)  # what who copies or pickles looks out for


def test_what_is_of_another_type() -> None:
    step, machine = network_step(3), disk_machine()
    plan = solve(step, machine, plain_peak_bytes(step), seconds=0)
    calls: list[tuple[str, Callable[[], Any]]] = [
        ("machine", lambda: solve(step, "h200", 10**9)),  # type: ignore[arg-type]
        ("step", lambda: solve("step.json", machine, 10**9)),  # type: ignore[arg-type]
        ("machine", lambda: least_peak_bytes(step, "h200")),  # type: ignore[arg-type]
        ("decisions", lambda: simulate(step, machine, plan)),  # type: ignore[arg-type]
        ("step", lambda: POLICIES["capuchin"]("step.json", machine, 10**9)),  # type: ignore[arg-type]
        ("limit_bytes", lambda: lower_bound(step, machine, "6GiB")),  # type: ignore[arg-type]
        ("limit_bytes", lambda: whole_bound(step, machine, "6GiB", 1.0)),  # type: ignore[arg-type]
        ("limit_bytes", lambda: largest_batch(network_step, machine, "60GiB")),  # type: ignore[arg-type]
        ("overhead", lambda: largest_batch(network_step, machine, 10**9, overhead="5%")),  # type: ignore[arg-type]
        ("between", lambda: largest_batch(network_step, machine, 10**9, between=(8,))),  # type: ignore[arg-type]
        ("points", lambda: frontier(step, machine, points=2.5)),  # type: ignore[arg-type]
        ("policies", lambda: frontier(step, machine, policies=["capuchin"])),  # type: ignore[arg-type]
        ("machine", lambda: observe_fake(lambda: print, "h200")),  # type: ignore[arg-type]
        ("machine", lambda: sequence.slow_memories("/scratch")),  # type: ignore[arg-type]
        ("cell", lambda: ebbtide.scan(None, torch.zeros(4), torch.zeros(5, 4), memory=4096)),  # type: ignore[arg-type]
        ("run", lambda: ebbtide.observe_step("train.py")),  # type: ignore[arg-type]
        ("device", lambda: ebbtide.observe_step(lambda: None, "graphics")),
        ("truncate", lambda: scan(memory=4096, truncate=True)),
    ]
    for name, call in calls:
        with pytest.raises(EbbtideError, match=name):
            call()


def test_a_device_by_its_name() -> None:
    step = ebbtide.observe_step(lambda: (weight * weight).sum().backward(), "cpu")
    assert step.device == "cpu"


def test_a_device_that_is_not_there() -> None:
    name = f"cuda:{torch.cuda.device_count()}" if torch.cuda.is_available() else "cuda"
    with pytest.raises(ArgumentError, match=f"^device='{name}' is no device of PyTorch's: "):
        ebbtide.observe_step(lambda: (weight * weight).sum().backward(), name)


def test_a_meter_counts_over_one_block() -> None:
    meter = ebbtide.PeakMeter()
    with meter:
        torch.ones(1 << 14)
    with pytest.raises(StepError, match="make another one"), meter:
        pass
