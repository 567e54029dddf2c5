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
_GROWTH = 1.25
"""Factor on a new allocation: the next prompt may be a little longer."""
_MOST_SLACK = 8
"""Memory of up to this multiple of a request is kept for it."""


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
    """Return pinned host memory of undefined content, for asynchronous copies to a GPU.

    None where there is no GPU or the system has no more such memory. torch allocates it in
    powers of two: see :func:`pinned_bytes`.
    """
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _log.warning("no pinned memory, copies to the device will be slower: %s", error)
        return None


def pinned_bytes(nbytes: int) -> int:
    """Return the size of a pinned allocation of ``nbytes``: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


class Workspace:
    """One piece of memory that requests use in turn.

    Fresh memory from the system is several times slower to fill than memory in use. This is
    for the CPU: on devices, torch's own allocator caches memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._flat: npt.NDArray[np.uint8] = np.empty(0, dtype=np.uint8)
        self._lent: weakref.ref[npt.NDArray[np.uint8]] | None = None

    def uninitialised(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a tensor of undefined content, perhaps the last one's.

        The memory is the tensor's own for as long as the tensor or a view of it exists; another
        request meanwhile gets other memory. At most eight times the last request is kept.
        """
        if torch.device(device).type != "cpu":
            return uninitialised(shape, dtype, device)
        wanted = _bytes(shape, dtype)
        with self._lock:
            lent = self._lent is not None and self._lent() is not None
            if lent or not wanted <= self._flat.nbytes <= _MOST_SLACK * wanted:
                self._flat = np.empty(int(_GROWTH * wanted), dtype=np.uint8)
            lease = self._flat[:wanted]
            self._lent = weakref.ref(lease)  # torch's storage has the only reference
            return _shaped(lease, shape, dtype)

    def release(self) -> None:
        """Free the memory once its last tensor is gone."""
        with self._lock:
            self._flat, self._lent = np.empty(0, dtype=np.uint8), None


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _shaped(flat: npt.NDArray[np.uint8], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(*shape)
