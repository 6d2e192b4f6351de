"""A script with steps of several sorts, and how a subcommand is run on it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from typer.testing import CliRunner

from ebbtide.cli import app

SCRIPT = """
import os

import torch

model = torch.nn.Sequential(*[layer for _ in range(6) for layer in (torch.nn.Linear(128, 128), torch.nn.Tanh())])

def one_step():
    model.zero_grad()
    model(torch.ones(512, 128)).square().mean().backward()

def broken():
    raise RuntimeError("out of luck")

def leaving():
    raise SystemExit(0)

def elsewhere(size=512):
    os.chdir("/")
    batched(size)

def batched(size):
    model.zero_grad()
    model(torch.ones(size, 128)).square().mean().backward()

def forward_only():
    model(torch.ones(512, 128))

def idle():
    pass

def peeking():
    if model(torch.ones(1, 128)).sum() > 0:
        one_step()

number = 3
"""


def run(*arguments: str | Path) -> str:
    """Output of a subcommand that must succeed."""
    result = CliRunner().invoke(app, [str(argument) for argument in arguments], catch_exceptions=False)
    assert result.exit_code == 0, result.output
    return result.output


def in_one_line(output: str) -> str:
    """What was said, without the box around it and the breaks of lines, whose places depend on how long paths are."""
    return " ".join(output.replace("│", " ").split())


Failure = Callable[..., str]
