"""Train a small GPT on Python's own sources within half of the memory that it needs.

    python examples/train.py [SPILL_DIRECTORY]

The training loop is the usual one, but for the three lines that mention `memory`.
"""

import sys
import tempfile

import torch
import torch.nn.functional as F

import ebbtide
from ebbtide.demo.data import source_text
from ebbtide.demo.models import GPT

STEPS = 10


def main() -> None:
    """Train for `STEPS` steps and print what the budget did."""
    spill = sys.argv[1] if len(sys.argv) > 1 else tempfile.gettempdir()
    torch.manual_seed(0)
    model = GPT(256, width=256, layers=4, heads=4, context=256)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with ebbtide.Budget("50%", spill=spill) as memory:
        for number in range(STEPS):
            inputs, targets = source_text(8, 256, seed=number)
            with memory.step():
                loss = F.cross_entropy(model(inputs).flatten(0, 1), targets.flatten())
                loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            print(f"step {number}: loss {float(loss.detach()):.4f}")
        print(memory.report())


if __name__ == "__main__":
    main()
