"""Attention and writing of rows of several caches in torch, one cache after another."""

from __future__ import annotations

import torch

from ragkv_kernels.row_table import RowTable
from ragkv_kernels.twins.attend import attend, paid


def attend_rows(
    query: torch.Tensor, table: RowTable, layer: int, *, window: int | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`ragkv_kernels.attend_rows`."""
    parts = [
        attend(
            query[:, rows],
            keys[layer],
            values[layer],
            table.positions[rows],
            window=window,
            scaling=scaling,
        )
        for rows, keys, values in table.parts
    ]
    outs, sums = zip(*parts, strict=True)
    return torch.cat(outs, dim=1), torch.cat(sums, dim=1)


def write_rows(keys: torch.Tensor, values: torch.Tensor, table: RowTable, layer: int) -> None:
    """See :func:`ragkv_kernels.write_rows`."""
    for rows, to_keys, to_values in table.parts:
        slots = table.positions[rows]
        to_keys[layer].index_copy_(1, slots, keys[:, rows])
        to_values[layer].index_copy_(1, slots, values[:, rows])


def paid_rows(
    query: torch.Tensor,
    table: RowTable,
    layer: int,
    lse: torch.Tensor,
    *,
    room: int,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """See :func:`ragkv_kernels.paid_rows`."""
    rows = table.observed_rows
    keys = table.parts[0][1][layer]
    positions = table.positions[rows]
    found = paid(query[:, rows], keys, positions, lse[:, rows], window=window, scaling=scaling)
    out = found.new_zeros(2, room)
    count = min(room, found.shape[1])
    out[:, :count] = found[:, :count]
    return out
