"""A GPT of 1.5 billion parameters, as large as GPT-2 XL, whose step does not fit into the 80 GB of an A100 or H100.

Nothing of that size is needed to plan it: on any laptop, in seconds,

    ebbtide plan --machine a100-80gb --model examples/gpt2_xl.py
    ebbtide plan --machine h200 --model examples/gpt2_xl.py

says whether it fits, and what it takes to make it fit;

    ebbtide batch examples/gpt2_xl.py --machine h200 --overhead 5%

how many samples do at most, if they may take 5 % longer. Run as a script it does the first of these from Python:

    python examples/gpt2_xl.py
"""

import functools
from collections.abc import Callable

import torch
import torch.nn.functional as F

from ebbtide.demo.models import GPT
from ebbtide.machines import load_machine
from ebbtide.observe.fake import observe_fake
from ebbtide.plan import solve
from ebbtide.units import format_bytes, format_seconds

BATCH, CONTEXT, VOCABULARY = 32, 1024, 50257


@functools.cache
def build(batch_size: int = BATCH) -> Callable[[], None]:
    """Make the model and one batch; returns the step."""
    model = GPT(VOCABULARY, width=1600, layers=48, heads=25, context=CONTEXT).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), fused=True)
    tokens = torch.randint(VOCABULARY, (batch_size, CONTEXT + 1), device="cuda")

    def step() -> None:
        optimizer.zero_grad()
        F.cross_entropy(model(tokens[:, :-1]).flatten(0, 1), tokens[:, 1:].flatten()).backward()
        optimizer.step()

    return step


def one_step(batch_size: int = BATCH) -> None:
    """One training step, for the command line."""
    build(batch_size)()


def main() -> None:
    """Print the peak and the time of a plain step and of a planned one within 70 GiB of an A100."""
    machine = load_machine("a100-80gb")
    step = observe_fake(build, machine)
    plan = solve(step, machine, 70 * 2**30)
    print(f"plain: {format_bytes(plan.plain_peak_bytes)}, {format_seconds(plan.plain_seconds)}")
    print(f"planned: {format_bytes(plan.peak_bytes)}, {format_seconds(plan.seconds)}")


if __name__ == "__main__":
    main()
