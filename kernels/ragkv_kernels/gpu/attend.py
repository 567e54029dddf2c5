"""Attention of scattered rows with exact limits, in the manner of FlashAttention-2.

A tile is rows times the query heads of one KV head, flattened with the head running
fastest, so that K and V are read once for a whole group whatever its size. It walks over the
key blocks that one of its rows can see. Blocks that all of them see whole need no mask.
Where rows are few, several programs share a tile's keys and a second kernel joins them
(Flash-Decoding).
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.gpu.tiles import LOG2E, Tiles, precision, stages, tiles_for

_BLOCKS_A_SPLIT = 4
"""Key blocks that are worth a program of their own."""

MOST_SPLITS = 64
"""Programs that share a tile's keys."""


@triton.jit
def over_keys(
    state,
    query,
    at,
    first,
    last,
    tokens,
    window,
    scale,
    key,
    key_row,
    key_channel,
    value,
    value_row,
    value_channel,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_N: tl.constexpr,
    MASKED: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Walk over the keys ``first`` to ``last``; ``first`` starts a block."""
    acc, top, total = state
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    for start in range(first, last, BLOCK_N):
        keys = start + tl.arange(0, BLOCK_N)
        inside = keys < tokens
        k_at = key + keys[None, :] * key_row + channels[:, None] * key_channel
        v_at = value + keys[:, None] * value_row + channels[None, :] * value_channel
        if MASKED or BLOCK_D != HEAD_DIM:
            k = tl.load(k_at, mask=inside[None, :] & real[:, None], other=0.0)
        else:
            k = tl.load(k_at)
        scores = tl.dot(query, k, input_precision=PRECISION) * scale
        if MASKED:
            seen = keys[None, :] <= at[:, None]
            if WINDOWED:
                seen &= keys[None, :] > at[:, None] - window
            scores = tl.where(seen, scores, float("-inf"))
        higher = tl.maximum(top, tl.max(scores, 1))
        shift = higher
        if MASKED:  # a row can have seen nothing yet
            shift = tl.where(higher == float("-inf"), 0.0, higher)
        weights = tl.exp2(scores - shift[:, None])
        shrink = tl.exp2(top - shift)
        total = total * shrink + tl.sum(weights, 1)
        if MASKED or BLOCK_D != HEAD_DIM:
            v = tl.load(v_at, mask=inside[:, None] & real[None, :], other=0.0)
        else:
            v = tl.load(v_at)
        acc = tl.dot(weights.to(v.dtype), v, acc * shrink[:, None], input_precision=PRECISION)
        top = higher
    return acc, top, total


@triton.jit
def store_share(state, out, lse, real_row, real):
    """Write the output of some keys for a tile's rows, and the log-sum-exp of their scores."""
    acc, top, total = state
    # a share without a key for a row weighs nothing: its log-sum-exp is -inf
    nothing = total == 0.0
    total = tl.where(nothing, 1.0, total)
    acc = acc / total[:, None]
    tl.store(out, acc.to(out.dtype.element_ty), mask=real_row[:, None] & real[None, :])
    mass = tl.where(nothing, float("-inf"), top + tl.log2(total))
    tl.store(lse, mass * 0.6931471805599453, mask=real_row)


# values that change with the request are no constants: a request must not wait for the compiler
@triton.jit(
    do_not_specialize=["lse_split", "lse_head", "rows", "tokens", "window", "splits"],
    do_not_specialize_on_alignment=["positions"],
)
def _attend(
    query,
    query_head,
    query_row,
    query_channel,
    key,
    key_head,
    key_row,
    key_channel,
    value,
    value_head,
    value_row,
    value_channel,
    out,
    out_split,
    out_head,
    out_row,
    lse,
    lse_split,
    lse_head,
    positions,
    rows,
    tokens,
    window,
    scale,
    splits,
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

    flat = tile * BLOCK_M + tl.arange(0, BLOCK_M)
    row = tl.minimum(flat // GROUP, rows - 1)
    head = kv_head * GROUP + flat % GROUP
    real_row = flat < rows * GROUP
    at = tl.load(positions + row).to(tl.int32)
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    here = head * query_head + row.to(tl.int64) * query_row
    q = tl.load(
        query + here[:, None] + channels[None, :] * query_channel, mask=real[None, :], other=0.0
    )

    # positions ascend: the first row sees least, the last one most
    lowest = tl.load(positions + tile * BLOCK_M // GROUP).to(tl.int32)
    end = tl.minimum((tile * BLOCK_M + BLOCK_M - 1) // GROUP, rows - 1)
    highest = tl.load(positions + end).to(tl.int32)
    begin = 0
    whole_from = 0
    if WINDOWED:
        begin = tl.maximum(lowest - window + 1, 0) // BLOCK_N
        whole_from = tl.cdiv(tl.maximum(highest - window + 1, 0), BLOCK_N)
    stop = highest // BLOCK_N + 1
    whole_to = (lowest + 1) // BLOCK_N

    # this program's share of the blocks, and in it the blocks that all rows see whole
    share = tl.cdiv(stop - begin, splits)
    begin = begin + split * share
    stop = tl.minimum(begin + share, stop)
    whole_from = tl.minimum(tl.maximum(whole_from, begin), stop)
    whole_to = tl.minimum(tl.maximum(whole_to, whole_from), stop)

    key += kv_head * key_head
    value += kv_head * value_head
    state = (
        tl.zeros([BLOCK_M, BLOCK_D], tl.float32),
        tl.full([BLOCK_M], float("-inf"), tl.float32),
        tl.zeros([BLOCK_M], tl.float32),
    )
    if WINDOWED:
        state = over_keys(
            state,
            q,
            at,
            begin * BLOCK_N,
            whole_from * BLOCK_N,
            tokens,
            window,
            scale,
            key,
            key_row,
            key_channel,
            value,
            value_row,
            value_channel,
            HEAD_DIM,
            BLOCK_D,
            BLOCK_N,
            True,
            WINDOWED,
            PRECISION,
        )
    state = over_keys(
        state,
        q,
        at,
        whole_from * BLOCK_N,
        whole_to * BLOCK_N,
        tokens,
        window,
        scale,
        key,
        key_row,
        key_channel,
        value,
        value_row,
        value_channel,
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
        tokens,
        window,
        scale,
        key,
        key_row,
        key_channel,
        value,
        value_row,
        value_channel,
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
        lse + split.to(tl.int64) * lse_split + head * lse_head + row,
        real_row,
        real,
    )


@triton.jit(do_not_specialize=["splits", "rows"])
def _join(
    parts,
    part_lse,
    splits,
    out,
    out_head,
    out_row,
    lse,
    rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    MOST_SPLITS: tl.constexpr,
):
    """Join one row's shares, each weighted by the exponential of its log-sum-exp."""
    row = tl.program_id(0)
    head = tl.program_id(1).to(tl.int64)
    every = tl.num_programs(1).to(tl.int64) * rows
    split = tl.arange(0, MOST_SPLITS)
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    here = split * every + head * rows + row
    mass = tl.load(part_lse + here, mask=split < splits, other=float("-inf"))
    top = tl.max(mass, 0)
    weights = tl.exp(mass - top)
    total = tl.sum(weights, 0)
    part = tl.load(
        parts + here[:, None] * HEAD_DIM + channels[None, :],
        mask=(split < splits)[:, None] & real[None, :],
        other=0.0,
    )
    joined = tl.sum(part * (weights / total)[:, None], 0)
    tl.store(
        out + head * out_head + row.to(tl.int64) * out_row + channels,
        joined.to(out.dtype.element_ty),
        mask=real,
    )
    tl.store(lse + head * rows + row, top + tl.log(total))


def attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    positions: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
    splits: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """See :func:`ragkv_kernels.attend`.

    Parameters
    ----------
    splits
        Programs that share a tile's keys; by default as many as fill the GPU.
    """
    heads, rows, width = query.shape
    kv_heads, tokens, _ = key.shape
    # in memory [rows, heads, head_dim], as the model's output projection reads it
    out = query.new_empty(rows, heads, width).transpose(0, 1)
    sums = query.new_empty(heads, rows, dtype=torch.float32)
    if rows == 0:
        return out, sums
    tiles = tiles_for(query, rows * (heads // kv_heads))
    grid = triton.cdiv(rows * (heads // kv_heads), tiles.rows), kv_heads
    if splits is None:
        # scattered rows' windows lie anywhere: a tile walks from its first row's to its last row
        most = triton.cdiv(tokens, tiles.keys * _BLOCKS_A_SPLIT)
        splits = splits_of(query.device, grid[0] * grid[1], min(most, MOST_SPLITS))
    parts, part_lse = out[None], sums[None]
    if splits > 1:
        parts = query.new_empty(splits, heads, rows, width, dtype=torch.float32)
        part_lse = query.new_empty(splits, heads, rows, dtype=torch.float32)
    with torch.cuda.device_of(query):
        _attend[*grid, splits](
            query,
            *query.stride(),
            key,
            *key.stride(),
            value,
            *value.stride(),
            parts,
            *parts.stride()[:3],
            part_lse,
            *part_lse.stride()[:2],
            positions.contiguous(),
            rows,
            tokens,
            window or 0,
            scaling * LOG2E,
            splits,
            GROUP=heads // kv_heads,
            HEAD_DIM=width,
            BLOCK_D=tiles.channels,
            BLOCK_M=tiles.rows,
            BLOCK_N=tiles.keys,
            WINDOWED=window is not None,
            PRECISION=precision(query),
            num_warps=tiles.warps,
            num_stages=stages(query, tiles),
            enable_fp_fusion=True,
        )
        if splits > 1:
            join(parts, part_lse, out, sums, tiles)
    return out, sums


def join(
    parts: torch.Tensor,
    part_lse: torch.Tensor,
    out: torch.Tensor,
    sums: torch.Tensor,
    tiles: Tiles,
) -> None:
    """Join the shares ``[splits, heads, rows, head_dim]`` and their log-sum-exps."""
    splits, heads, rows, width = parts.shape
    _join[rows, heads](
        parts,
        part_lse,
        splits,
        out,
        *out.stride()[:2],
        sums,
        rows,
        HEAD_DIM=width,
        BLOCK_D=tiles.channels,
        MOST_SPLITS=MOST_SPLITS,
        enable_fp_fusion=True,
    )


def splits_of(device: torch.device, programs: int, most: int) -> int:
    """Return how many programs share a tile's keys: two programs a multiprocessor, if it pays."""
    best: int = 2 * torch.cuda.get_device_properties(device).multi_processor_count // programs
    return max(1, min(best, most))
