"""Adjoint of a 2-D wave equation over many time steps, in the memory of a few, checked against finite differences.

    python examples/adjoint_wave.py [STEPS [SPILL_DIRECTORY]]

A wave starts from a bump and is driven by a source, and the squared pressure at a few receivers at the end is the
objective. Its gradient with respect to the initial pressure and to the wave speed comes from one forward and one
reverse run; plain code would keep every state.
"""

import sys
import tempfile

import numpy as np
import numpy.typing as npt

from ebbtide.sequence import run

Field = npt.NDArray[np.float64]
State = tuple[Field, Field]  # pressure now, and one step before

SIZE = 128
MEMORY = "4MiB"  # 16 states; a state has two fields of 128 KiB
SOURCE = (40, 40)
RECEIVERS = (slice(20, 24), slice(60, 90))


def laplacian(u: Field) -> Field:
    """Five-point Laplacian with zero outside; it is its own adjoint."""
    result = -4 * u
    result[1:] += u[:-1]
    result[:-1] += u[1:]
    result[:, 1:] += u[:, :-1]
    result[:, :-1] += u[:, 1:]
    return result


class Wave:
    """Leapfrog steps of ``u_tt = speed^2 laplacian(u) + source``, and their adjoint."""

    def __init__(self, speed: Field) -> None:
        self.speed = speed
        self.speed_gradient = np.zeros_like(speed)

    def forward(self, state: State, step: int) -> State:
        """One step."""
        now, before = state
        following = 2 * now - before + self.speed**2 * laplacian(now)
        following[SOURCE] += 0.01 * np.sin(0.2 * step)
        return following, now

    def reverse(self, state: State, adjoint: State, _step: int) -> State:
        """The adjoint before a step from that after it; the gradient of the speed adds up on the way."""
        now, _ = state
        of_next, of_now = adjoint
        self.speed_gradient += of_next * 2 * self.speed * laplacian(now)
        return 2 * of_next + laplacian(self.speed**2 * of_next) + of_now, -of_next


def objective(state: State) -> float:
    """Squared pressure at the receivers."""
    return 0.5 * float(np.sum(state[0][RECEIVERS] ** 2))


def objective_adjoint(state: State) -> State:
    """Its derivative."""
    of_now = np.zeros_like(state[0])
    of_now[RECEIVERS] = state[0][RECEIVERS]
    return of_now, np.zeros_like(of_now)


def simulate(pressure: Field, speed: Field, steps: int) -> float:
    """The objective, by a plain loop."""
    wave, state = Wave(speed), (pressure, pressure)
    for step in range(steps):
        state = wave.forward(state, step)
    return objective(state)


def main() -> None:
    """Run, print what it took, and check the gradient in a random direction."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 600
    spill = sys.argv[2] if len(sys.argv) > 2 else tempfile.gettempdir()
    dice = np.random.default_rng(0)
    y, x = np.mgrid[0:SIZE, 0:SIZE] / SIZE
    pressure = np.exp(-200 * ((x - 0.5) ** 2 + (y - 0.5) ** 2))
    speed = 0.4 + 0.1 * x + 0.01 * dice.random((SIZE, SIZE))

    wave = Wave(speed)
    done = run(
        wave.forward, wave.reverse, steps, (pressure, pressure), turn=objective_adjoint, memory=MEMORY, spill=spill
    )
    print(done.choice)
    print(f"waited {done.waited_seconds:.3f} s for the disk; each step ran forward {done.recompute_factor:.2f} times")

    pressure_gradient = done.adjoint[0] + done.adjoint[1]  # both fields start as the same pressure
    for name, gradient, direction in (
        ("initial pressure", pressure_gradient, dice.standard_normal(pressure.shape)),
        ("wave speed", wave.speed_gradient, 0.1 * dice.standard_normal(speed.shape)),
    ):
        small = 1e-5 * direction
        shift = (small, 0) if name == "initial pressure" else (0, small)
        above = simulate(pressure + shift[0], speed + shift[1], steps)
        below = simulate(pressure - shift[0], speed - shift[1], steps)
        expected, found = (above - below) / 2, float(np.sum(gradient * small))
        error = abs(found - expected) / abs(expected)
        print(f"{name}: by the adjoint {found:.9e}, by finite differences {expected:.9e}")
        if not error < 1e-5:
            raise SystemExit(f"the gradients differ by {error:.1e}")


if __name__ == "__main__":
    main()
