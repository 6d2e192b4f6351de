"""What a budget costs on a GPU: ebbtide and its peers against plain PyTorch: ``python -m benchmarks.gpu --json FILE``.

Four models in bfloat16, five budgets and five peers each. See benchmarks/README.md for what is measured and how.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import platform
import sys
import time
import warnings
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from benchmarks.gpu.devices import Device, make_device
from benchmarks.gpu.methods import METHODS, Options
from benchmarks.gpu.records import Journal, table_of
from benchmarks.gpu.run import Runner, Settings
from benchmarks.gpu.workloads import MODELS
from ebbtide.machine import Machine

FRACTIONS = "1,0.7,0.5,0.35,0.25"
TIME_LIMIT_SECONDS = 460
COPY_BYTES = 1 << 30
SMALL_COPY_BYTES = 1 << 24


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(
        prog="benchmarks.gpu", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the records here, anew after each case")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--small", action="store_true", help="small models, for a try; always on a CPU")
    parser.add_argument("--models", default=",".join(MODELS), help="default: %(default)s")
    parser.add_argument("--fractions", default=FRACTIONS, help="of the plain activation bytes; default: %(default)s")
    parser.add_argument("--methods", default=",".join(METHODS), help="default: %(default)s")
    parser.add_argument("--batch-scale", type=float, default=1.0, help="factor for all batches; default: %(default)s")
    parser.add_argument("--repeats", type=int, default=5, help="timed steps of a case; default: %(default)s")
    parser.add_argument(
        "--time-limit",
        type=float,
        default=TIME_LIMIT_SECONDS,
        metavar="SECONDS",
        help="after it, cases are skipped; default: %(default)s",
    )
    parser.add_argument("--deterministic", action="store_true", help="kernels that give the same bits each time")
    parser.add_argument("--host", default="48GiB", help="pinned memory for budgets, at most; default: %(default)s")
    parser.add_argument("--spill", help="directory for what has no place there; default: the system's temporary one")
    options = parser.parse_args(arguments)
    for given, known in ((options.models, MODELS), (options.methods, METHODS)):
        if unknown := set(given.split(",")) - set(known):
            parser.error(f"there is no {', '.join(sorted(unknown))}; there are {', '.join(known)}")
    if options.device == "cuda" and not torch.cuda.is_available():
        parser.error("this PyTorch finds no CUDA device; --device cpu runs small models on the CPU")
    return options


@contextlib.contextmanager
def deterministic() -> Iterator[None]:
    """Kernels that give the same bits each time, where there are such."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # read when cuBLAS is first used
    torch.use_deterministic_algorithms(True, warn_only=True)
    # Filling what an op leaves open takes time, and only programs that read it need that.
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    try:
        yield
    finally:
        torch.utils.deterministic.fill_uninitialized_memory = True  # type: ignore[attr-defined]
        torch.use_deterministic_algorithms(False)


def head_of(options: argparse.Namespace, device: Device) -> dict[str, Any]:
    """What is known of a run when it begins."""
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": device.name,
        "versions": {"python": platform.python_version(), "torch": torch.__version__, "cuda": torch.version.cuda},
        "cpus": os.cpu_count(),
        "allocator": os.environ.get("PYTORCH_CUDA_ALLOC_CONF", ""),
        "options": {name: str(value) for name, value in vars(options).items()},
    }


def main(arguments: Sequence[str] | None = None, machine: Machine | None = None) -> None:
    """Run what the command line asks for, and print the table. Links that are not given are measured."""
    began = time.perf_counter()
    options = parse(arguments)
    device = make_device(options.device)
    small = options.small or options.device == "cpu"
    settings = Settings(
        models=tuple(options.models.split(",")),
        fractions=tuple(float(fraction) for fraction in options.fractions.split(",")),
        methods=tuple(options.methods.split(",")),
        repeats=options.repeats,
        batch_scale=options.batch_scale,
        small=small,
        copy_bytes=SMALL_COPY_BYTES if small else COPY_BYTES,
    )
    console = Console(width=None if sys.stdout.isatty() else 170)
    journal = Journal(options.json, head_of(options, device))
    budgets = Options(options.spill, options.host, machine)
    runner = Runner(settings, budgets, device, journal, console, began + options.time_limit)
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings("ignore", message=".*deterministic.*")
        if options.deterministic:
            stack.enter_context(deterministic())
        runner.run()
    journal.note(took_seconds=time.perf_counter() - began)
    console.print(table_of(journal.records))


if __name__ == "__main__":
    main()
