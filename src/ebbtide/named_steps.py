"""What runs a training step, by the name that the command line gives it: a demo model, or a function in a file."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import sys
import traceback
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterator
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Any, NamedTuple

from ebbtide.errors import EbbtideError, StepError
from ebbtide.machine import Machine
from ebbtide.roofline import Work
from ebbtide.step import Step

STEP_FUNCTION = "one_step"
"""Function of a file that runs a step, if the user names no other."""
_TOO_LARGE = (RuntimeError, MemoryError, ValueError, OverflowError)
"""What PyTorch and NumPy raise where a batch is too large for the memory, or for any."""
_LIBRARIES = tuple(os.path.join(os.path.dirname(os.path.realpath(file)), "") for file in (os.__file__, __file__))
"""Folders of Python's library and of ebbtide."""
_MOST_PLACES = 8
"""Places that an error names, innermost, beside the outermost one."""


class NamedStep(NamedTuple):
    """What runs a step, and returns what to say if nothing ran in it; and what has to be called before each time."""

    run: Callable[[], str]
    prepare: Callable[[], Any]


def runner(what: str, batch_size: int | None = None) -> NamedStep:
    """The step of a demo model with a batch of some size, or of the user's function.

    Raises:
        EbbtideError: if there is no such model, file or function, the file cannot be imported, a batch is named for a
            function, which chooses its own, or there is no memory for it; by `NamedStep.run`, if the step fails.
    """
    if is_file(what):
        if batch_size is not None:
            raise EbbtideError(f"{what}: a batch can be named for demo models alone; a function chooses its own")
        return NamedStep(_function(what), _nothing)
    from ebbtide.demo.workloads import make_workload

    with _named_errors(what, *_TOO_LARGE):
        workload = make_workload(what, batch_size=batch_size)
        batch = workload.batch(0)

    def run() -> str:
        with _named_errors(what, *_TOO_LARGE):
            workload.step(batch)
        return ""

    return NamedStep(run, workload.model.zero_grad)


def observe_named(what: str, batch_size: int | None, times: int = 2) -> Step:
    """The step called ``what``, observed as it runs here; of several ``times`` each op's least duration counts.

    Twice at least, as the first time everything is slower.

    Raises:
        EbbtideError: as `runner`; a `StepError` if it runs nothing.
    """
    from ebbtide.run.kinds import Kind
    from ebbtide.run.observing import observe_step

    advice: list[str] = []
    with here():
        step = runner(what, batch_size)
        step.prepare()
        kind = Kind(observe_step(lambda: advice.append(step.run())))
        for _ in range(times - 1):
            step.prepare()
            kind.observed_again(observe_step(step.run))
    check_ran(kind.step, what, advice[0])
    return kind.step


def observe_named_fake(what: str, batch_size: int | None, machine: Machine) -> Step:
    """The step called ``what`` as ``machine`` would run it. Raises as `runner` and the function in `observe.fake`."""
    return _observed_fake(what, lambda: runner(what, batch_size), machine)


def record_named_fake(what: str) -> tuple[Step, tuple[Work, ...]]:
    """The step called ``what`` without durations, and what each of its ops does. Raises as `observe_named_fake`."""
    from ebbtide.observe import fake

    build, advice = _building(lambda: runner(what))
    with here():
        step, works = fake.record_fake(build)
    check_ran(step, what, advice[-1])
    return step, works


def observe_named_fake_batch(what: str, batch_size: int, machine: Machine) -> Step:
    """As `observe_named_fake`, with a batch of some size: the user's function is called with it."""
    if is_file(what):
        return _observed_fake(what, lambda: NamedStep(_function(what, batch_size), _nothing), machine)
    return observe_named_fake(what, batch_size, machine)


def is_file(what: str) -> bool:
    """Whether ``what`` names a file, not a demo model."""
    return ":" in what or what.endswith(".py")


def _observed_fake(what: str, load: Callable[[], NamedStep], machine: Machine) -> Step:
    from ebbtide.observe import fake

    build, advice = _building(load)
    with here():
        step = fake.observe_fake(build, machine)
    check_ran(step, what, advice[-1])
    return step


def _building(load: Callable[[], NamedStep]) -> tuple[Callable[[], Callable[[], None]], list[str]]:
    """What builds a step for `observe.fake`, and where running it puts what it says (see `NamedStep`)."""
    advice: list[str] = []

    def build() -> Callable[[], None]:
        step = load()

        def observed_once() -> None:
            step.prepare()
            advice.append(step.run())

        return observed_once

    return build, advice


def check_ran(step: Step, what: str, advice: str) -> None:
    """Check that the step called ``what`` has ops.

    Raises:
        StepError: if it has none; with ``advice``, what running it returned.
    """
    if not step.ops:
        raise StepError(f"{what} ran nothing, and has no ops; {advice or 'observe one that runs forward and backward'}")


def here() -> AbstractContextManager[None]:
    """A context that ends in the directory that it began in: the user's code may go elsewhere, and paths on the command
    line are relative to where that was called."""
    return contextlib.chdir(os.curdir)


@contextlib.contextmanager
def _as_script(path: str) -> Iterator[None]:
    """A script finds no arguments: those of this process are ebbtide's."""
    given, sys.argv = sys.argv, [path]
    try:
        yield
    finally:
        sys.argv = given


@contextlib.contextmanager
def _named_errors(what: str, *kinds: type[BaseException]) -> Iterator[None]:
    """Errors of these ``kinds`` become an `EbbtideError` that begins with ``what``; ours stay as they are.

    Either has a note of where it happened, if that was in the user's files.
    """
    try:
        yield
    except EbbtideError as fault:
        _note_place(fault, fault)
        raise
    except kinds as fault:
        named = EbbtideError(f"{what}: {type(fault).__name__}: {fault}")
        _note_place(named, fault)
        raise named from fault


def _note_place(named: EbbtideError, fault: BaseException) -> None:
    """Add to ``named`` through which lines of the user's files ``fault`` came, the innermost one last."""
    places = [
        f"{Path(frame.f_code.co_filename).name}:{line} in {frame.f_code.co_name}"
        for frame, line in traceback.walk_tb(fault.__traceback__)
        if _is_users(frame.f_code.co_filename)
    ]
    if len(places) > _MOST_PLACES + 1:
        places[1:-_MOST_PLACES] = ["..."]
    if places:
        named.add_note(f"({', '.join(places)})")


def _is_users(file: str) -> bool:
    """Whether ``file`` is one, as that of generated code is not, and neither installed nor ebbtide's."""
    installed = {"site-packages", "dist-packages"} & set(Path(file).parts)
    return os.path.isfile(file) and not installed and not os.path.realpath(file).startswith(_LIBRARIES)


def _advice(what: str, returned: object) -> str:
    """What to do if nothing ran in the function called ``what`` as it has ``returned`` something that would run."""
    if isinstance(returned, Generator | AsyncGenerator | Coroutine) or callable(returned):
        kind = type(returned).__name__
        return f"it returned a {kind}, which is not run: run it inside {what}, or name a function that runs the step"
    return ""


def _nothing() -> None:
    """A user's function prepares its step itself."""


def _function(what: str, *arguments: int) -> Callable[[], str]:
    whole = ":" not in what or Path(what).is_file()  # a directory may have a colon in its name
    path, _, name = (f"{what}:{STEP_FUNCTION}" if whole else what).rpartition(":")
    specification = importlib.util.spec_from_file_location("_observed_script", path)
    if not Path(path).is_file():
        raise EbbtideError(f"{path}: there is no such Python file")
    if specification is None or specification.loader is None:
        raise EbbtideError(f"{path}: it is no Python file, by its name; put the function into one that ends in .py")
    module = importlib.util.module_from_spec(specification)
    sys.path.insert(0, str(Path(path).resolve().parent))  # as Python does for a script, for the imports beside it
    sys.modules[specification.name] = module  # as an import does: dataclasses and pickle look a class's module up
    # A script may call sys.exit() wherever it is run.
    with _named_errors(f"{path}: cannot be imported", Exception, SystemExit), _as_script(path):
        specification.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise EbbtideError(f"{path}: has no function {name!r}")

    def run() -> str:
        with _named_errors(what, Exception, SystemExit), _as_script(path):
            return _advice(name, function(*arguments))

    return run
