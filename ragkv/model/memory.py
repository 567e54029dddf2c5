"""Memory for keys and values."""

from __future__ import annotations

import logging
import math
import os
import threading
import weakref
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch

_log = logging.getLogger(__name__)
_GROWTH = 1.25
"""Factor on a new allocation: the next prompt may be a little longer."""
_MOST_SLACK = 8
"""Memory of up to this multiple of a request is kept for it."""
_REMEMBERED = 64
"""A piece that none of this many requests used is freed."""
_UNKNOWN_TOTAL = 16 << 30
_CONTAINER_LIMITS = (
    Path("/sys/fs/cgroup/memory.max"),
    Path("/sys/fs/cgroup/memory/memory.limit_in_bytes"),
)
"""Of version 2 and 1 of Linux's control groups; ``max`` is no limit."""


def uninitialised(
    shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
) -> torch.Tensor:
    """Return a tensor whose content is undefined; on the CPU in numpy's memory.

    numpy asks for huge pages where torch does not: filling them is 3x faster.
    """
    if torch.device(device).type != "cpu" or 0 in shape:
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


def on_host(part: torch.Tensor) -> torch.Tensor:
    """Return a tensor's numbers on the host; from a GPU through pinned memory, ten times faster."""
    if part.device.type != "cuda":
        return part.cpu()
    room = pinned(part.shape, part.dtype)
    return part.cpu() if room is None else room.copy_(part)


def pinned_bytes(nbytes: int) -> int:
    """Return the size of a pinned allocation of ``nbytes``: the next power of two."""
    return 1 << max(0, nbytes - 1).bit_length()


class Workspace:
    """Pieces of memory that requests use in turn.

    Fresh memory from the system is several times slower to fill than memory in use. This is
    for the CPU: on devices, torch's own allocator caches memory.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._pieces: list[_Piece] = []  # the last used at the end
        self._requests = 0

    def uninitialised(
        self, shape: Sequence[int], dtype: torch.dtype, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """Return a tensor of undefined content, perhaps a former one's.

        The memory is the tensor's own for as long as the tensor or a view of it exists; another
        request meanwhile gets other memory. As many pieces are kept as were in use at once among
        the last requests, each of at most eight times its last request.
        """
        if torch.device(device).type != "cpu":
            return uninitialised(shape, dtype, device)
        wanted = _bytes(shape, dtype)
        with self._lock:
            self._requests += 1
            free = [piece for piece in self._pieces if not piece.is_lent]
            suited = [each for each in free if wanted <= each.nbytes <= _MOST_SLACK * wanted]
            piece = min(suited, key=lambda each: (each.nbytes, -each.last), default=None)
            if piece is None:
                replaced = free[:1]
                piece = _Piece(np.empty(int(_GROWTH * wanted), dtype=np.uint8))
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
            return _shaped(piece.lend(wanted), shape, dtype)

    @property
    def nbytes(self) -> int:
        """Bytes of all pieces, in use or not."""
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


def total_bytes(device: torch.device) -> int:
    """Return the size of a device's memory; for the CPU, of the container's or the machine's."""
    if device.type == "cuda":
        return int(torch.cuda.get_device_properties(device).total_memory)
    try:
        total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, ValueError, OSError):  # not on this system
        total = _UNKNOWN_TOTAL
    for path in _CONTAINER_LIMITS:
        with suppress(OSError, ValueError):
            total = min(total, int(path.read_text()))
    return total


def default_history() -> int:
    """Return how much of the host's memory former prompts take where no budget is given."""
    return total_bytes(torch.device("cpu")) // 8


def _bytes(shape: Sequence[int], dtype: torch.dtype) -> int:
    return math.prod(shape) * dtype.itemsize


def _shaped(flat: npt.NDArray[np.uint8], shape: Sequence[int], dtype: torch.dtype) -> torch.Tensor:
    return torch.from_numpy(flat).view(dtype).view(*shape)
