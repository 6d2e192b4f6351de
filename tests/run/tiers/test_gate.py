"""A gate lets everybody through once it is open, whatever interrupts those who wait."""

from __future__ import annotations

import queue
import signal
import threading

import pytest

from ebbtide.run.tiers.gate import Gate


def test_all_who_wait_go_through() -> None:
    gate = Gate()
    through: queue.SimpleQueue[int] = queue.SimpleQueue()

    def go_through() -> None:
        gate.wait()
        through.put(1)

    threads = [threading.Thread(target=go_through) for _ in range(5)]
    for thread in threads:
        thread.start()
    assert not gate.is_open
    assert through.empty()
    gate.open()
    for thread in threads:
        thread.join(20)
    assert through.qsize() == 5
    gate.open()
    gate.wait()
    assert gate.is_open


def test_a_wait_may_be_interrupted_at_any_moment() -> None:
    def interrupt(*_: object) -> None:
        raise InterruptedError

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        for _ in range(300):
            gate = Gate()
            other = threading.Thread(target=gate.wait)
            other.start()
            with pytest.raises(InterruptedError):  # noqa: PT012
                signal.setitimer(signal.ITIMER_REAL, 1e-4)
                gate.wait()
            gate.open()
            gate.wait()
            other.join(20)
            assert not other.is_alive()
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
