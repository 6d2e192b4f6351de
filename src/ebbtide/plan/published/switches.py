"""Switches of policies are checked: a misspelt one must not plan as another one does."""

from __future__ import annotations

from typing import Any, get_args

from ebbtide.errors import PolicyError


def check_choice(name: str, given: str, choices: Any) -> None:
    """Check that the switch ``name`` is one of ``choices``, a ``Literal`` type. Raises `PolicyError` if not."""
    known = get_args(choices)
    if given not in known:
        raise PolicyError(f"{name} is {given!r}; it can be {', '.join(map(repr, known))}")


def check_count(name: str, given: int, least: int = 1) -> None:
    """Check that the switch ``name`` is at least so much. Raises `PolicyError` if not."""
    if given < least:
        raise PolicyError(f"{name} is {given}; it must be {least} or more")
