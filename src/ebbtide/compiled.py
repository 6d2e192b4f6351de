"""Inner loops as machine code: numba compiles them when the first plan is made, once for each installation."""

from __future__ import annotations

import contextlib
import functools
import logging
import marshal
import signal
import sys
import threading
import types
import zlib
from collections.abc import Callable, Iterator
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")

NOTICE = "ebbtide compiles its planner, once for this installation: some 20 seconds"
_log = logging.getLogger(__name__)


def compiled(function: Callable[P, R]) -> Callable[P, R]:
    """``function``, on numbers and arrays alone, as machine code, whose signals are raised as what they are.

    What a signal's handler raises while such code runs, `KeyboardInterrupt` as a rule, comes up as it returns: Python
    makes a `SystemError` of a result and an exception at once.
    """
    call: Callable[P, R] = _compiled(function)  # what is cached has lost its types
    return call


@functools.cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    dispatcher: Callable[..., Any] = dispatcher_of(function)

    @functools.wraps(function)
    def call(*arguments: Any) -> Any:
        try:
            return dispatcher(*arguments)
        except SystemError as fault:
            if fault.__cause__ is not None:
                raise fault.__cause__ from None
            raise

    return call


@functools.cache
def dispatcher_of(function: Callable[..., Any]) -> Any:
    """numba's dispatcher of ``function``: that as compiled, and kept on disk beside it or in the user's cache.

    Functions of ours that it calls are compiled with it. numba is imported here and not sooner: it takes half a second,
    which only those who plan should pay.
    """
    numba = _numba()
    _tell_of_compiling()
    whole = _with_its_calls(function)
    dispatcher = numba.njit(whole)
    with contextlib.suppress(RuntimeError):  # no directory can be written to: it is compiled once in each process
        dispatcher._cache = _cache_class()(whole)
    return dispatcher


@functools.cache
def _numba() -> Any:
    """numba, and what it imports when it first compiles. Ctrl-C waits: what it leaves half imported stays so."""
    with _interrupts_held():
        import numba
        from numba.core.compiler_lock import global_compiler_lock
        from numba.core.registry import cpu_target

        with global_compiler_lock:  # another thread may compile already, and then goes over the same registries
            cpu_target.typing_context.refresh()
            cpu_target.target_context.refresh()
    return numba


@contextlib.contextmanager
def _interrupts_held() -> Iterator[None]:
    """What comes as SIGINT inside comes at the end; only where that is handled in this thread, and in Python."""
    former = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(former):
        yield
        return
    came: list[int] = []
    signal.signal(signal.SIGINT, lambda number, _: came.append(number))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, former)
        if came:
            signal.raise_signal(signal.SIGINT)


@functools.cache
def _cache_class() -> type[Any]:
    """numba's cache on disk, without its errors: a full disk or a damaged file costs time, and no plan."""
    from numba.core.caching import FunctionCache

    class Cache(FunctionCache):
        def load_overload(self, sig: Any, target_context: Any) -> Any:
            try:
                return super().load_overload(sig, target_context)  # type: ignore[no-untyped-call]
            except Exception as fault:  # what a damaged pickle raises depends on the damage
                _log.warning("%s cannot be read (%r): compiled again", self.cache_path, fault)
                with contextlib.suppress(OSError):
                    self.flush()  # type: ignore[no-untyped-call]  # saving reads its index, too
                return None

        def save_overload(self, sig: Any, data: Any) -> None:
            try:
                super().save_overload(sig, data)  # type: ignore[no-untyped-call]
            except OSError as fault:
                _log.warning("%s cannot be written (%s): the next process compiles again", self.cache_path, fault)

    return Cache


@functools.cache
def _tell_of_compiling() -> None:
    """Say so when something of ours is compiled for the first time, as a step then takes long for no other reason."""
    from numba.core import event

    class Teller(event.Listener):
        told = False

        def on_start(self, begun: event.Event) -> None:
            if not self.told and _is_ours(begun.data["dispatcher"].py_func):
                self.told = True
                _log.info(NOTICE)
                if sys.stderr.isatty():
                    print(NOTICE, file=sys.stderr, flush=True)

        def on_end(self, _: event.Event) -> None:
            """Nothing to say."""

    event.register("numba:compile", Teller())  # type: ignore[no-untyped-call]


def _with_its_calls(function: Any) -> Any:
    """``function`` with compiled functions in place of those that it calls.

    Its name then tells the code of these apart: whether what was kept is old, numba sees from the function's own file.
    """
    known = function.__globals__
    calls = {name: known[name] for name in function.__code__.co_names if _is_ours(known.get(name))}
    if not calls:
        return function
    twins: dict[str, Any] = {name: dispatcher_of(called) for name, called in calls.items()}
    plain = [getattr(twin, "py_func", twin) for twin in twins.values()]  # with NUMBA_DISABLE_JIT they are functions
    codes = [one.__qualname__.encode() + marshal.dumps(one.__code__) for one in plain]
    whole = types.FunctionType(function.__code__, {**known, **twins}, function.__name__, function.__defaults__)
    whole.__qualname__ = f"{function.__qualname__}_{zlib.crc32(b''.join(codes)):08x}"
    return whole


def _is_ours(item: Any) -> bool:
    return isinstance(item, types.FunctionType) and item.__module__.partition(".")[0] == __name__.partition(".")[0]
