"""Inner loops as machine code: numba compiles them when the first plan is made, once for each installation."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any


@functools.cache
def compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    """``function``, on numbers and arrays alone, compiled by numba and kept on disk beside it or in the user's cache.

    numba is imported here and not sooner: it takes half a second, which only those who plan should pay.
    """
    import numba

    try:
        return numba.njit(cache=True)(function)
    except RuntimeError:
        # No directory can be written to: then it is compiled once in each process.
        return numba.njit(function)  # type: ignore[no-any-return]
