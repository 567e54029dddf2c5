"""Processes of their own that say what they have done, and may be killed meanwhile."""

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection
from typing import Any
from unittest import mock

import pytest

Say = Callable[[str], None]
_FIRST_PACE_S = 0.02

prepare: tuple[Callable[[], object], ...] = ()
"""Called first in every child: what a test replaces in its own process."""

needs_children = pytest.mark.skipif(
    "forkserver" not in multiprocessing.get_all_start_methods(), reason="no such processes here"
)


class Child:
    """A process that does ``work(say, *args)``; ``said`` has its lines so far.

    It comes from a process that has imported the module of the first one's work, and has computed
    nothing: a fork of a process with threads could wait for them forever. ``work`` is a function
    of a module.
    """

    def __init__(self, work: Callable[..., object], *args: object) -> None:
        context: Any = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([work.__module__])
        self._pipe, end = context.Pipe(duplex=False)
        self.said: list[str] = []
        self._process = context.Process(target=_run, args=(end, prepare, work, args), daemon=True)
        with mock.patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
            self._process.start()
        end.close()

    def listen(self, lines: int | None = None) -> None:
        """Wait until so many lines were said, or until the child is done."""
        while lines is None or len(self.said) < lines:
            try:
                self.said.append(self._pipe.recv_bytes().decode())
            except (EOFError, OSError):  # the last one may be cut off
                return

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
            self._process.kill()
        return self.end() == -signal.SIGKILL

    def end(self) -> int:
        """Read the rest, wait, and return the exit code (negative for a signal)."""
        self.listen()
        self._process.join()
        code: int = self._process.exitcode
        return code


def _run(
    end: Connection, first: tuple[Callable[[], object], ...], work: Callable[..., object], args: Any
) -> None:
    for each in first:
        each()
    work(lambda line: end.send_bytes(line.encode()), *args)
