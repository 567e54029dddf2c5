"""Loading or computing: how fast entries come and how fast the model computes, as measured."""

from __future__ import annotations

import threading

_KEPT = 0.8
_LEAST_SAMPLES = 3
_MARGIN = 1.25
LEAST_TOKENS = 64
"""Passes over fewer tokens say little of what one more token costs."""


class Rate:
    """An amount a second, as an exponential average: each sample outweighs the one before.

    Threads may share it. It is kept nowhere: every process measures for itself.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amount = self._seconds = 0.0
        self._samples = 0

    def add(self, amount: float, seconds: float) -> None:
        """Enter an amount that took some seconds."""
        with self._lock:
            self._amount = _KEPT * self._amount + amount
            self._seconds = _KEPT * self._seconds + seconds
            self._samples += 1

    def seconds(self, amount: float) -> float | None:
        """Return how long an amount takes; None before there are three samples."""
        with self._lock:
            if self._samples < _LEAST_SAMPLES or self._amount <= 0:
                return None
            return amount * self._seconds / self._amount


def is_slower(load_seconds: float | None, compute_seconds: float | None) -> bool:
    """Whether loading is slower than computing afresh, by a quarter at least.

    Never where one of them has not been measured: then the entry is loaded.
    """
    if load_seconds is None or compute_seconds is None:
        return False
    return load_seconds > _MARGIN * compute_seconds
