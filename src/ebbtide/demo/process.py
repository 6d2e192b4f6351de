"""A case of the demo from outside: the process that it runs in, told what to do."""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any, Self

from ebbtide.demo.case import CaseResult
from ebbtide.errors import EbbtideError

CLOSING_SECONDS = 10
"""How long a case that is told to end may take."""


class CaseProcess:
    """The process of one case; see `ebbtide.demo.case`. It makes its model and then waits for `begin`.

    Args:
        name: of the model.
        batch: images or passages in a step.
        spill: directory for what is moved out.
        advance: called after each step.

    Attributes:
        limit_bytes: the budget; None for plain PyTorch.
        steps: number of steps taken.
    """

    def __init__(self, name: str, batch: int, spill: str | None, advance: Callable[[], None]) -> None:
        self.name = name
        self.limit_bytes: int | None = None
        self.steps = 0
        self._advance = advance
        # `-P`: without the modules that happen to be in the working directory, as the command itself.
        command = [sys.executable, "-P", "-m", "ebbtide.demo.case", "--model", name, "--batch", str(batch)]
        if spill is not None:
            command += ["--spill", spill]
        self._stack = contextlib.ExitStack()
        complaints = os.memfd_create("complaints")  # a file in no directory: there may be none to write to
        self._complaints = self._stack.enter_context(os.fdopen(complaints, "w+"))
        pipe = subprocess.PIPE
        self._process = self._stack.enter_context(
            subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=self._complaints, text=True)
        )
        self._stack.callback(self._end)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def wait(self) -> None:
        """Return when the process has made its model, and no longer takes time from others."""
        self._answer()

    def begin(self, limit_bytes: int | None) -> None:
        """Train within ``limit_bytes``, or as plain PyTorch. To be called once, after `wait`."""
        self.limit_bytes = limit_bytes
        self._ask("plain" if limit_bytes is None else str(limit_bytes))

    def step(self) -> dict[str, Any]:
        """Take one step. Returns the case's answer."""
        return self._step("step")

    def count(self) -> None:
        """Take the last step, and count its bytes."""
        self._step("count")

    def _step(self, how: str) -> dict[str, Any]:
        answer = self._ask(how)
        self.steps += 1
        self._advance()
        return answer

    def settle(self, steps: int) -> int | None:
        """Step until all later steps are timed, ``steps`` times at most.

        Returns:
            The least reachable peak in bytes if the budget cannot be met.
        """
        while self.steps < steps:
            answer = self.step()
            if "unreachable" in answer:
                return int(answer["unreachable"])
            if answer["settled"]:
                break
        return None

    def least_bytes(self) -> int:
        """The least peak that the step can be brought to; asked of a settled budget."""
        return int(self._ask("least")["least_bytes"])

    def tune(self) -> None:
        """Go on with ebbtide's allocator settings, and time anew. The next step is not timed."""
        self._ask("tune")

    def result(self) -> CaseResult:
        """What was measured."""
        return CaseResult(**self._ask("result"))

    def dismiss(self) -> None:
        """Tell the process to end, and do not wait for it."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()

    def close(self) -> None:
        """End the process, at once if it does not end by itself."""
        self._stack.close()

    def _end(self) -> None:
        self.dismiss()
        try:
            self._process.wait(CLOSING_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()

    def _ask(self, command: str) -> dict[str, Any]:
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            print(command, file=self._process.stdin, flush=True)
        return self._answer()

    def _answer(self) -> dict[str, Any]:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if line:
            answer: dict[str, Any] = json.loads(line)
            return answer
        self._process.wait()
        self._complaints.seek(0)
        last = (self._complaints.read().strip().splitlines() or ["it said nothing"])[-1]
        raise EbbtideError(f"{self.name}: the case ended early, after {self.steps} steps: {last}")
