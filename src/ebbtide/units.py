"""Bytes, seconds and shares for people: parse ``"6GiB"``, print ``6.0 GiB``."""

from __future__ import annotations

import contextlib
import math
import operator
import re

_UNITS = {
    "": 1,
    "b": 1,
    "kb": 10**3,
    "mb": 10**6,
    "gb": 10**9,
    "tb": 10**12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*([a-zA-Z]*)\s*")
_PERCENT = re.compile(r"\s*([0-9]+(?:\.[0-9]*)?|\.[0-9]+)\s*%\s*")
MOST_FRACTION = 1e6
"""Shares of a peak are below this: larger ones are typing errors."""


def parse_bytes(size: int | str) -> int:
    """Bytes meant by ``size``: a positive integer, or a string such as ``"6GiB"``, ``"750 MB"``.

    Raises:
        ValueError: if ``size`` is not a positive size that can be read.
    """
    count = None
    if isinstance(size, str):
        match = _SIZE.fullmatch(size)
        if match is None or match[2].lower() not in _UNITS:
            raise ValueError(f'cannot read {size!r} as a size; write bytes, "512MiB", "6GiB" or "1.5GB"')
        if "." in match[1] and match[2].lower() in ("", "b"):
            raise ValueError(f'cannot read {size!r} as whole bytes; write a unit, as in "1.5GB"')
        number = float(match[1]) * _UNITS[match[2].lower()]
        count = int(number) if number < math.inf else 0
    elif not isinstance(size, bool):
        with contextlib.suppress(TypeError):
            count = operator.index(size)  # those of NumPy, and tensors of one element, are whole numbers, too
    if count is None:
        raise ValueError(f'a size is bytes as an int or a string such as "6GiB", not {size!r}')
    if count <= 0:
        raise ValueError(f"a size must be a number of bytes, at least one, not {size!r}")
    return count


def parse_fraction(text: str) -> float | None:
    """The fraction meant by ``"50%"``, or None if ``text`` is no percentage.

    Raises:
        ValueError: if the percentage is not above 0, or far too large.
    """
    match = _PERCENT.fullmatch(text)
    if match is None:
        return None
    fraction = float(match[1]) / 100
    if not 0 < fraction < MOST_FRACTION:
        raise ValueError(f"a budget must be some share above 0 %, and below {MOST_FRACTION:.0%}, not {text!r}")
    return fraction


def parse_budget(limit: int | str) -> int | float:
    """What a budget is: bytes as `parse_bytes` reads them, an int, or a share as `parse_fraction` does, a float.

    Raises:
        ValueError: if ``limit`` is neither.
    """
    fraction = parse_fraction(limit) if isinstance(limit, str) else None
    if fraction is not None:
        return fraction
    try:
        return parse_bytes(limit)
    except ValueError as fault:
        raise ValueError(f'{fault} (a share of the plain peak is written "50%")') from None


def format_bytes(count: float) -> str:
    """``count`` bytes with a binary unit and three or four significant digits, as in ``6.25 GiB``."""
    sign = "-" if count < 0 else ""
    size = abs(float(count))
    if size < 1024:
        return f"{sign}{size:.0f} B"
    for unit in ("KiB", "MiB", "GiB", "TiB"):
        size /= 1024
        if size < 1024 or unit == "TiB":
            return f"{sign}{size:.{2 if size < 10 else 1 if size < 100 else 0}f} {unit}"
    raise AssertionError


def format_seconds(seconds: float) -> str:
    """``seconds`` with a fitting unit, as in ``1.2 h``, ``1.32 s``, ``45.1 ms``, ``12 us``."""
    if seconds >= 3600:
        return f"{seconds / 3600:.1f} h"
    if seconds >= 300:
        return f"{seconds / 60:.1f} min"
    if seconds >= 1:
        return f"{seconds:.2f} s"
    if seconds >= 1e-3:
        return f"{seconds * 1e3:.1f} ms"
    return f"{seconds * 1e6:.0f} us"


def format_share(share: float) -> str:
    """``share`` in percent, as short as a reader needs it: ``0.3 %``, ``4.2 %``, ``12 %``."""
    percent = round(100 * share, 6) + 0.0  # no -0: a plan that costs nothing may be a last digit quicker than plain
    return f"{percent:.0f} %" if round(percent, 1) >= 10 or round(percent, 2) == 0 else f"{percent:.2g} %"


def round_up(size: int, multiple: int) -> int:
    """The least multiple of ``multiple``, which is 1 or more, that is no less than ``size``: both in the same unit."""
    return -(-size // multiple) * multiple
