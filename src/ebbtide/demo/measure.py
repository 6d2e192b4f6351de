"""Time and resident memory of a piece of work, measured together and without disturbing each other."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Iterator

from ebbtide.run.allocator import trim
from ebbtide.run.resident import RssPeak, rss_bytes


@dataclasses.dataclass
class Measurement:
    """What one piece of work took.

    Attributes:
        seconds: of wall time.
        rss_bytes: the most resident bytes above `Gauge.rest`.
    """

    seconds: float = 0.0
    rss_bytes: int = 0


class Gauge:
    """Measures pieces of work of one process against its resident memory at rest.

    `rest` gives free pages back to the system, so that the work after it pays page faults that a training loop in
    full swing would not: run one piece of work unmeasured after it.
    """

    def __init__(self) -> None:
        self._rest_bytes = 0

    def rest(self) -> None:
        """Take the resident memory of now, without the allocator's free pages, as the memory at rest."""
        trim()
        self._rest_bytes = rss_bytes()

    @contextlib.contextmanager
    def measure(self, measurement: Measurement) -> Iterator[None]:
        """Measure a ``with`` block; ``measurement`` is filled in when the block ends."""
        with RssPeak() as peak:
            start = time.perf_counter()
            yield
            measurement.seconds = time.perf_counter() - start
        measurement.rss_bytes = peak.peak_bytes - self._rest_bytes
