"""What a meter of bytes counts."""

from __future__ import annotations

import torch

from ebbtide.run.meter import PeakMeter, note_memory


def test_what_other_budgets_load_does_not_count() -> None:
    own, other = object(), object()
    with PeakMeter([own]) as meter, PeakMeter() as every:
        loads = [torch.UntypedStorage(4096), torch.UntypedStorage(8192)]
        for storage, tier in zip(loads, (own, other), strict=True):
            note_memory(storage, tier)
    assert meter.peak_bytes == 4096
    assert every.peak_bytes == 4096 + 8192
    note_memory(torch.UntypedStorage(16384), own)
    assert every.peak_bytes == 4096 + 8192, "it has ended"
