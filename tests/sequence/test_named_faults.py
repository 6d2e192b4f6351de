"""Files of named runs where the system fails for a moment, and runs that begin as others end."""

from __future__ import annotations

import errno
import os
import re
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from ebbtide.errors import SpillError
from ebbtide.run.tiers import DiskTier, queued
from tests.sequence.test_named import attempt, check_whole, killed_at, lines

pytestmark = pytest.mark.usefixtures("nothing_left")


def fail(fault: Exception) -> Callable[..., Any]:
    def call(*_: Any) -> Any:
        raise fault

    return call


@pytest.mark.parametrize(
    ("owner", "name", "fault"),
    [
        (threading.Thread, "start", RuntimeError("can't start new thread")),
        (DiskTier, "_preadv", OSError(errno.EIO, os.strerror(errno.EIO))),
        (queued, "take_memory", OSError(errno.ENOMEM, os.strerror(errno.ENOMEM))),
    ],
)
def test_what_cannot_be_read_now_is_not_taken_for_torn(
    owner: Any, name: str, fault: Exception, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All states were passed over, and the folder deleted in the end."""
    killed_at(tmp_path, 77)
    newest = lines(tmp_path)[-1]["step"]
    folder = re.escape(str(tmp_path / "ebbtide-wave"))
    with monkeypatch.context() as patch:
        patch.setattr(owner, name, fail(fault))
        with pytest.raises(SpillError, match=f"nothing in {folder} was touched: start the run again") as caught:
            attempt(tmp_path)
    assert str(fault.args[-1]) in str(caught.value)
    assert check_whole(tmp_path).resumed_step == newest > 50
