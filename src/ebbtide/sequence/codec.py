"""Lossless compression of states: bytes sorted by significance, then Zstandard."""

from __future__ import annotations

import importlib.util
import math
import threading
import time
from typing import Any

import numpy as np
import numpy.typing as npt

LEVEL = 1
"""The level of Zstandard: the next ones take longer than a disk saves."""
TRIES = 3
"""A sample is packed and unpacked this often: the first time faults memory in, another may meet a busy moment."""

Bytes = npt.NDArray[np.uint8]


class Codec:
    """Packs and unpacks bytes; from any number of threads.

    Neighbouring numbers of a smooth field share sign, exponent and leading digits: so all first bytes are put together,
    all second ones, and so on, as Blosc does.

    Args:
        item_bytes: bytes of a number.
    """

    def __init__(self, item_bytes: int) -> None:
        self._item_bytes = item_bytes
        self._tools = threading.local()  # those of Zstandard may be used by one thread at a time

    def pack(self, raw: memoryview) -> bytes:
        """``raw``, compressed."""
        plain: Bytes = np.frombuffer(raw, np.uint8)
        if self._item_bytes > 1:
            end = self._end_of_items(plain)
            items, rest = plain[:end].reshape(-1, self._item_bytes), plain[end:]
            plain = np.ascontiguousarray(items.T) if end == len(plain) else np.concatenate([items.T.ravel(), rest])
        packed: bytes = self._tool("compressor").compress(plain.data)
        return packed

    def unpack(self, packed: memoryview, raw: memoryview) -> None:
        """Fill ``raw`` with what was packed. Raises ``zstandard.ZstdError`` if that is damaged."""
        plain: Bytes = np.frombuffer(self._tool("decompressor").decompress(packed), np.uint8)
        target: Bytes = np.frombuffer(raw, np.uint8)
        end = self._end_of_items(target)
        np.copyto(target[:end].reshape(-1, self._item_bytes), plain[:end].reshape(self._item_bytes, -1).T)
        np.copyto(target[end:], plain[end:])

    def _end_of_items(self, plain: Bytes) -> int:
        """Where the last whole item ends: those of structures may not fill a part of a state."""
        return len(plain) // self._item_bytes * self._item_bytes

    def _tool(self, name: str) -> Any:
        import zstandard  # an optional dependency: see `codec_for`

        if not hasattr(self._tools, name):
            self._tools.compressor = zstandard.ZstdCompressor(level=LEVEL)
            self._tools.decompressor = zstandard.ZstdDecompressor()
        return getattr(self._tools, name)


def codec_for(item_bytes: int) -> Codec | None:
    """A codec for numbers of ``item_bytes``, or None where ``zstandard`` is not installed."""
    return None if importlib.util.find_spec("zstandard") is None else Codec(item_bytes)


def paying_share(codec: Codec, sample: memoryview, out_seconds: float, back_seconds: float) -> float | None:
    """To which share of its size a state must shrink for ``codec`` to pay; None if ``sample`` does not in either way.

    Args:
        codec: the codec that would be used.
        sample: bytes of a state.
        out_seconds, back_seconds: time of ``sample`` to the disk and back as it is.
    """
    whole = memoryview(bytearray(len(sample)))
    pack_seconds = unpack_seconds = math.inf
    packed = b""
    for _ in range(TRIES):
        start = time.perf_counter()
        packed = codec.pack(sample)
        middle = time.perf_counter()
        codec.unpack(memoryview(packed), whole)
        pack_seconds = min(pack_seconds, middle - start)
        unpack_seconds = min(unpack_seconds, time.perf_counter() - middle)
    share = 1 - max(pack_seconds / max(out_seconds, 1e-9), unpack_seconds / max(back_seconds, 1e-9))
    return share if len(packed) < share * len(sample) else None
