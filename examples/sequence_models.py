"""Three more cells for `ebbtide.scan`: a neural ODE with fixed steps, a state-space model, and a GRU.

    python examples/sequence_models.py [STEPS]

Each is run by a plain loop and by `ebbtide.scan`; losses and gradients are the same bit for bit.
"""

import sys
from collections.abc import Callable, Iterable
from typing import Any

import torch
from torch import Tensor, nn

import ebbtide
from ebbtide.units import format_bytes

MEMORY = "1MiB"
Cell = Callable[[Any, Any], tuple[Any, Any]]


def neural_ode(steps: int) -> tuple[nn.Module, Cell, Tensor, Iterable[Any]]:
    """Runge-Kutta steps of ``du/dt = field(u)``."""
    field = nn.Sequential(nn.Linear(32, 64), nn.Tanh(), nn.Linear(64, 32))
    dt = 1.0 / steps

    def cell(u: Tensor, _step: int) -> tuple[Tensor, None]:
        k1 = field(u)
        k2 = field(u + dt / 2 * k1)
        k3 = field(u + dt / 2 * k2)
        k4 = field(u + dt * k3)
        return u + dt / 6 * (k1 + 2 * k2 + 2 * k3 + k4), None

    return field, cell, torch.randn(64, 32), range(steps)


def state_space(steps: int) -> tuple[nn.Module, Cell, Tensor, Iterable[Any]]:
    """A diagonal linear state-space model whose decay depends on the input, as in Mamba."""
    decay, write, read = nn.Linear(16, 256), nn.Linear(16, 256), nn.Linear(256, 16)

    def cell(state: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        state = torch.sigmoid(decay(x)) * state + write(x)
        return state, read(state)

    return nn.ModuleList([decay, write, read]), cell, torch.zeros(16, 256), torch.randn(steps, 16, 16)


def gru(steps: int) -> tuple[nn.Module, Cell, Tensor, Iterable[Any]]:
    """PyTorch's own cell; its output is its state."""
    inner = nn.GRUCell(64, 64)

    def cell(hidden: Tensor, x: Tensor) -> tuple[Tensor, Tensor]:
        hidden = inner(x, hidden)
        return hidden, hidden

    return inner, cell, torch.zeros(16, 64), torch.randn(steps, 16, 64)


def plain_loop(cell: Cell, state: Any, inputs: Iterable[Any]) -> tuple[Any, list[Any]]:
    """What `ebbtide.scan` replaces."""
    ys = []
    for x in inputs:
        state, y = cell(state, x)
        ys.append(y)
    return state, ys


def main() -> None:
    """Run all of them."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 100
    for build in (neural_ode, state_space, gru):
        torch.manual_seed(0)
        module, cell, start, inputs = build(steps)
        found = []
        for scanned in (False, True):
            module.zero_grad()
            with ebbtide.PeakMeter() as meter:
                if scanned:
                    state, ys = ebbtide.scan(cell, start, inputs, memory=MEMORY)
                else:
                    state, ys = plain_loop(cell, start, inputs)
                loss = state.square().mean() + sum(y.square().mean() for y in ys if y is not None) / steps
                loss.backward()
            found.append((loss.detach(), meter.peak_bytes, [p.grad for p in module.parameters() if p.grad is not None]))
        (loss, plain_bytes, gradients), (other_loss, peak_bytes, others) = found
        print(
            f"{build.__name__}: loss {float(loss):.6f}, peak {format_bytes(plain_bytes)} by the plain loop, "
            f"{format_bytes(peak_bytes)} and {MEMORY} of states by ebbtide.scan"
        )
        if not (torch.equal(loss, other_loss) and all(map(torch.equal, gradients, others))):
            raise SystemExit("loss or gradients differ")


if __name__ == "__main__":
    main()
