"""HiGHS keeps threads within a process: what it solves does not depend on what was solved there before."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

from ebbtide.plan import lower_bound, whole_bound
from tests.plan.limits import limit_at
from tests.plan.random_steps import MIB, disk_machine, lone_machine, network_step

SOLVES = """
import multiprocessing, sys
import highspy
from ebbtide.plan import lower_bound, whole_bound
from tests.plan.limits import limit_at
from tests.plan.random_steps import MIB, disk_machine, lone_machine, network_step

small, large = network_step(8, size_bytes=MIB, seed=2), network_step(30, size_bytes=MIB, seed=3)

def bounds(results=None):
    found = (
        whole_bound(small, lone_machine(), limit_at(small, 0.7), 9.0),
        lower_bound(large, disk_machine(2e8, 1e8), limit_at(large, 0.4)).seconds,
    )
    return found if results is None else results.put(found)

if "other" in sys.argv:
    other = highspy.Highs()
    other.silent()
    other.setOptionValue("threads", 4)
    x = other.addBinaries(20)
    other.addConstr(sum(x) >= 2.5)
    assert other.minimize(sum(x)) == highspy.HighsStatus.kOk
else:
    bounds()
if "forked" in sys.argv:
    forked = multiprocessing.get_context("fork")
    results = forked.SimpleQueue()
    child = forked.Process(target=bounds, args=(results,), daemon=True)
    child.start()
    child.join(30)
    assert child.exitcode == 0, child.exitcode
    print(*results.get())
else:
    print(*bounds())
"""
"""A program that bounds after other solves: its own or somebody else's, in its process or in the parent."""


@pytest.mark.parametrize("before", [("own", "forked"), ("other",), ("other", "forked")], ids=" ".join)
def test_bounds_after_other_solves(before: tuple[str, ...]) -> None:
    call, environment = [sys.executable, "-W", "ignore", "-c", SOLVES, *before], {"PYTHONPATH": ":".join(sys.path)}
    done = subprocess.run(call, capture_output=True, text=True, check=False, env={**os.environ, **environment})
    assert done.returncode == 0, done.stderr
    small, large = network_step(8, size_bytes=MIB, seed=2), network_step(30, size_bytes=MIB, seed=3)
    whole = whole_bound(small, lone_machine(), limit_at(small, 0.7), 9.0)
    rough = lower_bound(large, disk_machine(2e8, 1e8), limit_at(large, 0.4)).seconds
    assert list(map(float, done.stdout.splitlines()[-1].split())) == [whole, rough]
