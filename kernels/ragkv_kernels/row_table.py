"""Rows of several caches in tensors that stay where they are, as a captured graph needs them.

A graph is replayed with the addresses that it was captured with. Here the places of the caches
are numbers in a tensor, which is overwritten before each replay: one graph serves every cache,
whatever its place and capacity, and rows of several caches at once.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

_FEW_ROWS = 16
"""Most rows of a table with small tiles: steps wait for memory, and more programs read it."""
_SMALL_TILE, _LARGE_TILE = 16, 128
"""Rows times heads of a group in a tile."""
_ALIGNED = 16
"""Numbers: the kernels read whole words."""


@dataclass(frozen=True, slots=True, eq=False)
class CacheRows:
    """Some rows of one cache.

    Attributes
    ----------
    ids, positions
        ``[rows]`` token ids, and sorted positions: row i reads the keys up to its own.
    keys, values
        ``[layers, kv_heads, capacity, head_dim]``, contiguous, on the table's device.
    """

    ids: npt.NDArray[np.int64]
    positions: npt.NDArray[np.int64]
    keys: torch.Tensor
    values: torch.Tensor


class RowTable:
    """Token id, position and cache of each of ``rows`` rows, in one tensor that stays.

    Rows beyond those that are filled in are padding: they read and write a spare slot.

    Parameters
    ----------
    rows
        Number of rows of every call.
    heads
        Query heads that share a KV head.
    shape
        ``[layers, kv_heads, head_dim]`` of the caches.
    dtype, device
        Of the caches.
    several
        Whether the rows can belong to several caches.

    Attributes
    ----------
    parts
        The caches that are filled in, each with the slice of its rows: for the torch twins.
    tile_rows
        Rows of one tile.
    observed_rows
        The observed rows: for the torch twins.
    spare
        ``[2, layers, kv_heads, 1, head_dim]``: the slot of the padding.
    """

    def __init__(
        self,
        rows: int,
        heads: int,
        shape: tuple[int, int, int],
        *,
        dtype: torch.dtype,
        device: torch.device,
        several: bool = True,
    ) -> None:
        layers, kv_heads, width = shape
        self.rows, self.kv_heads = rows, kv_heads
        self.tile = _SMALL_TILE if rows <= _FEW_ROWS and heads <= _SMALL_TILE else _LARGE_TILE
        if heads > self.tile:
            raise ValueError(f"{heads} heads share a KV head, a tile has room for {self.tile}")
        self.tile_rows = self.tile // heads
        # padding begins a tile; with several caches, each row can need one
        self.tiles = rows if several else -(-rows // self.tile_rows) + 1
        self.spare = torch.zeros(2, layers, kv_heads, 1, width, dtype=dtype, device=device)
        self._numbers = torch.zeros(5 * rows + 2 * self.tiles + 2, dtype=torch.int64, device=device)
        self.observed_rows = slice(0, 0)
        self.parts: list[tuple[slice, torch.Tensor, torch.Tensor]] = []

    def fill(self, parts: Sequence[CacheRows], observed: int = 0) -> None:
        """Overwrite the table with the rows of some caches.

        Parameters
        ----------
        observed
            How many of the last rows are observed.

        Raises
        ------
        ValueError
            There are more rows or tiles than the table has, or a cache is not contiguous.
        """
        numbers = np.zeros((5, self.rows), dtype=np.int64)
        tiles: list[tuple[int, int]] = []
        self.parts, first = [], 0
        for part in parts:
            if not (part.keys.is_contiguous() and part.values.is_contiguous()):
                raise ValueError("a cache in a table must be contiguous")
            last = first + len(part.ids)
            if last > self.rows:
                raise ValueError(f"{last} rows or more in a table of {self.rows}")
            numbers[0, first:last], numbers[1, first:last] = part.ids, part.positions
            numbers[2, first:last] = self._place_of(part.keys)
            numbers[3, first:last] = self._place_of(part.values)
            numbers[4, first:last] = part.keys.shape[2]
            tiles += self._tiles_of(first, last)
            self.parts.append((slice(first, last), part.keys, part.values))
            first = last
        if first < self.rows:
            keys, values = self.spare
            numbers[2, first:] = self._place_of(keys)
            numbers[3, first:] = self._place_of(values)
            numbers[4, first:] = 1
            self.parts.append((slice(first, self.rows), keys, values))
            tiles += self._tiles_of(first, self.rows)
        if len(tiles) > self.tiles:
            raise ValueError(f"{len(tiles)} tiles in a table of {self.tiles}")
        of_tiles = np.zeros((2, self.tiles), dtype=np.int64)
        of_tiles[:, : len(tiles)] = np.array(tiles).T
        self.observed_rows = slice(first - observed, first)
        flat = torch.from_numpy(
            np.concatenate([numbers.ravel(), of_tiles.ravel(), [first - observed, first]])
        )
        is_cuda = self._numbers.is_cuda
        self._numbers.copy_(flat.pin_memory() if is_cuda else flat, non_blocking=is_cuda)

    def release(self) -> None:
        """Let go of the caches: they are freed with their owners."""
        self.parts = []

    @property
    def ids(self) -> torch.Tensor:
        """``[rows]`` int64."""
        return self._numbers[: self.rows]

    @property
    def positions(self) -> torch.Tensor:
        """``[rows]`` int64."""
        return self._numbers[self.rows : 2 * self.rows]

    @property
    def places(self) -> torch.Tensor:
        """``[3, rows]`` int64: where keys and values begin, and the capacity.

        They count in numbers from the beginning of ``spare``.
        """
        return self._numbers[2 * self.rows : 5 * self.rows].view(3, self.rows)

    @property
    def of_tiles(self) -> torch.Tensor:
        """``[2, tiles]`` int64: a tile's first row, and its number of rows."""
        return self._numbers[5 * self.rows : -2].view(2, self.tiles)

    @property
    def observed(self) -> torch.Tensor:
        """``[2]`` int64: the first observed row, and the end of them."""
        return self._numbers[-2:]

    def _place_of(self, tensor: torch.Tensor) -> int:
        place = (tensor.data_ptr() - self.spare.data_ptr()) // tensor.element_size()
        if tensor.is_cuda and place % _ALIGNED:
            raise ValueError(f"a cache must begin at a multiple of {_ALIGNED} numbers")
        return place

    def _tiles_of(self, first: int, last: int) -> list[tuple[int, int]]:
        step = self.tile_rows
        return [(row, min(step, last - row)) for row in range(first, last, step)]
