"""Measured rates of loading and computing, and the choice between them."""

from __future__ import annotations

import threading

_KEPT = 0.8
_LEAST_SAMPLES = 3
_MARGIN = 1.25
LEAST_TOKENS = 64
"""Fewest tokens of a pass whose time is counted: shorter ones are mostly overhead."""


class Rate:
    """An amount per second, as an exponential average. Threads can share it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._amount = self._seconds = 0.0
        self._samples = 0

    def add(self, amount: float, seconds: float) -> None:
        """Add a sample."""
        with self._lock:
            self._amount = _KEPT * self._amount + amount
            self._seconds = _KEPT * self._seconds + seconds
            self._samples += 1

    def seconds(self, amount: float) -> float | None:
        """Return the seconds for an amount; None before the third sample."""
        with self._lock:
            if self._samples < _LEAST_SAMPLES or self._amount <= 0:
                return None
            return amount * self._seconds / self._amount


def is_slower(load_seconds: float | None, compute_seconds: float | None) -> bool:
    """Whether loading is slower than computing by more than a quarter.

    False where either has not been measured: then the entry is loaded.
    """
    if load_seconds is None or compute_seconds is None:
        return False
    return load_seconds > _MARGIN * compute_seconds
