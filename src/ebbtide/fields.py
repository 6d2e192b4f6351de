"""Whether the fields of a record that was read from a file are of the types that it says they have."""

from __future__ import annotations

import dataclasses
import sys
import types
import typing
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Literal

Check = tuple[str, Callable[[Any], bool], str]
"""``(name, check, extra text for the error)`` of a field."""

_Record = typing.TypeVar("_Record")


def checks_of(kind: type) -> list[Check]:
    """The fields of a class of records."""
    hints = typing.get_type_hints(kind)
    return [(field.name, _is(hints[field.name]), _choices(hints[field.name])) for field in dataclasses.fields(kind)]


def check_fields(record: Any, checks: Sequence[Check], what: str) -> None:
    """Raises `TypeError` if a field of ``record``, which errors call ``what``, is not of its type."""
    for name, is_right, choices in checks:
        if not is_right(getattr(record, name)):
            raise TypeError(f"{what}: its {name} is {getattr(record, name)!r}{choices}")


def typed(record: _Record) -> _Record:
    """``record`` itself. Raises `TypeError` as `check_fields`."""
    check_fields(record, checks_of(type(record)), type(record).__name__)
    return record


def wrong_field(records: Iterable[Any]) -> str | None:
    """What is wrong in the first of ``records`` that has a field of another type than it says; None if none has."""
    for record in records:
        try:
            typed(record)
        except TypeError as fault:
            return str(fault)
    return None


def _choices(hint: Any) -> str:
    return f"; it must be {' or '.join(map(repr, typing.get_args(hint)))}" if typing.get_origin(hint) is Literal else ""


def _is(hint: Any) -> Callable[[Any], bool]:
    """What tells whether something is of the type ``hint``."""
    origin, parts = typing.get_origin(hint), typing.get_args(hint)
    if hint is float:
        return _is_number
    if origin is Literal:
        return parts.__contains__
    if origin is types.UnionType:
        choices = [_is(part) for part in parts]
        return lambda item: any(choice(item) for choice in choices)
    if origin is tuple and parts[-1] is ...:
        each = _is(parts[0])
        return lambda item: isinstance(item, tuple) and all(map(each, item))
    if origin is tuple:
        ordered = [_is(part) for part in parts]
        return lambda item: (
            isinstance(item, tuple)
            and len(item) == len(ordered)
            and all(is_right(part) for is_right, part in zip(ordered, item, strict=True))
        )
    return lambda item: type(item) is hint  # a bool is no int


def _is_number(item: Any) -> bool:
    """Whether ``item`` is a float, or an integer that can be one."""
    return type(item) is float or (type(item) is int and abs(item) <= sys.float_info.max)
