"""Lets Python's garbage collector pass over what the runtime makes in a step.

It looks at the youngest objects whenever there are some hundred more of them, and each so many times at all there are.
The runtime holds some objects for each saved tensor until the backward pass, so that in a step with 2,000 of them it
would look thirty times in vain, and now and then at the objects of all imported modules: half of what such a step cost.
"""

from __future__ import annotations

import gc
import threading

_lock = threading.Lock()


def expect_objects(count: int) -> None:
    """From now on ``count`` more objects may be alive before the collector looks; negative to take that back."""
    with _lock:
        youngest, *older = gc.get_threshold()
        # 0 turns it off, and whoever has set it meanwhile did not count these.
        if youngest > 0 and youngest + count > 0:
            gc.set_threshold(youngest + count, *older)
