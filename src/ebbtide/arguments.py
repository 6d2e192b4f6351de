"""Arguments of public calls: each is taken as what it can only mean, or refused by one error that names it.

All functions here that are given a ``name``, the argument's, for the message, raise `ArgumentError` for what cannot be.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, SupportsFloat, cast

import numpy as np

from ebbtide.errors import ArgumentError, SpillError
from ebbtide.units import parse_budget, parse_bytes


def as_whole(name: str, value: Any, least: int | None = None) -> int:
    """An integer of at least ``least``. NumPy's integers and tensors of one element count as such, bools do not."""
    at_least = "" if least is None else f", at least {least}"
    try:
        if isinstance(value, bool):
            raise TypeError
        number = operator.index(value)
    except TypeError:
        raise ArgumentError(f"{name}={value!r}: it must be a whole number{at_least}") from None
    if least is not None and number < least:
        raise ArgumentError(f"{name}={value!r}: it must be a whole number{at_least}")
    return number


def as_seconds(value: Any) -> float | None:
    """A time in seconds, finite and not negative, as a ``float``; None for anything else, for callers to refuse."""
    if isinstance(value, SupportsFloat):
        # Of arrays and tensors of several elements, and of whole numbers beyond all floats, none can be made.
        with contextlib.suppress(TypeError, ValueError, OverflowError):
            seconds = float(value)
            return seconds if 0 <= seconds < math.inf else None
    return None


def as_duration(name: str, value: Any) -> float:
    """A time in seconds, as `as_seconds` reads it."""
    seconds = as_seconds(value)
    if seconds is None:
        raise ArgumentError(f"{name}={value!r}: it must be a number of seconds, 0 or more, and finite")
    return seconds


def as_switch(name: str, value: Any) -> bool:
    """True or False, NumPy's too. Not what merely counts as such: the text "no" would mean yes."""
    if not isinstance(value, bool | np.bool_):
        raise ArgumentError(f"{name}={value!r}: it must be True or False")
    return bool(value)


def as_callable(name: str, value: Any) -> Callable[..., Any]:
    """A function, or anything else that can be called."""
    if not callable(value):
        raise ArgumentError(f"{name}={value!r} cannot be called; give a function")
    return cast(Callable[..., Any], value)


def as_size(name: str, value: Any) -> int:
    """Bytes, as `parse_bytes` reads them."""
    try:
        return parse_bytes(value)
    except ValueError as fault:
        raise ArgumentError(f"{name}: {fault}") from None


def as_budget(name: str, value: Any) -> int | float:
    """Bytes or a share, as `parse_budget` reads them."""
    try:
        return parse_budget(value)
    except ValueError as fault:
        raise ArgumentError(f"{name}: {fault}") from None


def as_directory(name: str, value: Any) -> Path:
    """A path, as text or as an object."""
    if not _is_path(value):
        raise ArgumentError(f"{name}={value!r}: it must be the path of a directory, a str or a Path")
    return Path(value)


def spill_directory(spill: Any, named_with: str = "spill=...") -> Path:
    """The directory that is named, or else the system's for temporary files; errors say what one is ``named_with``.

    Raises `SpillError` if none is named, and no file can be made where the system would have temporary ones.
    """
    if spill is not None:
        return as_directory("spill", spill)
    try:
        return Path(tempfile.gettempdir())
    except OSError:
        message = f"no directory for temporary files can be written; name one with {named_with}"
        raise SpillError(message) from None


def as_directories(name: str, value: Any) -> tuple[Path, ...]:
    """A path, several or none; absolute, as files may be made when the working directory is another one."""
    if value is None or _is_path(value):
        return () if value is None else (Path(value).absolute(),)
    if not isinstance(value, Sequence) or isinstance(value, str | bytes) or not all(map(_is_path, value)):
        raise ArgumentError(f"{name}={value!r}: it must be the path of a directory, a str or a Path, or a list of such")
    return tuple(Path(part).absolute() for part in value)


def check_instance(name: str, value: Any, kind: type) -> None:
    """Refuses what is not of a class of ebbtide's."""
    if not isinstance(value, kind):
        raise ArgumentError(f"{name}={value!r}: it must be a {kind.__name__}")


def _is_path(value: Any) -> bool:
    # An empty one, as of a variable that is not set, would be the working directory.
    return isinstance(value, str | os.PathLike) and isinstance(path := os.fspath(value), str) and path != ""
