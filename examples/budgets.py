"""Ask what a budget would cost before training with it: one step is observed, then planned for several budgets.

python examples/budgets.py
"""

import tempfile

import torch
from torch import nn

from ebbtide.errors import BudgetError
from ebbtide.plan import solve
from ebbtide.run.calibrate import machine_for
from ebbtide.run.observing import observe_step
from ebbtide.units import format_bytes, format_seconds


def main() -> None:
    """Print the predicted peak and time of a small network for budgets from 100 % to 40 % of its plain peak."""
    layers = [part for _ in range(12) for part in (nn.Linear(512, 512), nn.GELU(), nn.LayerNorm(512))]
    model = nn.Sequential(*layers)
    inputs = torch.randn(2048, 512)

    def run() -> None:
        model.zero_grad()
        model(inputs).square().mean().backward()

    run()  # the first time everything is slower
    step = observe_step(run)
    machine = machine_for(tempfile.gettempdir())
    plain = solve(step, machine, 2**60)
    print(f"plain: {format_bytes(plain.peak_bytes)}, {format_seconds(plain.seconds)}")
    for percent in (80, 60, 40):
        try:
            plan = solve(step, machine, plain.peak_bytes * percent // 100)
        except BudgetError as error:
            print(f"{percent} %: {error}")
        else:
            print(f"{percent} %: {format_bytes(plan.peak_bytes)}, {format_seconds(plan.seconds)}")


if __name__ == "__main__":
    main()
