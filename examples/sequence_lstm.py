"""A character LSTM over a long passage in one backward pass, in the memory of a few states.

    python examples/sequence_lstm.py [STEPS [SPILL_DIRECTORY]]

Plain PyTorch keeps the graph of every step until the backward pass; `ebbtide.scan` keeps some states and runs steps
again. The passage is Python's own source text. Loss and gradients are compared with those of the plain loop.
"""

import sys
import tempfile

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import ebbtide
from ebbtide.demo.data import source_text
from ebbtide.units import format_bytes

BATCH, WIDTH = 16, 128
MEMORY = "2MiB"  # 97 states, of 21,508 bytes with those of the random generators
State = tuple[tuple[Tensor, Tensor], Tensor]


class Reader(nn.Module):
    """Reads a character and is told the next; the loss so far is a part of its state."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(256, WIDTH)
        self.lstm = nn.LSTMCell(WIDTH, WIDTH)
        self.head = nn.Linear(WIDTH, 256)

    def forward(self, state: State, x: tuple[Tensor, Tensor]) -> tuple[State, None]:
        """One step."""
        (hidden, loss), (now, following) = state, x
        hidden = self.lstm(self.embedding(now), hidden)
        return (hidden, loss + F.cross_entropy(self.head(hidden[0]), following)), None


def main() -> None:
    """Run both, and compare."""
    steps = int(sys.argv[1]) if len(sys.argv) > 1 else 200
    spill = sys.argv[2] if len(sys.argv) > 2 else tempfile.gettempdir()
    torch.manual_seed(0)
    reader = Reader()
    texts, followings = source_text(BATCH, steps, seed=0)
    inputs = list(zip(texts.unbind(1), followings.unbind(1), strict=True))
    start: State = ((torch.zeros(BATCH, WIDTH), torch.zeros(BATCH, WIDTH)), torch.zeros(()))

    print(f"{steps} steps; ebbtide.scan stores states in {MEMORY} besides what it is measured to take")
    gradients = []
    for name in ("plain loop", "ebbtide.scan"):
        reader.zero_grad()
        with ebbtide.PeakMeter() as meter:
            state = start
            if name == "plain loop":
                for x in inputs:
                    state, _ = reader(state, x)
            else:
                state, _ = ebbtide.scan(reader, start, inputs, memory=MEMORY, spill=spill)
            loss = state[1] / steps
            loss.backward()
        peak = format_bytes(meter.peak_bytes)
        print(f"{name}: loss {float(loss.detach()):.4f}, peak {peak}")
        gradients.append([parameter.grad for parameter in reader.parameters()])
    if not all(torch.equal(a, b) for a, b in zip(*gradients, strict=True) if a is not None and b is not None):
        raise SystemExit("the gradients differ")


if __name__ == "__main__":
    main()
