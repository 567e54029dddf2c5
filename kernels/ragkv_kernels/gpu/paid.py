"""Each key's attention from the last row, and the maximum over all rows: a light pass over K.

A row's weights are known only once its last key has been seen. To have them from the first pass,
its scores would have to be kept: for 32 rows of 28 heads over 32,768 keys 117 MB written and read,
against 34 MB of K (4 KV heads of 128 bfloat16) read again. So the first pass keeps each row's
log-sum-exp, and this one needs no softmax and no V. The most is taken over the rows of one head at
a time, so that a tile holds rows of one head.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.gpu.tiles import LOG2E, precision, tiles_for


@triton.jit
def paid_by_head(
    query,
    query_row,
    query_channel,
    lse,
    lse_row,
    positions,
    first,
    last,
    k,
    keys,
    window,
    scale,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Return the keys' attention from a head's last row, and the maximum over these rows."""
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    by_last = tl.zeros([BLOCK_N], tl.float32)
    most = tl.zeros([BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_M):
        row = start + tl.arange(0, BLOCK_M)
        here = row < last
        at = tl.load(positions + row, mask=here, other=-1).to(tl.int32)
        q = tl.load(
            query + row[:, None].to(tl.int64) * query_row + channels[None, :] * query_channel,
            mask=here[:, None] & real[None, :],
            other=0.0,
        )
        mass = tl.load(lse + row * lse_row, mask=here, other=0.0)
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = (keys[None, :] <= at[:, None]) & here[:, None]
        if WINDOWED:
            seen &= keys[None, :] > at[:, None] - window
        scores -= mass[:, None] * 1.4426950408889634
        weights = tl.exp2(tl.where(seen, scores, float("-inf")))
        most = tl.maximum(most, tl.max(weights, 0))
        by_last += tl.sum(tl.where((row == last - 1)[:, None], weights, 0.0), 0)
    return by_last, most


@triton.jit(
    do_not_specialize=["lse_head", "tokens", "rows", "window"],
    do_not_specialize_on_alignment=["lse", "positions"],
)
def _paid(
    query,
    query_head,
    query_row,
    query_channel,
    key,
    key_head,
    key_row,
    key_channel,
    lse,
    lse_head,
    lse_row,
    out,
    positions,
    rows,
    tokens,
    window,
    scale,
    GROUP: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    WINDOWED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    kv_head = tl.program_id(1).to(tl.int64)
    keys = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    k = tl.load(
        key + kv_head * key_head + keys[None, :] * key_row + channels[:, None] * key_channel,
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
            lse_row,
            positions,
            0,
            rows,
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
    kept = keys < tokens
    tl.store(out + kv_head * tokens + keys, by_last, mask=kept)
    tl.store(out + (tl.num_programs(1) + kv_head) * tokens + keys, by_any, mask=kept)


def paid(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """See :func:`ragkv_kernels.paid`."""
    heads, rows, width = query.shape
    kv_heads, tokens, _ = key.shape
    out = query.new_zeros(2, kv_heads, tokens, dtype=torch.float32)
    if rows and tokens:
        tiles = tiles_for(query, rows)
        with torch.cuda.device_of(query):
            _paid[triton.cdiv(tokens, tiles.keys), kv_heads](
                query,
                *query.stride(),
                key,
                *key.stride(),
                lse,
                *lse.stride(),
                out,
                positions.contiguous(),
                rows,
                tokens,
                window or 0,
                scaling * LOG2E,
                GROUP=heads // kv_heads,
                HEAD_DIM=width,
                BLOCK_D=tiles.channels,
                BLOCK_M=tiles.rows,
                BLOCK_N=tiles.keys,
                WINDOWED=window is not None,
                PRECISION=precision(query),
                num_warps=tiles.warps,
                num_stages=2,
                enable_fp_fusion=True,
            )
    return out.sum(dim=1) / heads
