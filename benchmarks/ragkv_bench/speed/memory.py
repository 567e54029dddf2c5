"""How much memory a call takes at most, above what was in use before it."""

from __future__ import annotations

import ctypes
import gc
import os
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import torch

_STATM = Path("/proc/self/statm")
_PERIOD_S = 0.001


def peak_growth(call: Callable[[], object], device: torch.device) -> int | None:
    """Run the call and return the bytes by which memory grew at its peak.

    On a CUDA device it is the peak of torch's allocator. On a CPU under Linux it is that of the
    process's anonymous resident memory, sampled every millisecond: without mapped files, untouched
    memory, and peaks between two samples. None where neither way is there.
    """
    gc.collect()
    if device.type == "cuda":
        torch.cuda.synchronize(device)
        torch.cuda.reset_peak_memory_stats(device)
        before = torch.cuda.memory_allocated(device)
        call()
        torch.cuda.synchronize(device)
        return int(torch.cuda.max_memory_allocated(device) - before)
    if not _STATM.exists():
        return None
    _release_free_memory()
    before = peak = _anonymous_bytes()
    done = threading.Event()

    def sample() -> None:
        nonlocal peak
        while not done.wait(_PERIOD_S):
            peak = max(peak, _anonymous_bytes())

    sampler = threading.Thread(target=sample, daemon=True)
    sampler.start()
    try:
        result = call()
        at_end = _anonymous_bytes()
        del result
    finally:
        done.set()
        sampler.join()
    return max(peak, at_end) - before


def _anonymous_bytes() -> int:
    """Resident bytes that belong to no file; only Linux has them here."""
    _, resident, shared = _STATM.read_text(encoding="ascii").split()[:3]
    return (int(resident) - int(shared)) * os.sysconf("SC_PAGE_SIZE")


def _release_free_memory() -> None:
    with suppress(AttributeError, OSError):  # another C library than glibc
        ctypes.CDLL(None).malloc_trim(0)
