"""Operations on rows whose caches a table names, for captured graphs; see ``dispatch.py``."""

from __future__ import annotations

import torch

from ragkv_kernels import twins
from ragkv_kernels.dispatch import runs_attend
from ragkv_kernels.row_table import RowTable


def attend_rows(
    query: torch.Tensor, table: RowTable, layer: int, *, window: int | None, scaling: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let the rows of a table attend, each to its own cache, as :func:`ragkv_kernels.attend` does.

    Parameters
    ----------
    query
        ``[heads, rows, head_dim]``, a row for each of the table's; of the caches' dtype.
    layer
        Index of the caches' layer.
    window, scaling
        As in :func:`ragkv_kernels.attend`.

    Raises
    ------
    ValueError
        The query does not have the table's rows.
    """
    _check_rows(query, table)
    run = twins.attend_rows
    if runs_attend(query):
        from ragkv_kernels.gpu.rows import attend_rows as run
    return run(query, table, layer, window=window, scaling=scaling)


def write_rows(keys: torch.Tensor, values: torch.Tensor, table: RowTable, layer: int) -> None:
    """Write the rows of a table, ``[kv_heads, rows, head_dim]`` each, to their caches.

    Raises
    ------
    ValueError
        They do not have the table's rows.
    """
    _check_rows(keys, table)
    run = twins.write_rows
    if runs_attend(keys):
        from ragkv_kernels.gpu.rows import write_rows as run
    run(keys, values, table, layer)


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
    """Return the attention of each key of a table's only cache from its observed rows.

    As :func:`ragkv_kernels.paid`.

    Parameters
    ----------
    query, layer, window, scaling
        As in :func:`attend_rows`.
    lse
        ``[heads, rows]`` float32: :func:`attend_rows`'s.
    room
        Keys in the result, at least the last row's position and one: those behind it mean nothing.

    Returns
    -------
    torch.Tensor
        ``[2, room]`` float32.

    Raises
    ------
    ValueError
        The query does not have the table's rows.
    """
    _check_rows(query, table)
    run = twins.paid_rows
    if runs_attend(query):
        from ragkv_kernels.gpu.rows import paid_rows as run
    return run(query, table, layer, lse, room=room, window=window, scaling=scaling)


def _check_rows(tensor: torch.Tensor, table: RowTable) -> None:
    if tensor.ndim != 3 or tensor.shape[1] != table.rows:
        raise ValueError(f"{tuple(tensor.shape)} does not have the table's {table.rows} rows")
