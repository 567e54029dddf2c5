"""Allocation of memory for keys and values, and reuse of it from request to request."""

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
"""Factor of a new allocation: the next prompt can be a little longer."""
_MOST_SLACK = 8
"""A piece serves requests down to this fraction of its size."""
_REMEMBERED = 64
"""A piece is freed after this many requests that did not use it."""


def uninitialised(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a tensor of undefined content, on the CPU in numpy's memory.

    Unlike torch, numpy requests huge pages, which are 3x faster to fill.
    """
    if torch.device(device).type != "cpu" or 0 in shape:
        return torch.empty(shape, dtype=dtype, device=device)
    return _shaped(np.empty(_bytes(shape, dtype), dtype=np.uint8), shape, dtype)


def pinned(shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor | None:
    """Return pinned host memory of undefined content, for asynchronous copies to a GPU.

    None where there is no GPU or no more such memory. torch allocates powers of two, see
    :func:`pinned_bytes`.
    """
    try:
        return torch.empty(shape, dtype=dtype, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _log.warning("no pinned memory, copies to the device will be slower: %s", error)
        return None


def on_host(part: torch.Tensor) -> torch.Tensor:
    """Copy a tensor to the host, from a GPU by pinned memory, which is ten times faster."""
    if part.device.type != "cuda":
        return part.cpu()
    room = pinned(part.shape, part.dtype)
    return part.cpu() if room is None else room.copy_(part)


def pinned_bytes(nbytes: int) -> int:
    """Return the size of a pinned allocation of ``nbytes``: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


class Workspace:
    """Pieces of the host's memory that requests use in turn.

    Fresh memory is several times slower to fill than memory in use. On devices, torch's own
    allocator caches memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []  # the last used at the end
        self._requests = 0

    def uninitialised(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a tensor of undefined content, perhaps in the memory of an earlier one.

        The memory belongs to the tensor while it or a view of it exists. The workspace keeps as
        many pieces as were in use at once among the last requests, each of at most eight times the
        size of its last request.
        """
        if torch.device(device).type != "cpu":
            return uninitialised(shape, dtype, device)
        nbytes = _bytes(shape, dtype)
        with self._lock:
            self._requests += 1
            free = [piece for piece in self._pieces if not piece.is_lent]
            suited = [each for each in free if nbytes <= each.nbytes <= _MOST_SLACK * nbytes]
            piece = min(suited, key=lambda each: (each.nbytes, -each.last), default=None)
            if piece is None:
                replaced = free[:1]
                piece = _Piece(np.empty(int(_GROWTH * nbytes), dtype=np.uint8))
            else:
                replaced = [piece]
            late = self._requests - _REMEMBERED
            self._pieces = [
                each
                for each in self._pieces
                if each not in replaced and (each.is_lent or each.last > late)
            ]
            self._pieces.append(piece)
            piece.last = self._requests
            return _shaped(piece.lend(nbytes), shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, used or free."""
        return sum(piece.nbytes for piece in self._pieces)

    def release(self) -> None:
        """Free each piece once its last tensor is gone."""
        with self._lock:
            self._pieces = []


class _Piece:
    """Memory, and whether a tensor uses it."""

    def __init__(self, flat: npt.NDArray[np.uint8]) -> None:
        self.flat = flat
        self.last = 0
        self._lease: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def nbytes(self) -> int:
        return self.flat.nbytes

    @property
    def is_lent(self) -> bool:
        return self._lease is not None and self._lease() is not None

    def lend(self, nbytes: int) -> npt.NDArray[np.uint8]:
        lease = self.flat[:nbytes]
        self._lease = weakref.ref(lease)  # torch's storage has the only reference
        return lease


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _shaped(flat: npt.NDArray[np.uint8], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(*shape)
