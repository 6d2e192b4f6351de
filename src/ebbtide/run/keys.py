"""What tells kinds of steps apart."""

from __future__ import annotations

from collections.abc import Set

from ebbtide.step import Saved, Step


def signature(saved: Saved) -> tuple[str, tuple[int, ...]]:
    """What tells one saved tensor from another at the time it is saved."""
    return (saved.dtype, saved.shape)


def step_key(step: Step, missing: Set[int] = frozenset(), end: int | None = None, *, keeps_graphs: bool) -> int:
    """A hash of what such a step saves, in order, of the order in which it asks for it, and of whether it keeps graphs.

    Args:
        missing: numbers of saved tensors that it leaves out.
        end: the event before which it ends; None for the last one.
        keeps_graphs: whether a backward pass keeps the graph that it goes through.
    """
    events = [event for event in step.events[:end] if event.saved not in missing]
    saved = [event.saved for event in events if event.kind == "pack"]
    numbers = {number: place for place, number in enumerate(saved)}
    asked = (numbers[event.saved] for event in events if event.kind == "unpack")
    return hash((*(signature(step.saved[number]) for number in saved), None, *asked, keeps_graphs))
