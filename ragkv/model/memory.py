"""Memory for keys and values."""

from __future__ import annotations

import logging
import math
import threading
import weakref
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger(__name__)
_ROOM = 1.25
"""What is taken of what is asked for: the next prompt is a little longer."""
_WASTE = 8
"""How much more than what is asked for is kept."""


def uninitialised(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a tensor whose content is undefined; on the CPU in numpy's memory.

    numpy asks for huge pages where torch does not: filling them is 3x faster.
    """
    if torch.device(device).type != "cpu":
        return torch.empty(shape, dtype=dtype, device=device)
    return _shaped(np.empty(_bytes(shape, dtype), dtype=np.uint8), shape, dtype)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """Return host memory that a GPU copies from by itself, while the host goes on.

    Its content is undefined. None where there is no GPU, or no such memory is left. torch
    takes it in powers of two: see :func:`pinned_bytes`.
    """
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _log.warning("no pinned memory, copies to the device will be slower: %s", error)
        return None


def pinned_bytes(nbytes: int) -> int:
    """Return what so many bytes of pinned memory take: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


class Workspace:
    """One piece of memory that requests use in turn.

    Memory that is fresh from the system is filled several times slower than memory that is
    at hand. Devices have torch's own allocator, which keeps memory; this is for the CPU.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flat: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._lent: weakref.ref[npt.NDArray[np.uint8]] | None = None

    def uninitialised(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a tensor whose content is undefined: maybe what the last one left there.

        It has the memory to itself for as long as it or a view of it is held anywhere; who
        asks meanwhile gets other memory. What is kept is at most eight times what was asked
        for last.
        """
        if torch.device(device).type != "cpu":
            return uninitialised(shape, dtype, device)
        wanted = _bytes(shape, dtype)
        with self._lock:
            lent = self._lent is not None and self._lent() is not None
            if lent or not wanted <= self._flat.nbytes <= _WASTE * wanted:
                self._flat = np.empty(int(_ROOM * wanted), dtype=np.uint8)
            lease = self._flat[:wanted]
            self._lent = weakref.ref(lease)  # torch's storage holds it, and nothing else does
            return _shaped(lease, shape, dtype)

    def release(self) -> None:
        """Give the memory back once nobody holds it."""
        with self._lock:
            self._flat, self._lent = np.empty(0, dtype=np.uint8), None


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _shaped(flat: npt.NDArray[np.uint8], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(*shape)
