"""Sizes of the tiles, and constants that the kernels share."""

from __future__ import annotations

import math
from functools import cache
from typing import NamedTuple

import torch
import triton

LOG2E = math.log2(math.e)
_LEAST_SHARED = 99 << 10
"""Bytes of shared memory available to a program on any GPU of compute capability 8 or more."""
_RESERVED = 4 << 10
"""Bytes beside the tiles."""


class Tiles(NamedTuple):
    """Sizes of one program's tiles."""

    rows: int
    """Rows times heads of a group."""

    keys: int
    """Keys of a block."""

    channels: int
    """The head size, padded to a power of two."""

    warps: int


def tiles_for(query: torch.Tensor, rows: int) -> Tiles:
    """Return tiles of which Q, and K and V twice, fit 96 KB of shared memory.

    There are a small one and a large one, and no more: each is compiled when it is first used.

    Parameters
    ----------
    rows
        Rows times heads of a group.
    """
    channels = triton.next_power_of_2(query.shape[-1])
    # products of float32 need room for the parts that they are split into
    nbytes = channels * query.element_size() * (2 if query.dtype == torch.float32 else 1)
    most = max(16, min(128, 32768 // nbytes))
    tile = 16 if rows <= 16 else most
    keys = max(16, min(64, 16384 // nbytes))
    return Tiles(tile, keys, channels, 8 if tile * channels >= 128 * 128 else 4)


def stages(query: torch.Tensor, tiles: Tiles) -> int:
    """Return how many blocks of keys and values are in shared memory at once: 3 where they fit."""
    nbytes = tiles.channels * query.element_size() * (2 if query.dtype == torch.float32 else 1)
    required = (tiles.rows + 3 * 2 * tiles.keys) * nbytes + _RESERVED
    return 3 if required <= _shared_bytes(query.device) else 2


@cache
def _shared_bytes(device: torch.device) -> int:
    if device.type != "cuda":  # Triton's interpreter
        return _LEAST_SHARED
    properties = torch.cuda.get_device_properties(device)
    return int(getattr(properties, "shared_memory_per_block_optin", _LEAST_SHARED))


def precision(query: torch.Tensor) -> str:
    """Return how products are made: float32 as three of TensorFloat-32, which keeps its digits."""
    return "tf32x3" if query.dtype == torch.float32 else "tf32"
