"""The policies of papers on memory managers with every switch, and AlexNet as they describe it."""

from __future__ import annotations

import itertools
from functools import partial

from ebbtide.plan.frontier import Planner
from ebbtide.plan.published.autoswap import autoswap
from ebbtide.plan.published.capuchin import capuchin
from ebbtide.plan.published.hascoet import hascoet
from ebbtide.plan.published.offload_all import offload_all
from ebbtide.plan.published.superneurons import superneurons
from ebbtide.plan.published.vdnn import vdnn
from ebbtide.step import Step
from tests.plan.random_steps import KIB, Tape

POLICIES: dict[str, Planner] = {
    "offload all": offload_all,
    **{f"vdnn {offload}": partial(vdnn, offload=offload) for offload in ("all", "conv", "dyn")},
    **{f"hascoet {layers}": partial(hascoet, layers=layers) for layers in ("conv", "all")},
    "hascoet without copy stream": partial(hascoet, layers="all", copy_stream=False),
    "hascoet without helper": partial(hascoet, layers="all", helper_thread=False),
    "hascoet without prefetch": partial(hascoet, layers="all", prefetch=False),
    **{
        f"autoswap {score}, {mode}": partial(autoswap, score=score, mode=mode, smallest_bytes=32 * KIB, trials=8)
        for score, mode in itertools.product(
            ("doa", "aoa", "wdoa", "swdoa", "voting", "weighted"), ("stick to limit", "zero overhead")
        )
    },
    **{
        f"superneurons {offload}, {recompute}": partial(superneurons, offload=offload, recompute=recompute)
        for offload, recompute in itertools.product(
            ("none", "checkpoints", "cache"), ("none", "speed", "memory", "cost")
        )
    },
    "capuchin": capuchin,
    "capuchin without feedback": partial(capuchin, feedback=0),
    "capuchin without recomputation": partial(capuchin, recompute=False),
}

BATCH = 200
CONV1_BYTES = BATCH * 96 * 55 * 55 * 4

ALEXNET = (
    ("conv1", "convolution", 96 * 55 * 55),
    ("relu1", "relu", 96 * 55 * 55),
    ("lrn1", "lrn", 96 * 55 * 55),
    ("pool1", "max_pool2d", 96 * 27 * 27),
    ("conv2", "convolution", 256 * 27 * 27),
    ("relu2", "relu", 256 * 27 * 27),
    ("lrn2", "lrn", 256 * 27 * 27),
    ("pool2", "max_pool2d", 256 * 13 * 13),
    ("conv3", "convolution", 384 * 13 * 13),
    ("relu3", "relu", 384 * 13 * 13),
    ("conv4", "convolution", 384 * 13 * 13),
    ("relu4", "relu", 384 * 13 * 13),
    ("conv5", "convolution", 256 * 13 * 13),
    ("relu5", "relu", 256 * 13 * 13),
    ("pool5", "max_pool2d", 256 * 6 * 6),
    ("fc1", "addmm", 4096),
    ("relu6", "relu", 4096),
    ("dropout1", "dropout", 4096),
    ("fc2", "addmm", 4096),
    ("relu7", "relu", 4096),
    ("dropout2", "dropout", 4096),
    ("fc3", "addmm", 1000),
    ("softmax", "_softmax", 1000),
)
"""AlexNet's 23 layers: name, op, elements of the output per image."""


def alexnet(*, as_autograd: bool) -> Step:
    """A step of AlexNet with batch 200, 32 bit.

    Args:
        as_autograd: save what PyTorch saves: inputs of convolutions, linear and normalising layers, outputs of relu,
            both for pooling. Otherwise what cuDNN's interface takes, as in SuperNeurons: input and output of every
            layer that is not a convolution or linear, and relu turns the gradient into the next one in place.
    """
    tape = Tape()
    value = tape.external(BATCH * 3 * 227 * 227 * 4)
    saved: list[list[int]] = []
    sizes = [KIB]
    for _, op, elements in ALEXNET:
        before, size = value, BATCH * elements * 4
        costly = op in ("convolution", "addmm")
        node = [] if as_autograd and op in ("relu", "dropout", "_softmax") else [tape.pack(before)]
        value = tape.op([before], [size], seconds=1e-2 if costly else 1e-3, name=f"aten.{op}.default")[0]
        if not costly and not (as_autograd and op == "dropout"):
            node.append(tape.pack(value))
        saved.append(node)
        sizes.append(size)
    gradient = tape.op([value], [0], seconds=1e-5, replay="opaque", name="aten.loss.default")[0]
    for (_, op, _), node, size in zip(reversed(ALEXNET), reversed(saved), reversed(sizes[:-1]), strict=True):
        for number in node:
            tape.unpack(number)
        inputs = [gradient, *(tape.saved[number][0] for number in node)]
        name = f"aten.{op}_backward.default"
        in_place = not as_autograd and op == "relu"
        sizes_made, writes = ([], gradient) if in_place else ([size], None)
        made = tape.op(inputs, sizes_made, writes=writes, seconds=2e-3, replay="opaque", phase="backward", name=name)
        gradient = made[0]
    return tape.step()
