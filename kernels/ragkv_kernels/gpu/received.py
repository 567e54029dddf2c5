"""What each key receives: a second, light pass over K that knows each row's log-sum-exp.

A row's weights are known only once its last key has been seen. To have their sums from the
first pass, each row's scores would have to be kept or every earlier sum rescaled row by row:
for 32 rows of 28 heads over 32,768 keys that is 117 MB of scores written and read, against
34 MB of K (4 KV heads of 128 bfloat16) read again. So the first pass keeps one number a row,
and this pass needs no softmax, no V, and only the rows that are watched.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.gpu.tiles import LOG2E, precision, tiles_for


@triton.jit(
    do_not_specialize=["lse_head", "tokens", "window"],
    do_not_specialize_on_alignment=["lse", "positions"],
)
def _received(
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
    first_rows,
    last_rows,
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
    block = tl.program_id(0)
    kv_head = tl.program_id(1).to(tl.int64)
    keys = block * BLOCK_N + tl.arange(0, BLOCK_N)
    channels = tl.arange(0, BLOCK_D)
    real = channels < HEAD_DIM
    k = tl.load(
        key + kv_head * key_head + keys[None, :] * key_row + channels[:, None] * key_channel,
        mask=(keys < tokens)[None, :] & real[:, None],
        other=0.0,
    )
    first = tl.load(first_rows + block).to(tl.int32) * GROUP
    last = tl.load(last_rows + block).to(tl.int32) * GROUP
    total = tl.zeros([BLOCK_N], tl.float32)
    for start in range(first, last, BLOCK_M):
        flat = start + tl.arange(0, BLOCK_M)
        row = tl.minimum(flat, last - 1) // GROUP
        head = kv_head * GROUP + flat % GROUP
        at = tl.load(positions + row).to(tl.int32)
        here = head * query_head + row.to(tl.int64) * query_row
        q = tl.load(
            query + here[:, None] + channels[None, :] * query_channel, mask=real[None, :], other=0.0
        )
        mass = tl.load(lse + head * lse_head + row * lse_row) * 1.4426950408889634
        scores = tl.dot(q, k, input_precision=PRECISION) * scale
        seen = (keys[None, :] <= at[:, None]) & (flat < last)[:, None]
        if WINDOWED:
            seen &= keys[None, :] > at[:, None] - window
        weights = tl.exp2(tl.where(seen, scores - mass[:, None], float("-inf")))
        total += tl.sum(weights, 0)
    tl.store(out + kv_head * tokens + keys, total, mask=keys < tokens)


def received(
    query: torch.Tensor,
    key: torch.Tensor,
    positions: torch.Tensor,
    lse: torch.Tensor,
    *,
    window: int | None,
    scaling: float,
) -> torch.Tensor:
    """See :func:`ragkv_kernels.received`."""
    heads, rows, width = query.shape
    kv_heads, tokens, _ = key.shape
    out = query.new_zeros(kv_heads, tokens, dtype=torch.float32)
    if rows and tokens:
        tiles = tiles_for(query, rows * (heads // kv_heads))
        starts = torch.arange(0, tokens, tiles.keys, device=key.device)
        # the rows that may see a key of the block stand together, since positions ascend
        positions = positions.contiguous()
        first = torch.searchsorted(positions, starts)
        last = torch.full_like(first, rows)
        if window is not None:
            last = torch.searchsorted(positions, starts + (tiles.keys - 1 + window))
        with torch.cuda.device_of(query):
            _received[len(starts), kv_heads](
                query,
                *query.stride(),
                key,
                *key.stride(),
                lse,
                *lse.stride(),
                out,
                positions,
                first,
                last,
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
    return out.sum(dim=0) / heads
