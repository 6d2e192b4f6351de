"""What tests of sequences share."""

from __future__ import annotations

import pytest

from ebbtide.sequence import aio


@pytest.fixture
def queued_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    """Copies go by the threads of `DiskTier`, whose reads and writes a test can put its own in place of."""
    monkeypatch.setattr(aio, "is_there", lambda: False)
