"""Documents of ours in files: JSON, gzip-compressed or not, each of which says of what format and version it is."""

from __future__ import annotations

import gzip
import io
import json
import os
import stat
import zlib
from pathlib import Path
from typing import Any, BinaryIO

from ebbtide.errors import RecordError
from ebbtide.files import write_whole
from ebbtide.units import format_bytes

_WRITERS = {
    "ebbtide-step": "`ebbtide observe`",
    "ebbtide-bundle": "`ebbtide plan -o`",
    "ebbtide-machine": "`ebbtide calibrate -o`",
}
"""What makes a file of each kind that users name."""
_GZIP = b"\x1f\x8b"
"""What each file begins with that gzip has compressed."""
_MOST_TEXT_BYTES = 1 << 28
"""More than a file of ours holds, unpacked; a step of 100,000 ops takes some 12 MB."""


def write_json(path: str | Path, document: dict[str, Any]) -> None:
    """Write ``document`` as compact JSON; gzip-compressed if the name ends in ``.gz``."""
    data = json.dumps(document, separators=(",", ":"), allow_nan=False).encode()
    write_whole(path, gzip.compress(data, mtime=0) if str(path).endswith(".gz") else data)


def read_json(path: str | Path, format_name: str, version: int) -> dict[str, Any]:
    """Read a JSON document of ours.

    Raises:
        RecordError: if it is missing, malformed, of another kind or of another version.
    """
    document = read_document(path)
    check_document(document, str(path), format_name, version)
    return document


def read_document(path: str | Path) -> dict[str, Any]:
    """Read a JSON object, gzip-compressed or not. Raises `RecordError` if it is missing or malformed."""
    try:
        data = _read(Path(path))
        document = json.loads(data)
        if b"\\u" in data or b"\xed" in data:  # JSON allows lone surrogates, which UTF-8 cannot encode
            json.dumps(document, ensure_ascii=False).encode()
    except (gzip.BadGzipFile, zlib.error) as fault:
        raise RecordError(f"{path}: damaged, or cut short: {fault}") from fault
    except OSError as fault:
        raise RecordError(f"{path}: cannot be read: {fault.strerror or fault}") from fault
    except UnicodeDecodeError as fault:
        raise RecordError(f"{path}: not JSON, which is text: damaged, or a file of another kind") from fault
    except (ValueError, EOFError, RecursionError) as fault:
        raise RecordError(f"{path}: not JSON, or cut short: {fault}") from fault
    if not isinstance(document, dict):
        raise RecordError(f"{path}: not a file of ebbtide's")
    return document


def _read(path: Path) -> bytearray:
    """What a file holds, unpacked. Devices, and files far too large to be ours, are refused before they fill memory."""
    with path.open("rb") as file:
        kind = os.fstat(file.fileno()).st_mode
        if stat.S_ISCHR(kind) or stat.S_ISBLK(kind):
            raise RecordError(f"{path}: not a file of ebbtide's, but a device")
        data = _read_whole(file, path)
    if data[:2] == _GZIP:
        with gzip.GzipFile(fileobj=io.BytesIO(data)) as unpacked:
            data = _read_whole(unpacked, path)
        if data[:2] == _GZIP:
            raise RecordError(f"{path}: compressed twice; unpack it once, with `gzip -d`")
    return data


def _read_whole(file: BinaryIO | gzip.GzipFile, path: Path) -> bytearray:
    data = bytearray()
    while piece := file.read(1 << 20):
        data += piece
        if len(data) > _MOST_TEXT_BYTES:
            raise RecordError(f"{path}: not a file of ebbtide's: none holds {format_bytes(_MOST_TEXT_BYTES)}")
    return data


def check_document(document: Any, name: str, format_name: str, version: int) -> None:
    """Check that ``document`` says of itself that it is of this format and version. Raises `RecordError` if not."""
    if not isinstance(document, dict) or document.get("format") != format_name:
        wanted = f"{format_name}, as {_WRITERS[format_name]} writes" if format_name in _WRITERS else format_name
        found = document.get("format") if isinstance(document, dict) else None
        raise RecordError(f"{name}: not a file of kind {wanted}{f', but of kind {found}' if found else ''}")
    if document.get("version") != version:
        found = document.get("version")
        raise RecordError(f"{name}: version {found}, but this ebbtide reads version {version}; make it again")
