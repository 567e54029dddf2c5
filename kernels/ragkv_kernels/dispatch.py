"""Chooses Triton where it can run and the torch twin elsewhere; logs the choice once."""

from __future__ import annotations

import importlib.util
import logging
from collections.abc import Sequence
from functools import cache

import torch

from ragkv_kernels import twins
from ragkv_kernels.grid import Encoded, Grid
from ragkv_kernels.stretches import Stretches

log = logging.getLogger(__name__)

HEAD_DIMS = (64, 80, 96, 112, 128, 160, 192, 224, 256)
"""Head sizes of the Triton kernels; those between powers of two are padded."""

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
_LARGEST_OFFSET = 2**31 - 1
"""Within one head the kernels count in int32."""


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Let query row i see exactly the keys ``positions[i] - window < j <= positions[i]``.

    Parameters
    ----------
    query
        ``[heads, rows, head_dim]`` float16, bfloat16 or float32; any strides.
    key, value
        ``[kv_heads, tokens, head_dim]`` of the same dtype; key j stands at position j.
        ``heads`` is a multiple of ``kv_heads``.
    positions
        ``[rows]`` int64, ascending, each below ``tokens``. Not checked: it would wait for
        the GPU.
    window
        Keys that a row sees, itself included; None is no limit.
    scaling
        Factor of the scores before the softmax.

    Returns
    -------
    tuple of torch.Tensor
        The output ``[heads, rows, head_dim]``, of the query's dtype, and ``[heads, rows]``
        float32, the natural log-sum-exp of each row's scaled scores.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not belong together.
    """
    _check_attention(query, key, positions, window)
    if value.shape != key.shape or value.dtype != key.dtype:
        raise ValueError(f"value {tuple(value.shape)} must be like key {tuple(key.shape)}")
    run = twins.attend
    if runs_attend(query, key, value):
        from ragkv_kernels.gpu.attend import attend as run
    return run(query, key, value, positions, window=window, scaling=scaling)


def paid(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """Return each key's attention from the last of these rows, and the maximum over all rows.

    Parameters
    ----------
    query, key, positions, window, scaling
        As in :func:`attend`, of any of its rows, still ascending.
    lse
        ``[heads, rows]`` float32: :func:`attend`'s, of these rows.

    Returns
    -------
    torch.Tensor
        ``[2, tokens]`` float32, means over heads. The first row sums to one.

    Raises
    ------
    ValueError
        Shapes, dtypes or devices do not belong together.
    """
    _check_attention(query, key, positions, window)
    if lse.shape != query.shape[:2]:
        raise ValueError(f"lse must be {tuple(query.shape[:2])}, not {tuple(lse.shape)}")
    run = twins.paid
    if runs_attend(query, key):
        from ragkv_kernels.gpu.paid import paid as run
    return run(query, key, positions, lse, window=window, scaling=scaling)


def restore(
    data: torch.Tensor,
    tokens: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rows: torch.Tensor,
    slots: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    adjacent: bool = False,
    grid: Grid,
) -> None:
    """Decode rows of layers, rotate their keys, and write both into the buffer.

    Keys are decoded to the buffer's dtype, as the store's codecs do, turned in float32, and
    rounded again.

    Parameters
    ----------
    data
        ``[layers, bytes]`` uint8: layers of ``tokens`` tokens, as :mod:`ragkv_kernels.grid`
        lays them out; copied unless each begins at a multiple of 16 bytes.
    keys, values, rows, slots, table, adjacent
        As in :func:`place`.

    Raises
    ------
    ValueError
        Shapes, sizes or dtypes do not belong together.
    """
    _check_moves(data, keys, rows, slots, table)
    run = twins.restore
    if _runs("restore", keys, _problem_of_layer(keys)):
        from ragkv_kernels.gpu.restore import restore as run
    run(
        *(data, tokens, keys, values),
        rows=rows,
        slots=slots,
        table=table,
        adjacent=adjacent,
        grid=grid,
    )


def place(
    parts: Sequence[tuple[torch.Tensor, torch.Tensor]],
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    counts: Sequence[int],
    part_of: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    adjacent: bool = False,
) -> None:
    """Rotate rows of several entries' keys, and write them and their values into the buffer.

    Arithmetic is float32; results are rounded once, when written.

    Parameters
    ----------
    parts
        Keys and values of each entry, ``[layers, kv_heads, tokens, head_dim]``, of the buffer's
        dtype and on its device.
    keys, values
        ``[layers, kv_heads, capacity, head_dim]``: layers of the buffer, the last axis contiguous.
    counts, part_of
        How many of the rows are each entry's, in order; the same as ``[n]`` int64.
    rows, slots
        ``[n]`` int64: row ``rows[i]`` of its entry goes to ``slots[i]``; no slot twice.
    table
        cos and sin at each slot's position, each ``[slots, rotary_dim / 2]`` float32 with the
        last slot among them; channels from ``rotary_dim`` on do not turn.
    adjacent
        Whether a channel turns with its neighbour; else with the one ``rotary_dim / 2`` on.

    Raises
    ------
    ValueError
        Shapes or dtypes do not belong together.
    """
    for cached in parts:
        _check_moves(cached[0], keys, rows, slots, table)
        for part in cached:
            if part.dtype != keys.dtype or part[:, :, :0].shape != keys[:, :, :0].shape:
                raise ValueError(
                    f"{part.dtype} {tuple(part.shape)} does not fit {tuple(keys.shape)}"
                )
    if sum(counts) != len(rows) or len(part_of) != len(rows) or len(counts) != len(parts):
        raise ValueError(f"{sum(counts)} rows of {len(counts)} entries instead of {len(rows)}")
    run = twins.place
    if _runs("place", keys, _problem_of_layer(keys)):
        from ragkv_kernels.gpu.place import place as run
    run(
        *(parts, keys, values),
        counts=counts,
        part_of=part_of,
        rows=rows,
        slots=slots,
        table=table,
        adjacent=adjacent,
    )


def drift(
    rows: tuple[torch.Tensor, torch.Tensor],
    fresh: tuple[torch.Tensor, torch.Tensor],
    earlier: tuple[torch.Tensor, torch.Tensor] | None,
    stretches: Stretches,
    *,
    table: tuple[torch.Tensor, torch.Tensor],
    adjacent: bool = False,
) -> None:
    """Move a layer's rows by the shift of the observed rows of their stretch.

    A shift is fresh minus cached numbers, of keys unrotated; no observed row counts for more than
    the median length. Arithmetic is float32, and each sum is rounded once.

    Parameters
    ----------
    rows
        Keys and values, ``[kv_heads, end, head_dim]`` each, of the same strides, whose last axis is
        contiguous; changed in place.
    fresh
        The computed rows, ``[kv_heads, rows, head_dim]`` each; any strides.
    earlier
        Known shifts, ``[kv_heads, n, head_dim]`` each, of the same strides, whose last axis is
        contiguous; None where no source is one of them.
    stretches
        Of the prompt.
    table, adjacent
        As in :func:`place`, with a row for each of ``end`` positions.

    Raises
    ------
    ValueError
        Shapes or strides do not belong together.
    """
    keys, values = rows
    same = keys.shape == values.shape and keys.stride() == values.stride()
    if not same or keys.stride(-1) != 1:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must agree")
    if len(stretches.fixed) != keys.shape[1] or len(table[0]) < keys.shape[1]:
        raise ValueError(f"{len(stretches.fixed)} positions of {keys.shape[1]} rows")
    if not all(part.is_contiguous() for part in stretches):
        raise ValueError("the stretches' tensors must be contiguous")
    run = twins.drift
    if _runs("drift", keys, _problem_of_layer(keys)):
        from ragkv_kernels.gpu.drift import drift as run
    run(rows, fresh, earlier, stretches, table=table, adjacent=adjacent)


def encode(keys: torch.Tensor, values: torch.Tensor, *, grid: Grid) -> Encoded:
    """Quantise one layer's keys, unrotated, and values.

    Arithmetic is float32, one rounding an operation: the codes are the same on every device.

    Parameters
    ----------
    keys, values
        ``[kv_heads, tokens, head_dim]``; any strides, at least one token.

    Raises
    ------
    ValueError
        Shapes do not belong together, or there is no token.
    """
    if keys.shape[1] == 0 or values.shape != keys.shape:
        raise ValueError(f"keys {tuple(keys.shape)} and values {tuple(values.shape)} must agree")
    run = twins.encode
    if _runs("encode", keys, _problem_of_layer(keys)):
        from ragkv_kernels.gpu.encode import encode as run
    return run(keys, values, grid=grid)


def decode(data: torch.Tensor, out: torch.Tensor, *, grid: Grid) -> None:
    """Decode one layer in torch, without rotating: for the host.

    Parameters
    ----------
    data
        ``[bytes]`` uint8, as :func:`encode` made them.
    out
        ``[2, kv_heads, tokens, head_dim]``: receives keys and values, rounded to its dtype.
    """
    twins.decode(data, out, grid=grid)


def runs_attend(query: torch.Tensor, *cached: torch.Tensor) -> bool:
    """Whether :func:`attend` runs on Triton for such tensors; if not, logs the reason once.

    Parameters
    ----------
    query, *cached
        As in :func:`attend`: the query, and key and value.
    """
    width = query.shape[-1]
    problem = None
    if width not in HEAD_DIMS:
        problem = f"heads of {width} numbers"
    elif query.dtype not in DTYPES or any(part.dtype != query.dtype for part in cached):
        problem = f"{query.dtype} beside {', '.join(str(part.dtype) for part in cached)}"
    elif any(part[0].numel() and _reach(part[0]) > _LARGEST_OFFSET for part in (query, *cached)):
        problem = "more than 2**31 numbers a head"
    return _runs("attend", query, problem)


def _problem_of_layer(keys: torch.Tensor) -> str | None:
    if keys.dtype not in DTYPES:
        return str(keys.dtype)
    if keys.shape[-1] % 2 or keys.shape[-1] > HEAD_DIMS[-1]:
        return f"heads of {keys.shape[-1]} numbers"
    return None


def _runs(operation: str, tensor: torch.Tensor, problem: str | None) -> bool:
    problem = _problem_of_device(tensor.device) or problem
    if problem is not None:
        _say(operation, problem, logging.WARNING if tensor.is_cuda else logging.INFO)
    return problem is None


@cache
def _problem_of_device(device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"a device {device.type!r}"
    if torch.version.hip is not None:
        return "AMD's GPUs, on which no one has run them yet"
    if torch.cuda.get_device_capability(device) < (8, 0):
        return "GPUs before compute capability 8.0"
    if importlib.util.find_spec("triton") is None:
        return "a Python without Triton: pip install 'ragkv[kernels]'"
    return _problem_of_triton()


def _problem_of_triton() -> str | None:
    """Triton builds its driver with a C compiler when it is first used: few images have one."""
    from triton.runtime import driver

    try:
        driver.active.get_current_target()
    except Exception as error:  # noqa: BLE001  of Triton's, the compiler's or the system's making
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        return f"a machine on which Triton cannot start ({reason})"
    return None


@cache
def _say(operation: str, problem: str, level: int) -> None:
    log.log(level, "%s runs in torch: the kernels do not know %s", operation, problem)


def _reach(tensor: torch.Tensor) -> int:
    return sum(
        (size - 1) * abs(stride) for size, stride in zip(tensor.shape, tensor.stride(), strict=True)
    )


def _check_attention(
    query: torch.Tensor, key: torch.Tensor, positions: torch.Tensor, window: int | None
) -> None:
    if query.ndim != 3 or key.ndim != 3 or query.shape[2] != key.shape[2]:
        raise ValueError(f"query {tuple(query.shape)} does not fit key {tuple(key.shape)}")
    if query.shape[0] % key.shape[0]:
        raise ValueError(f"{query.shape[0]} heads cannot share {key.shape[0]} KV heads")
    if positions.shape != query.shape[1:2]:
        raise ValueError(f"positions must be ({query.shape[1]},), not {tuple(positions.shape)}")
    if len({query.device, key.device, positions.device}) > 1:
        raise ValueError("query, key and positions must lie on one device")
    if window is not None and window < 1:
        raise ValueError(f"a row sees itself at least: window must be 1 or more, not {window}")


def _check_moves(
    cached: torch.Tensor,
    keys: torch.Tensor,
    rows: torch.Tensor,
    slots: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
) -> None:
    for part in table:
        if 2 * part.shape[1] > keys.shape[-1]:
            raise ValueError(f"a table {tuple(part.shape)} does not fit {tuple(keys.shape)}")
    if len(rows) != len(slots):
        raise ValueError(f"{len(rows)} rows cannot go to {len(slots)} slots")
    if len(cached) != len(keys):
        raise ValueError(f"{len(cached)} layers cannot go to {len(keys)}")
