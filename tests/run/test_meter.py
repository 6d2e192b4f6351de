"""What a meter of bytes counts."""

from __future__ import annotations

import threading

import torch

from ebbtide.observe.loads import note_memory
from ebbtide.run.meter import PeakMeter


def load_in_another_thread(memory: torch.UntypedStorage, tier: object) -> None:
    thread = threading.Thread(target=note_memory, args=(memory, tier))
    thread.start()
    thread.join()


def test_what_budgets_in_other_threads_load_does_not_count() -> None:
    own, other = object(), object()
    with PeakMeter([own]) as meter, PeakMeter() as every:
        loads = [torch.UntypedStorage(4096), torch.UntypedStorage(8192)]
        for storage, tier in zip(loads, (own, other), strict=True):
            load_in_another_thread(storage, tier)
    assert meter.peak_bytes == 4096
    assert every.peak_bytes == 4096 + 8192
    note_memory(torch.UntypedStorage(16384), own)
    assert every.peak_bytes == 4096 + 8192, "it has ended"


def test_what_budgets_within_the_block_load_counts() -> None:
    own, other = object(), object()
    with PeakMeter([own]) as meter:
        loads = [torch.UntypedStorage(4096), torch.UntypedStorage(8192)]
        for storage, tier in zip(loads, (own, other), strict=True):
            note_memory(storage, tier)
    assert meter.peak_bytes == 4096 + 8192
