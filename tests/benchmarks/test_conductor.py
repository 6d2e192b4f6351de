"""The conductor's benchmark measures what it says."""

from __future__ import annotations

import pytest
import torch
from rich.console import Console

from benchmarks import conductor


@pytest.fixture
def short_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(conductor, "LENGTH", 40)
    # Threads are not what is tested, and other tests of this process want theirs back.
    monkeypatch.setattr(torch, "set_num_threads", lambda number: None)


@pytest.mark.usefixtures("short_chain")
def test_every_figure_is_measured() -> None:
    costs = conductor.measure(2, Console(quiet=True))
    assert [each.limit for each in costs] == [None, None, 1.5, None, 3.0, None]
    assert conductor.table_of(costs).row_count == len(costs)


@pytest.mark.usefixtures("short_chain")
def test_the_script_computes_about_half_of_the_chain_again() -> None:
    start = torch.randn(conductor.WIDE, requires_grad=True)
    script = conductor.script_of(start, 0.7)
    assert 0.1 * conductor.LENGTH < len(script.known) < conductor.LENGTH


def test_a_figure_is_the_median_of_differences() -> None:
    found = conductor.cost("it", "op", [3e-3, 5e-3, 9e-3], [1e-3, 2e-3, 3e-3], None)
    assert found.microseconds == pytest.approx(3e-3 / conductor.LENGTH * 1e6)
    assert conductor.cost("it", "op", [3e-3, 5e-3], [1e-3, 3e-3], None, 10).microseconds == pytest.approx(200.0)
