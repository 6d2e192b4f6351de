"""The benchmark's peers compute the same gradients in less memory, and its records become a table."""

from __future__ import annotations

import contextlib
import dataclasses
from pathlib import Path

import pytest

from benchmarks.methods import make_method
from benchmarks.overhead import Record, pooled, table_of
from benchmarks.worker import TIMED, Worker
from ebbtide.demo.workloads import make_workload


@pytest.mark.parametrize("name", ["checkpoint", "disk-hook"])
def test_peers(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.worker.FIRST", 0)  # how steady times are is not asked here
    workload = make_workload("gpt2", batch_size=1)
    plain = Worker(workload, make_method("plain", workload, limit_bytes=None, spill=None)).count()
    method = make_method(name, workload, limit_bytes=None, spill=str(tmp_path))
    worker = Worker(workload, method)
    with contextlib.closing(method):
        assert worker.settle() == {"unreachable": None}
        assert worker.compare() == {"gradients_identical": True, "buffers_identical": True}
        counted = worker.count()
        for taken in (worker.turn(0), worker.plain(0)):
            assert len(taken["seconds"]) == TIMED
            assert all(seconds > 0 for seconds in taken["seconds"])
    assert counted["resting_bytes"] == plain["resting_bytes"]
    assert counted["peak_bytes"] < plain["peak_bytes"]
    assert list(tmp_path.iterdir()) == []


def test_a_budget_that_cannot_be_met_is_an_answer(tmp_path: Path) -> None:
    workload = make_workload("gpt2", batch_size=1)
    method = make_method("ebbtide", workload, limit_bytes=2**20, spill=str(tmp_path))
    with contextlib.closing(method):
        assert Worker(workload, method).settle()["unreachable"] > 2**20


def test_an_unknown_method_is_an_error() -> None:
    workload = make_workload("gpt2", batch_size=1)
    with pytest.raises(ValueError, match="no method 'magic'"):
        make_method("magic", workload, limit_bytes=None, spill=None)


RECORD = Record(
    model="gpt2",
    method="ebbtide",
    compiled=False,
    fraction=0.5,
    limit_bytes=600,
    least_reachable_bytes=None,
    resting_bytes=100,
    plain_peak_bytes=1100,
    peak_bytes=590,
    predicted_peak_bytes=590,
    predicted_physical_bytes=620,
    plain_rss_bytes=1000,
    rss_bytes=510,
    plain_default_seconds=1.1,
    plain_tuned_seconds=1.0,
    plain_seconds=1.0,
    seconds=1.02,
    predicted_seconds=1.01,
    ratio=1.02,
    turn_ratio=1.02,
    own_ratio=1.01,
    bound=None,
    gradients_identical=True,
    buffers_identical=True,
    all_seconds=[1.02],
    all_default_seconds=[1.1],
    all_tuned_seconds=[1.0],
    all_own_ratios=[1.01],
)


def test_table() -> None:
    columns = table_of([RECORD]).columns
    assert [str(next(iter(column.cells))) for column in columns][:6] == [
        "gpt2",
        "ebbtide",
        "50%",
        "600 B",
        "590 B",
        "49%",
    ]


def test_rounds_are_pooled_turn_by_turn() -> None:
    """The second round's machine is twice as slow; the last round says what was held."""
    slow = dataclasses.replace(
        RECORD,
        peak_bytes=580,
        all_seconds=[2.0, 2.2, 2.4],
        all_default_seconds=[1.9, 2.3, 2.3],  # one process was quick by chance
        all_tuned_seconds=[2.0, 2.0, 2.0],
        all_own_ratios=[1.03, 1.0],
        buffers_identical=False,
    )
    record = pooled([RECORD, slow])
    assert (record.seconds, record.plain_seconds, record.peak_bytes) == (2.1, 2.0, 580)
    assert (record.plain_default_seconds, record.plain_tuned_seconds) == pytest.approx((2.1, 2.0))
    assert (record.ratio, record.turn_ratio, record.own_ratio) == pytest.approx((1.05, (1.02 + 1.1) / 2, 1.01))
    assert (record.gradients_identical, record.buffers_identical) == (True, False)
    assert pooled([RECORD]).turn_ratio == RECORD.turn_ratio
