"""The bar of long chains."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ebbtide
from ebbtide.sequence import run

pytestmark = pytest.mark.usefixtures("nothing_left")


def of_run(n: Any, forward: Callable[[Any, int], Any] = lambda u, step: u * 1.1) -> object:
    reverse, turn = (lambda u, adjoint, step: adjoint * 1.1), (lambda u: u)
    return run(forward, reverse, n, np.ones(600), turn=turn, memory=4 * 4800, progress=True)


def of_scan(n: int, forward: Callable[[Any, int], Any]) -> object:
    return ebbtide.scan(lambda h, step: (forward(h, step), None), torch.ones(5), range(n), progress=True)


def test_progress(capsys: pytest.CaptureFixture[str]) -> None:
    of_run(60)
    of_run(lambda _, step: step < 60)
    assert "forward" in capsys.readouterr().err


@pytest.mark.parametrize("chain", [of_run, of_scan])
def test_it_ends_with_an_error(chain: Callable[..., object]) -> None:
    """Not only once the error's traceback is gone."""
    before = set(threading.enumerate())
    with pytest.raises(ZeroDivisionError) as kept:
        chain(60, lambda u, step: u * (1 / (step - 30)))
    for thread in set(threading.enumerate()) - before:
        thread.join(timeout=5)
        assert not thread.is_alive()
    assert kept.tb is not None
