"""What a graph holds to the end of a step though nothing asks for it any more."""

from __future__ import annotations

import collections

import torch
from torch import Tensor, nn

from ebbtide.run.observing import observe_step
from ebbtide.step import Step
from ebbtide.step_checks import check_step

WIDTH, BATCH, LAYERS = 32, 64, 4


def model() -> nn.Module:
    """What it saves for GELU is nobody else's, nor are the inputs of its layers but the first."""
    return nn.Sequential(*[layer for _ in range(LAYERS) for layer in (nn.Linear(WIDTH, WIDTH), nn.GELU())])


def finals(step: Step) -> int:
    """How many absences of activations are final; each is checked."""
    check_step(step)
    found = [absence for absence in step.absences if step.is_final(absence)]
    for absence in found:
        asked = [moment for saved in step.saved if saved.value == absence.value for moment in saved.unpacked]
        assert max(asked, default=-1) < absence.opens < absence.closes == step.values[absence.value].dies
        assert any(absence.opens <= moment < absence.closes for moment in step.event_moments())
        others = [other for other in step.absences if other.value == absence.value and not step.is_final(other)]
        assert all(other.closes < absence.opens for other in others)
    return sum(step.values[absence.value].size_bytes == BATCH * WIDTH * 4 for absence in found)


def test_a_graph_that_is_kept() -> None:
    net, x, kept = model(), torch.randn(BATCH, WIDTH), []

    def run(keep: bool) -> Step:
        def step() -> None:
            loss = net(x).square().mean()
            loss.backward(retain_graph=keep)
            kept.append(loss)

        return observe_step(step)

    assert finals(run(keep=False)) == 0
    assert finals(run(keep=True)) == 2 * LAYERS - 1 + 1  # outputs of layers, inputs of the next ones, and of the square


def test_a_graph_that_no_pass_goes_through() -> None:
    net, x, kept = model(), torch.randn(BATCH, WIDTH), []

    def step() -> None:
        kept.append(net(x).sum())
        net(x).square().mean().backward()

    step_ = observe_step(step)
    assert finals(step_) == 2 * LAYERS - 1  # the sum saves nothing
    unasked = [absence for absence in step_.absences if step_.is_final(absence)]
    assert all(not saved.unpacked for absence in unasked for saved in step_.saved if saved.value == absence.value)


def test_a_step_without_a_backward_pass() -> None:
    """As that of a batch that is skipped."""
    net, x, kept = model(), torch.randn(BATCH, WIDTH), []
    assert finals(observe_step(lambda: kept.append(net(x).sum()))) == 2 * LAYERS - 2  # the last one lives to no event


def test_a_graph_that_ends_within_the_step() -> None:
    net, x = model(), torch.randn(BATCH, WIDTH)

    def look() -> float:
        y = net(x).square()
        return y.mean().item()

    def train() -> float:
        loss = net(x).square().mean()
        loss.backward(retain_graph=True)
        return loss.item()

    def step() -> None:
        look()
        train()
        x.exp()

    step_ = observe_step(step)
    assert finals(step_) == 2 * LAYERS - 1 + 2 * LAYERS  # what is saved last in the first one lives to no other event
    ends = collections.Counter(absence.closes for absence in step_.absences if step_.is_final(absence))
    assert len(ends) == 2
    assert max(ends) < step_.moments


def test_what_somebody_holds_has_none() -> None:
    net, x = model(), torch.randn(BATCH, WIDTH)
    kept: list[Tensor] = []

    def step() -> None:
        h = x
        for layer in net.children():
            h = layer(h)
            kept.append(h)
        kept.append(h.square().mean())
        kept[-1].backward(retain_graph=True)

    assert finals(observe_step(step)) == 0


def test_two_passes_and_a_graph_that_is_kept() -> None:
    net, x, kept = model(), torch.randn(BATCH, WIDTH), []

    def step() -> None:
        loss = net(x).square().mean()
        loss.backward(retain_graph=True)
        loss.backward(retain_graph=True)
        kept.append(loss)

    step_ = observe_step(step)
    assert finals(step_) == 2 * LAYERS
    counts = {
        number: sum(absence.value == number for absence in step_.absences)
        for number in {absence.value for absence in step_.absences if step_.is_final(absence)}
    }
    assert max(counts.values()) == 3
