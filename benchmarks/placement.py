"""What it gains that blocks lie where their threads find their lines: ``python -m benchmarks.placement --json FILE``.

Steps within a budget, whose blocks lie as `ebbtide.place.keep_local` has them, in turns with such whose blocks lie as
`place` alone would have them, and with plain steps; all in one process, by one plan. Before each turn the layout is
forgotten, and worked out anew from a rehearsed step. The larger the share of a layout that other cores wrote last, and
the less these share a cache, the larger the difference: on a virtual machine it changes from minute to minute.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import random
import statistics
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from rich.console import Console
from rich.progress import track
from rich.table import Table

import ebbtide
from benchmarks.models import DenseNet, MobileNetV2, UNet
from benchmarks.networks import Build, images, segmentation
from benchmarks.worker import FIRST, TIMED
from ebbtide.demo.models import ResNet
from ebbtide.place import Block, Layout
from ebbtide.run import rehearsed

MODELS: dict[str, Build] = {
    "mobilenetv2": images(MobileNetV2, batch=16, side=160),
    "resnet50": images(lambda: ResNet(blocks=(3, 4, 6, 3)), batch=8, side=160),
    "densenet121": images(DenseNet, batch=8, side=128),
    "unet": segmentation(UNet, batch=1, side=192),
}
SETTLING = 40
"""Steps within which a budget has settled, and after which it watches no longer."""
VARIANTS = ("plain", "place", "keep_local")


@dataclasses.dataclass(frozen=True)
class Gain:
    """One model.

    Attributes:
        model: its name.
        fraction: the budget, of the plain peak.
        place, keep_local: seconds of a step by those of a plain one of the same turn, medians.
        ratio: a step's seconds with `keep_local` by those without, the median over turns.
        seconds: medians of each turn's steps, by variant.
    """

    model: str
    fraction: float
    place: float
    keep_local: float
    ratio: float
    seconds: dict[str, list[float]]


def measure(model: str, fraction: float, repeats: int, console: Console) -> Gain:
    """Turns of one model's steps."""
    torch.manual_seed(0)
    step = MODELS[model]()
    takes: dict[str, list[float]] = {variant: [] for variant in VARIANTS}
    with ebbtide.Budget(f"{fraction:.0%}") as memory:
        for _ in range(SETTLING):
            with memory.step():
                step()
        dice = random.Random(0)
        for _ in track(range(repeats), model, console=console, transient=True):
            for variant in dice.sample(VARIANTS, len(VARIANTS)):
                takes[variant].append(_turn(step, memory, variant))
    plain, placed, local = (takes[variant] for variant in VARIANTS)
    return Gain(model, fraction, _ratio(placed, plain), _ratio(local, plain), _ratio(local, placed), takes)


def _turn(step: Callable[[], None], memory: ebbtide.Budget, variant: str) -> float:
    """Seconds of a step, the median of the turn's."""
    active: Callable[[], AbstractContextManager[Any]] = contextlib.nullcontext
    if variant != "plain":
        active = memory.step
        kind = memory._loop.kinds.current
        assert kind is not None
        with _as_placed() if variant == "place" else contextlib.nullcontext():
            kind.rehearsed.forget()
            with memory.step():
                step()
    found = []
    for _ in range(FIRST + TIMED):
        began = time.perf_counter()
        with active():
            step()
        found.append(time.perf_counter() - began)
    return statistics.median(found[FIRST:])


def _as_placed() -> AbstractContextManager[object]:
    """Layouts made meanwhile are those of `place`."""

    def unmoved(_blocks: Sequence[Block], layout: Layout, _threads: int, _alignment_bytes: int) -> Layout:
        return layout

    return mock.patch.object(rehearsed, "keep_local", unmoved)


def _ratio(seconds: Sequence[float], others: Sequence[float]) -> float:
    return statistics.median(one / other for one, other in zip(seconds, others, strict=True))


def table_of(gains: Sequence[Gain]) -> Table:
    """What is printed."""
    table = Table("model", "fraction", "place / plain", "keep_local / plain", "keep_local / place")
    for gain in gains:
        ratios = (f"{ratio:.3f}" for ratio in (gain.place, gain.keep_local, gain.ratio))
        table.add_row(gain.model, f"{gain.fraction:g}", *ratios)
    return table


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(MODELS), help="comma-separated; default: all")
    parser.add_argument("--fraction", type=float, default=0.6, help="of the plain peak; default: 0.6")
    parser.add_argument("--repeats", type=int, default=15, help="turns; default: 15")
    parser.add_argument("--json", type=Path, help="file for the figures")
    options = parser.parse_args(arguments)
    unknown = set(options.models.split(",")) - set(MODELS)
    if unknown:
        parser.error(f"there is no model {', '.join(sorted(unknown))}; there are {', '.join(MODELS)}")
    console = Console(stderr=True)
    gains = [measure(model, options.fraction, options.repeats, console) for model in options.models.split(",")]
    if options.json is not None:
        options.json.write_text(json.dumps([dataclasses.asdict(gain) for gain in gains], indent=1) + "\n")
    Console(file=sys.stdout).print(table_of(gains))


if __name__ == "__main__":
    main()
