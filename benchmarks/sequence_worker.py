"""A process of the benchmark of sequences: runs chains of one cell as it is told, a line of JSON for each."""

from __future__ import annotations

import argparse
import json
import sys
import warnings

import torch

from benchmarks.sequence_cells import make_cell
from benchmarks.sequence_methods import METHODS
from ebbtide.sequence import run

WARM_METHODS = ("ours", "scan")
WARM_STEPS = 1000
"""These take up modules when they are first wanted: that is no memory of a chain, so one is run before."""


def main() -> None:
    """Answer requests until the input ends."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cell", required=True)
    parser.add_argument("--method", required=True, choices=METHODS)
    parser.add_argument("--spill", required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)  # compute has one core, transfers the other
    warnings.filterwarnings("ignore", message="The given NumPy array is not writable")
    cell = make_cell(arguments.cell)
    method = METHODS[arguments.method]
    run(cell.forward, cell.reverse, 50, cell.start, turn=cell.turn, memory="64MiB")  # compiles
    if arguments.method in WARM_METHODS:
        method(cell, WARM_STEPS, 10, arguments.spill)
    for line in sys.stdin:
        request = json.loads(line)
        n, count = request.pop("n"), request.pop("count")
        print(json.dumps(method(cell, n, count, arguments.spill, **request)), flush=True)


if __name__ == "__main__":
    main()
