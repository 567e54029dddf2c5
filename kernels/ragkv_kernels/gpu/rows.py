"""Attention and writing of rows whose caches are given by address, for captured graphs.

As :mod:`ragkv_kernels.gpu.attend`, but a tile has rows of one cache, which it finds by the
addresses in a table. Rows that no tile has are padding.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.gpu.attend import MOST_SPLITS, join, over_keys, splits_of, store_share
from ragkv_kernels.gpu.paid import paid_by_head
from ragkv_kernels.gpu.tiles import LOG2E, precision, stages, tiles_for
from ragkv_kernels.row_table import RowTable


@triton.jit
def _cache_of(spare, place, capacity, layer, kv_head, KV_HEADS, HEAD_DIM):
    """Return where a layer's rows of a head begin.

    Places count from the spare slot: of an address made from a number, the compiler would not
    know that it is a multiple of 16 bytes, and would load each number by itself.
    """
    at = spare + tl.multiple_of(tl.load(place), 16)
    return at + (layer * KV_HEADS + kv_head) * (tl.load(capacity) * HEAD_DIM)


@triton.jit(do_not_specialize=["rows", "tiles", "layer", "window", "splits", "lse_split"])
def _attend_rows(
    query,
    query_head,
    query_row,
    query_channel,
    out,
    out_split,
    out_head,
    out_row,
    lse,
    lse_split,
    positions,
    spare,
    places,
    of_tiles,
    rows,
    tiles,
    layer,
    window,
    scale,
    splits,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    # the last tiles see most keys: they start first
    tile = tl.num_programs(0) - 1 - tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    split = tl.program_id(2)
    first = tl.load(of_tiles + tile).to(tl.int32)
    count = tl.load(of_tiles + tiles + tile).to(tl.int32)
    if count == 0:
        return
    flat = tl.arange(0, BLOCK_M)
    real_row = flat < count * GROUP
    row = first + tl.minimum(flat // GROUP, count - 1)
    head = kv_head * GROUP + flat % GROUP
    at = tl.load(positions + row).to(tl.int32)
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    here = head * query_head + row.to(tl.int64) * query_row
    q = tl.load(
        query + here[:, None] + channels[None, :] * query_channel, mask=real[None, :], other=0.0
    )
    place = places + first
    capacity = place + 2 * rows
    key = _cache_of(spare, place, capacity, layer, kv_head, KV_HEADS, HEAD_DIM)
    value = _cache_of(spare, place + rows, capacity, layer, kv_head, KV_HEADS, HEAD_DIM)

    lowest = tl.load(positions + first).to(tl.int32)
    highest = tl.load(positions + first + count - 1).to(tl.int32)
    begin = 0
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N
    stop = highest // BLOCK_N + 1
    share = tl.cdiv(stop - begin, splits)
    begin = begin + split * share
    stop = tl.minimum(begin + share, stop)
    # with a window every block can be cut; without, those before the first row's are whole
    whole_to = begin
    if not WINDOWED:
        whole_to = tl.minimum(tl.maximum((lowest + 1) // BLOCK_N, begin), stop)
    state = (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    state = over_keys(
        state,
        q,
        at,
        begin * BLOCK_N,
        whole_to * BLOCK_N,
        highest + 1,
        window,
        scale,
        key,
        HEAD_DIM,
        1,
        value,
        HEAD_DIM,
        1,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        False,
        WINDOWED,
        PRECISION,
    )
    state = over_keys(
        state,
        q,
        at,
        whole_to * BLOCK_N,
        stop * BLOCK_N,
        highest + 1,
        window,
        scale,
        key,
        HEAD_DIM,
        1,
        value,
        HEAD_DIM,
        1,
        HEAD_DIM,
        BLOCK_D,
        BLOCK_N,
        True,
        WINDOWED,
        PRECISION,
    )
    there = split.to(tl.int64) * out_split + head * out_head + row.to(tl.int64) * out_row
    store_share(
        state,
        out + there[:, None] + channels[None, :],
        lse + split.to(tl.int64) * lse_split + head * rows + row,
        real_row,
        real,
    )


@triton.jit(do_not_specialize=["rows", "layer"])
def _write_rows(
    keys,
    keys_head,
    keys_row,
    keys_channel,
    values,
    values_head,
    values_row,
    values_channel,
    positions,
    spare,
    places,
    rows,
    layer,
    KV_HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    row = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    place = places + row
    capacity = place + 2 * rows
    slot = tl.load(positions + row) * HEAD_DIM + channels
    key = tl.load(keys + kv_head * keys_head + row * keys_row + channels * keys_channel, mask=real)
    to = _cache_of(spare, place, capacity, layer, kv_head, KV_HEADS, HEAD_DIM)
    tl.store(to + slot, key, mask=real)
    value = tl.load(
        values + kv_head * values_head + row * values_row + channels * values_channel, mask=real
    )
    to = _cache_of(spare, place + rows, capacity, layer, kv_head, KV_HEADS, HEAD_DIM)
    tl.store(to + slot, value, mask=real)


@triton.jit(do_not_specialize=["rows", "layer", "window", "room"])
def _paid_rows(
    query,
    query_head,
    query_row,
    query_channel,
    lse,
    lse_head,
    out,
    positions,
    spare,
    places,
    observed,
    rows,
    layer,
    room,
    window,
    scale,
    KV_HEADS: tl.constexpr,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    first = tl.load(observed).to(tl.int32)
    last = tl.load(observed + 1).to(tl.int32)
    tokens = tl.load(positions + last - 1).to(tl.int32) + 1
    if tl.program_id(0) * BLOCK_N >= tokens:
        return
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    place = places + first
    key = _cache_of(spare, place, place + 2 * rows, layer, kv_head, KV_HEADS, HEAD_DIM)
    k = tl.load(
        key + keys[None, :] * HEAD_DIM + channels[:, None],
        mask=(keys < tokens)[None, :] & real[:, None],
        other=0.0,
    )
    by_last = tl.zeros([BLOCK_N], tl.float32)
    by_any = tl.zeros([BLOCK_N], tl.float32)
    for member in range(GROUP):
        head = kv_head * GROUP + member
        last_pays, most = paid_by_head(
            query + head * query_head,
            query_row,
            query_channel,
            lse + head * lse_head,
            1,
            positions,
            first,
            last,
            k,
            keys,
            window,
            scale,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_M,
            BLOCK_N,
            WINDOWED,
            PRECISION,
        )
        by_last += last_pays
        by_any += most
    kept = keys < room
    tl.store(out + kv_head * room + keys, by_last, mask=kept)
    tl.store(out + (KV_HEADS + kv_head) * room + keys, by_any, mask=kept)


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
    heads, rows, width = query.shape
    sizes = tiles_for(query, rows)
    out = query.new_zeros(2, table.kv_heads, room, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _paid_rows[triton.cdiv(room, sizes.keys), table.kv_heads](
            query,
            *query.stride(),
            lse,
            lse.stride(0),
            out,
            table.positions,
            table.spare,
            table.places,
            table.observed,
            rows,
            layer,
            room,
            window or 0,
            scaling * LOG2E,
            KV_HEADS=table.kv_heads,
            GROUP=heads // table.kv_heads,
            HEAD_DIM=width,
            BLOCK_D=sizes.channels,
            BLOCK_M=sizes.rows,
            BLOCK_N=sizes.keys,
            WINDOWED=window is not None,
            PRECISION=precision(query),
            num_warps=sizes.warps,
            num_stages=2,
            enable_fp_fusion=True,
        )
    return out.sum(dim=1) / heads


def attend_rows(
    query: torch.Tensor,
    table: RowTable,
    layer: int,
    *,
    window: int | None,
    scaling: float,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`ragkv_kernels.attend_rows`; ``splits`` as in :func:`ragkv_kernels.gpu.attend`."""
    heads, rows, width = query.shape
    out = query.new_empty(rows, heads, width).transpose(0, 1)
    sums = query.new_empty(heads, rows, dtype=torch.float32)
    sizes = tiles_for(query, table.tile)
    if splits is None:
        # a graph is replayed over caches of any length: its programs depend only on the rows
        splits = splits_of(query.device, table.tiles * table.kv_heads, MOST_SPLITS)
    parts, part_lse = out[None], sums[None]
    if splits > 1:
        parts = query.new_empty(splits, heads, rows, width, dtype=torch.float32)
        part_lse = query.new_empty(splits, heads, rows, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _attend_rows[table.tiles, table.kv_heads, splits](
            query,
            *query.stride(),
            parts,
            *parts.stride()[:3],
            part_lse,
            part_lse.stride(0),
            table.positions,
            table.spare,
            table.places,
            table.of_tiles,
            rows,
            table.tiles,
            layer,
            window or 0,
            scaling * LOG2E,
            splits,
            KV_HEADS=table.kv_heads,
            GROUP=heads // table.kv_heads,
            HEAD_DIM=width,
            BLOCK_D=sizes.channels,
            BLOCK_M=table.tile,
            BLOCK_N=sizes.keys,
            WINDOWED=window is not None,
            PRECISION=precision(query),
            num_warps=sizes.warps,
            num_stages=stages(query, sizes),
            enable_fp_fusion=True,
        )
        if splits > 1:
            join(parts, part_lse, out, sums, sizes)
    return out, sums


def write_rows(keys: torch.Tensor, values: torch.Tensor, table: RowTable, layer: int) -> None:
    """See :func:`ragkv_kernels.write_rows`."""
    kv_heads, rows, width = keys.shape
    with torch.cuda.device_of(keys):
        _write_rows[rows, kv_heads](
            keys,
            *keys.stride(),
            values,
            *values.stride(),
            table.positions,
            table.spare,
            table.places,
            rows,
            layer,
            KV_HEADS=kv_heads,
            HEAD_DIM=width,
            BLOCK_D=triton.next_power_of_2(width),
        )
