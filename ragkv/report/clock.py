"""Seconds by step, from the user's call."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager


class Clock:
    """Seconds by step. Construction, at the user's call, starts it."""

    def __init__(self) -> None:
        self.started = time.perf_counter()
        self.steps: dict[str, float] = {}
        self._within = 0.0

    @contextmanager
    def step(self, name: str) -> Iterator[None]:
        """Add the block's wall time to the step, without nested steps."""
        outer, self._within = self._within, 0.0
        before = time.perf_counter()
        try:
            yield
        finally:
            took = time.perf_counter() - before
            self.steps[name] = self.steps.get(name, 0.0) + took - self._within
            self._within = outer + took
