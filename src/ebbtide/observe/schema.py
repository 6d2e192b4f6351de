"""What can be known about an ATen operator without running it: what it writes, and how it may be run again."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from functools import cache
from typing import Any

import torch

from ebbtide.step import Replay

_BATCH_NORM = frozenset({"native_batch_norm", "_native_batch_norm_legit", "cudnn_batch_norm", "miopen_batch_norm"})
CALLING_OTHERS = ("_trilinear",)
"""Ops of ATen that call others which autocast has an opinion on."""
_GATHERING = frozenset({"batch_norm_gather_stats", "batch_norm_gather_stats_with_counts", "batch_norm_update_stats"})
"""Parts of batch norm over several devices that write running statistics, too, of which their schemas say nothing."""
_COLLECTIVES = "c10d::"
"""Ops of `torch.distributed` on process groups, of which schemas do not say what is written: the first argument, if
their names end as those of ops in place do."""
_UNINITIALISED = ("empty", "new_empty", "resize", "_resize", "as_strided_scatter", "set_")
_PARTLY_WRITTEN = frozenset({"aten::_ctc_loss", "aten::mkldnn_rnn_layer"})
_DATA_DEPENDENT = frozenset(
    {"_local_scalar_dense", "item", "nonzero", "unique2", "_unique2", "masked_select", "bincount"}
)


@dataclasses.dataclass(frozen=True, slots=True)
class OperatorInfo:
    """Facts about one operator.

    Attributes:
        name: qualified name, as in ``aten.relu_.default``.
        written: positions of the arguments that it writes in place.
        written_names: names of the keyword-only arguments that it writes in place.
        replay: see `ebbtide.step.Op.replay`.
        tensors: positions of the arguments that are tensors or lists of them.
    """

    name: str
    written: tuple[int, ...]
    written_names: tuple[str, ...]
    replay: Replay
    tensors: tuple[int, ...] = ()


COMPILED_GRAPH = OperatorInfo("compiled_graph", (), (), "opaque")
"""A graph that `torch.compile` made, in place of its ops."""


@cache
def operator_info(func: Any) -> OperatorInfo:
    """Facts about ``func``, an `OpOverload` or a higher-order operator."""
    schema = getattr(func, "_schema", None)
    if schema is None:
        return OperatorInfo(str(func), (), (), "opaque")
    written = [i for i, a in enumerate(schema.arguments) if _is_written(a) and not a.kwarg_only]
    if schema.name.startswith(_COLLECTIVES) and schema.name.endswith("_"):
        written = [0]
    names = [a.name for a in schema.arguments if _is_written(a) and a.kwarg_only]
    replay = _replay(func, schema, bool(written), bool(names))
    tensors = tuple(i for i, a in enumerate(schema.arguments) if "Tensor" in str(a.type))
    return OperatorInfo(str(func), tuple(written), tuple(names), replay, tensors)


def is_partly_written(func: Any) -> bool:
    """Whether ``func`` leaves parts of its last result unwritten. Its backward op does not read those parts, but a
    second run does not give the same bits in them."""
    return getattr(getattr(func, "_schema", None), "name", "") in _PARTLY_WRITTEN


@cache
def running_statistics(func: Any) -> tuple[int, ...]:
    """Positions of the running statistics that a batch norm is given, and writes in training mode."""
    schema = getattr(func, "_schema", None)
    if schema is None or schema.name.partition("::")[2] not in _BATCH_NORM | _GATHERING:
        return ()
    return tuple(i for i, a in enumerate(schema.arguments) if a.name in ("running_mean", "running_var"))


def trains(func: Any, args: Sequence[Any]) -> bool:
    """Whether a batch norm that is given ``args`` writes its running statistics, if it has some.

    That is for its argument to say; the parts of one over several devices, which have none for it, always do.
    """
    place = _training_place(func)
    return place is None or args[place] is True


@cache
def _training_place(func: Any) -> int | None:
    return next((i for i, a in enumerate(func._schema.arguments) if a.name in ("training", "train")), None)


def _is_written(argument: Any) -> bool:
    return argument.alias_info is not None and bool(argument.alias_info.is_write)


def _replay(func: Any, schema: Any, writes: bool, writes_out: bool) -> Replay:
    namespace, base = schema.name.split("::")
    if torch.Tag.nondeterministic_seeded in func.tags:
        return "random"
    # A recipe must not end in memory that a kernel unknown to us fills, nor run what is not ATen's own.
    if namespace not in ("aten", "prims") or base.startswith(_UNINITIALISED) or writes_out:
        return "opaque"
    if base in _DATA_DEPENDENT or base in _GATHERING or base in CALLING_OTHERS:
        return "opaque"
    if base in _BATCH_NORM and func._overloadname in ("default", ""):
        return "batch_norm"
    if writes:
        return "in_place" if base.endswith("_") and not base.startswith("_foreach") else "opaque"
    if any(result.alias_info is not None for result in schema.returns):
        return "view"
    return "pure"
