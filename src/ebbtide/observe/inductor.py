"""Graphs that `torch.compile` made: each is one op of the step that runs it.

NOTE [Compiled graphs]
1. No dispatch mode sees the kernels that Inductor writes. One method runs all of its graphs, forward and backward:
   `CompiledFxGraph.__call__`. There the modes of ours that are on are told, and take the graph for one op that nobody
   can run again. What other backends make are ATen calls, which modes see as ever.
2. Dynamo compiles nothing under a mode, and never again what it did not compile then, unless the mode says that it does
   not mind (`TorchDispatchMode.ignore_compile_internals`; where PyTorch has no such thing, see `uncompiled.py`). It
   takes modes off meanwhile; how we follow modules it would trace along, so that rests, too. And it would compile
   functions of ours that run inside a user's frame, so our files are on its list of those to leave alone, and what
   modes and hooks call from elsewhere is left alone with them (`never_compiled`).
"""

from __future__ import annotations

import contextlib
import functools
import sys
from collections.abc import Iterator
from typing import Any, Protocol

from torch.utils._python_dispatch import TorchDispatchMode, _get_current_dispatch_mode_stack

from ebbtide.observe.mode import DispatchMode
from ebbtide.observe.uncompiled import uncompiled

_OURS = ("ebbtide.observe", "ebbtide.run", "ebbtide.sequence")
"""Packages of which functions run inside a user's frame."""


class CompileWatcher(Protocol):
    """Wants to know when PyTorch compiles."""

    def compiling(self, begins: bool, /) -> None:
        """Compilation begins, or has ended."""
        ...


_MODES_MAY_STAY = hasattr(TorchDispatchMode, "ignore_compile_internals")
"""Whether PyTorch compiles under modes that say so."""

_watchers: list[CompileWatcher] = []
_told = False


def watch_compiling(watcher: CompileWatcher) -> None:
    """Tell ``watcher`` of all compilations until `unwatch_compiling`."""
    _watchers.append(watcher)


def unwatch_compiling(watcher: CompileWatcher) -> None:
    """Tell ``watcher`` no more."""
    _watchers[:] = [other for other in _watchers if other is not watcher]


@contextlib.contextmanager
def compiled_as_ops() -> Iterator[None]:
    """A context in which compiled graphs are ops to our modes; where PyTorch cannot have that, nothing is compiled."""
    if "torch._dynamo" not in sys.modules:  # nobody has asked for torch.compile so far
        yield
        return
    if not _MODES_MAY_STAY:
        with uncompiled():
            yield
        return
    _tell_dynamo()
    _take_graphs()
    yield


def _tell_dynamo() -> None:
    """Leave our files alone, say when something is compiled. `torch.compiler.reset` forgets the latter."""
    global _told
    from torch._dynamo import callback, trace_rules

    if not _told:
        _told = True
        for package in _OURS:
            trace_rules.add(package)
    if _begin_compiling not in callback.callback_handler.start_callbacks:
        callback.on_compile_start(_begin_compiling)
        callback.on_compile_end(_end_compiling)


def _begin_compiling(_: Any) -> None:
    for watcher in _watchers:
        watcher.compiling(True)


def _end_compiling(_: Any) -> None:
    _take_graphs()  # the first compilation of a process imports Inductor
    for watcher in _watchers:
        watcher.compiling(False)


def _take_graphs() -> None:
    """Stand between PyTorch and Inductor's graphs. Without a mode of ours this costs a microsecond a graph."""
    module = sys.modules.get("torch._inductor.output_code")
    graph: Any = getattr(module, "CompiledFxGraph", None)
    if graph is None or hasattr(graph.__call__, "told_modes"):
        return
    original = graph.__call__

    @functools.wraps(original)
    def call(self: Any, inputs: Any) -> Any:
        run = functools.partial(original, self, inputs)
        for mode in _get_current_dispatch_mode_stack():
            if isinstance(mode, DispatchMode):
                run = functools.partial(mode.run_graph, run, inputs, self.mutated_input_idxs)
        return run()

    call.told_modes = True  # type: ignore[attr-defined]
    graph.__call__ = call
