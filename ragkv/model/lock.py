"""One thread at a time uses the model, and leaves no threads behind."""

from __future__ import annotations

import ctypes
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Self

import torch

_SOFT = 1
"""OpenMP's ``omp_pause_soft``: what the program has set stays as it is."""


class ModelLock:
    """A reentrant lock around a model; who leaves it ends its pool of OpenMP threads.

    GNU OpenMP, which torch's wheels for Linux compute with, keeps such a pool for every
    thread that ever computed. Once pools have more threads than there are cores, none
    spins any longer: all sleep, and are woken, at every one of a pass's thousands of
    barriers, which makes a first token come 1.25 times later on two cores. A framework that
    calls the model from another thread each time gets there at once. A pool is started
    again within a millisecond.
    """

    def __init__(self) -> None:
        self._lock = threading.RLock()
        self._depth = 0

    def acquire(self) -> None:
        """Wait until no other thread uses the model."""
        self._lock.acquire()
        self._depth += 1

    def release(self) -> None:
        """Let others use the model."""
        self._depth -= 1
        if not self._depth:
            end_threads()
        self._lock.release()

    def __enter__(self) -> Self:
        self.acquire()
        return self

    def __exit__(self, *_: object) -> None:
        self.release()


def end_threads() -> None:
    """End the OpenMP threads that compute for the calling thread, until it computes again."""
    _pause()(_SOFT)


@cache
def _pause() -> Callable[[int], object]:
    """Return OpenMP 5.0's ``omp_pause_resource_all`` of torch's own GNU OpenMP."""
    home = Path(torch.__file__).parent
    bundled = [*home.glob("lib/libgomp*"), *home.parent.glob("torch.libs/libgomp*")]
    for library in (*map(str, bundled), "libgomp.so.1"):
        with suppress(OSError, AttributeError):  # not loaded, or too old
            loaded = ctypes.CDLL(library, mode=os.RTLD_NOW | os.RTLD_NOLOAD)
            pause: Callable[[int], object] = loaded.omp_pause_resource_all
            return pause
    return lambda _: None
