"""What was measured of a step that ran. A plain record, no torch."""

from __future__ import annotations

import dataclasses


@dataclasses.dataclass(frozen=True, slots=True)
class Measured:
    """One step that ran.

    Attributes:
        state: ``observe``, ``verify``, ``audit``, ``planned`` or ``idle``.
        seconds: time of the step's context, by the clock of its device; None until the device is known to be done.
        peak_bytes: the most bytes of live tensors, where they were counted.
        rss_bytes: the most resident bytes above rest, where they were read.
        left: why the step left its plan, or how it differs from the recorded one; or an empty string.
    """

    state: str = ""
    seconds: float | None = None
    peak_bytes: int | None = None
    rss_bytes: int | None = None
    left: str = ""
