"""Sizes of the tiles, and constants that the kernels share."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton

LOG2E = math.log2(math.e)


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
    """Return tiles that fit 96 KB of shared memory: Q, and K and V twice.

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


def precision(query: torch.Tensor) -> str:
    """Return how products are made: float32 as three of TensorFloat-32, which keeps its digits."""
    return "tf32x3" if query.dtype == torch.float32 else "tf32"
