"""The bar of long chains."""

from __future__ import annotations

import io
import re
import sys
import threading
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

import ebbtide
from ebbtide.sequence import Outcome, run
from ebbtide.sequence.progress import LONG_SECONDS, is_wanted

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


def test_it_is_full_in_the_end(capsys: pytest.CaptureFixture[str]) -> None:
    """It was left as it had been up to a tenth of a second before, for a short chain at its first step."""
    done = of_run(60)
    assert isinstance(done, Outcome)
    steps = done.forward_steps + 60
    assert re.search(rf"forward and back .* {steps}/{steps} ", capsys.readouterr().err)
    of_scan(60, lambda h, step: h * 1.1)
    assert "59/59" in capsys.readouterr().err


class Tee:
    """A stream of a user's own."""

    write = sys.stderr.write
    flush = sys.stderr.flush


class Terminal(Tee):
    def isatty(self) -> bool:
        return True


def test_streams_that_are_no_terminals(monkeypatch: pytest.MonkeyPatch) -> None:
    closed = io.StringIO()
    closed.close()
    for stream, wanted in ((None, False), (Tee(), False), (closed, False), (Terminal(), True)):
        monkeypatch.setattr(sys, "stderr", stream)
        assert is_wanted(None, 2 * LONG_SECONDS) is wanted
        assert not is_wanted(None, LONG_SECONDS / 2)


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
