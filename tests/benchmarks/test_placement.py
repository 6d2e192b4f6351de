"""The placement's benchmark takes turns between layouts of one plan."""

from __future__ import annotations

import pytest
from rich.console import Console
from torch import nn

from benchmarks import placement
from benchmarks.networks import images
from ebbtide.place import keep_local
from ebbtide.run import rehearsed
from ebbtide.run.native import arena_library


def small() -> nn.Module:
    layers = [nn.Sequential(nn.Conv2d(3 if i == 0 else 16, 16, 3, padding=1), nn.ReLU()) for i in range(6)]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(16, 10))


def test_each_turn_has_a_layout_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[str] = []

    def counted(blocks: object, layout: object, threads: int, alignment_bytes: int) -> object:
        made.append("keep_local")
        return keep_local(blocks, layout, threads, alignment_bytes)  # type: ignore[arg-type]

    monkeypatch.setattr(rehearsed, "keep_local", counted)
    monkeypatch.setattr(placement, "MODELS", {"small": images(small, batch=4, side=64)})
    gain = placement.measure("small", 0.7, 3, Console(quiet=True))
    assert set(gain.seconds) == set(placement.VARIANTS)
    assert all(len(seconds) == 3 for seconds in gain.seconds.values())
    assert gain.ratio > 0
    if arena_library() is not None:
        assert 4 <= len(made) <= 6  # once as the budget settles, once more if it plans anew, and in each of three turns
    assert placement.table_of([gain]).row_count == 1
