"""Forked processes that say what they have done, and may be killed meanwhile."""

from __future__ import annotations

import os
import random
import signal
import time
import traceback
from collections.abc import Callable
from contextlib import suppress

Say = Callable[[str], None]
_FIRST_PACE_S = 0.02


class Child:
    """A forked process that does ``work(say)``; ``said`` has its lines so far."""

    def __init__(self, work: Callable[[Say], None]) -> None:
        self._pipe, end = os.pipe()
        self.said: list[str] = []
        self._pid = os.fork()
        if self._pid == 0:
            os.close(self._pipe)
            code = 1
            try:
                work(lambda line: os.write(end, f"{line}\n".encode()) and None)
                code = 0
            except BaseException:  # noqa: BLE001
                traceback.print_exc()
            finally:
                os._exit(code)
        os.close(end)

    def listen(self, lines: int | None = None) -> None:
        """Wait until so many lines were said, or until the child is done."""
        with os.fdopen(os.dup(self._pipe), "rb", buffering=0) as pipe:
            while lines is None or len(self.said) < lines:
                line = pipe.readline()
                if not line.endswith(b"\n"):
                    return
                self.said.append(line.decode().strip())

    def kill(self, draw: random.Random, most: int) -> bool:
        """End it after at most ``most`` lines, anywhere between one and the next.

        Returns whether it was not done before.
        """
        self.listen(1)
        begun = time.perf_counter()
        self.listen(draw.randint(1, max(1, most - 1)))
        lines = len(self.said) - 1
        pace = (time.perf_counter() - begun) / lines if lines > 0 else _FIRST_PACE_S
        time.sleep(draw.uniform(0, pace))
        with suppress(ProcessLookupError):
            os.kill(self._pid, signal.SIGKILL)
        return self.end() == -signal.SIGKILL

    def end(self) -> int:
        """Read the rest, wait, and return the exit code (negative for a signal)."""
        self.listen()
        os.close(self._pipe)
        return os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
