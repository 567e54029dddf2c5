"""Predicted shifts of rows in two kernels: the observed rows' shifts, and their spread.

In torch a layer takes some sixty launches, which is most of a short repair.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.gpu.restore import pair_of
from ragkv_kernels.stretches import Stretches
from ragkv_kernels.twins.drift import share_of

Pair = tuple[torch.Tensor, torch.Tensor]
_POSITIONS, _OBSERVED = 128, 32


@triton.jit
def _channels(pair, half, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr, HALVES: tl.constexpr):
    """Return the channels of a pair; the compiler sees that those of halves are contiguous."""
    if HALVES:
        first, second = pair, pair + HEAD_DIM // 2
    else:
        first, second = pair_of(pair, half, HEAD_DIM, ADJACENT)
    return first, second


@triton.jit
def _difference(fresh, fresh_at, rows, rows_at, earlier, earlier_at, is_earlier, here):
    """Return fresh minus cached numbers, or the shift in ``earlier``, float32."""
    now = tl.load(fresh + fresh_at, mask=here & (is_earlier == 0), other=0.0).to(tl.float32)
    was = tl.load(rows + rows_at, mask=here & (is_earlier == 0), other=0.0).to(tl.float32)
    known = tl.load(earlier + earlier_at, mask=here & (is_earlier != 0), other=0.0).to(tl.float32)
    return now - was + known


@triton.jit(
    do_not_specialize=["count", "half"],
    do_not_specialize_on_alignment=["positions", "sources", "sizes"],
)
def _shifts(
    keys,
    values,
    rows_head,
    rows_row,
    fresh_keys,
    fresh_keys_head,
    fresh_keys_row,
    fresh_keys_channel,
    fresh_values,
    fresh_values_head,
    fresh_values_row,
    fresh_values_channel,
    earlier_keys,
    earlier_values,
    earlier_head,
    earlier_row,
    positions,
    sources,
    sizes,
    cos,
    sin,
    table_row,
    table_pair,
    half,
    out,
    lengths,
    count,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ADJACENT: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write the shift of one observed row's keys, unrotated, or values, and its length."""
    at = tl.program_id(0).to(tl.int64)
    which = tl.program_id(1)
    if which == 0:
        rows, fresh, earlier = keys, fresh_keys, earlier_keys
        fresh_head, fresh_row, fresh_channel = fresh_keys_head, fresh_keys_row, fresh_keys_channel
    else:
        rows, fresh, earlier = values, fresh_values, earlier_values
        fresh_head, fresh_row = fresh_values_head, fresh_values_row
        fresh_channel = fresh_values_channel
    pair = tl.arange(0, BLOCK_P)
    here = pair < HEAD_DIM // 2
    first, second = _channels(pair, half, HEAD_DIM, ADJACENT, HALVES)
    position = tl.load(positions + at)
    source = tl.load(sources + at)
    is_earlier = (source < 0).to(tl.int32)
    new = tl.where(source < 0, 0, source)
    known = tl.where(source < 0, -1 - source, 0)
    turns = here & (pair < half) & (which == 0)
    c = tl.load(cos + position * table_row + pair * table_pair, mask=turns, other=1.0)
    s = tl.load(sin + position * table_row + pair * table_pair, mask=turns, other=0.0)
    scale = c * c + s * s
    c, s = c / scale, -s / scale
    total = 0.0
    here_out = out + (which * count + at) * HEADS * HEAD_DIM
    for head in range(HEADS):
        row = rows + head * rows_head + position * rows_row
        now = fresh + head * fresh_head + new * fresh_row
        old = earlier + head * earlier_head + known * earlier_row
        a = _difference(now, first * fresh_channel, row, first, old, first, is_earlier, here)
        b = _difference(now, second * fresh_channel, row, second, old, second, is_earlier, here)
        turned = a * c - b * s
        b = b * c + a * s
        total += tl.sum(turned * turned, 0) + tl.sum(b * b, 0)
        into = here_out + head * HEAD_DIM
        tl.store(into + first, turned.to(out.dtype.element_ty), mask=here)
        tl.store(into + second, b.to(out.dtype.element_ty), mask=here)
    tl.store(lengths + which * count + at, tl.sqrt(total) / tl.load(sizes + at))


@triton.jit(
    do_not_specialize=["half", "count", "length", "most"],
    do_not_specialize_on_alignment=["firsts", "counts", "starts", "lengths", "fixed", "share"],
)
def _move(
    keys,
    values,
    rows_head,
    rows_row,
    moved,
    share,
    count,
    weights,
    firsts,
    counts,
    starts,
    lengths,
    fixed,
    cos,
    sin,
    table_row,
    table_pair,
    half,
    length,
    most,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    ADJACENT: tl.constexpr,
    HALVES: tl.constexpr,
    BLOCK_P: tl.constexpr,
    POSITIONS: tl.constexpr,
    OBSERVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the predicted shift to some positions of a stretch, in one head's keys or values."""
    stretch = tl.program_id(0)
    place = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    which = tl.program_id(2) // HEADS
    head = tl.program_id(2) % HEADS
    rows = keys if which == 0 else values
    pair = tl.arange(0, BLOCK_P)
    real = pair < HEAD_DIM // 2
    first, second = _channels(pair, half, HEAD_DIM, ADJACENT, HALVES)
    here = place < tl.load(lengths + stretch)
    position = tl.load(starts + stretch).to(tl.int32) + place
    here &= tl.load(fixed + position, mask=here, other=1) == 0
    observed = which * count + tl.load(firsts + stretch).to(tl.int32)
    of_stretch = tl.load(counts + stretch).to(tl.int32)
    weight_at = weights + (stretch * length + place[:, None]) * most
    moved_at = moved + (observed * HEADS + head) * HEAD_DIM
    a = tl.zeros([POSITIONS, BLOCK_P], tl.float32)
    b = tl.zeros([POSITIONS, BLOCK_P], tl.float32)
    for start in range(0, of_stretch, OBSERVED):
        index = start + tl.arange(0, OBSERVED)
        known = index < of_stretch
        weight = tl.load(weight_at + index[None, :], mask=here[:, None] & known[None, :], other=0.0)
        part = tl.load(share + observed + index, mask=known, other=0.0)
        at = moved_at + (index * (HEADS * HEAD_DIM))[:, None]
        mask = known[:, None] & real[None, :]
        to_a = tl.load(at + first[None, :], mask=mask, other=0.0)
        to_b = tl.load(at + second[None, :], mask=mask, other=0.0)
        weight = (weight * part[None, :]).to(moved.dtype.element_ty)
        a = tl.dot(weight, to_a, a, input_precision=PRECISION)
        b = tl.dot(weight, to_b, b, input_precision=PRECISION)
    turns = here[:, None] & (real & (pair < half) & (which == 0))[None, :]
    at = position[:, None] * table_row + pair[None, :] * table_pair
    c = tl.load(cos + at, mask=turns, other=1.0)
    s = tl.load(sin + at, mask=turns, other=0.0)
    turned = a * c - b * s
    b = b * c + a * s
    target = rows + head.to(tl.int64) * rows_head + position[:, None].to(tl.int64) * rows_row
    mask = here[:, None] & real[None, :]
    to_a, to_b = target + first[None, :], target + second[None, :]
    turned += tl.load(to_a, mask=mask, other=0.0).to(tl.float32)
    b += tl.load(to_b, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_a, turned.to(rows.dtype.element_ty), mask=mask)
    tl.store(to_b, b.to(rows.dtype.element_ty), mask=mask)


def drift(
    rows: Pair,
    fresh: Pair,
    earlier: Pair | None,
    stretches: Stretches,
    *,
    table: Pair,
    adjacent: bool,
) -> None:
    """See :func:`ragkv_kernels.drift`."""
    heads, _, width = rows[0].shape
    count = len(stretches.positions)
    cos, sin = table
    turn = cos, sin, *cos.stride(), cos.shape[1]  # both have the same strides
    how = {
        "HEADS": heads,
        "HEAD_DIM": width,
        "ADJACENT": adjacent,
        "HALVES": not adjacent and 2 * cos.shape[1] == width,
        "BLOCK_P": triton.next_power_of_2(width // 2),
        "enable_fp_fusion": False,
    }
    # in the rows' dtype, to which the moved rows are rounded anyway: tensor cores read 16-bit
    # operands in any order, those of float32 must be transposed first
    moved = rows[0].new_empty(2, count, heads, width)
    lengths = cos.new_empty(2, count)
    old = fresh if earlier is None else earlier
    with torch.cuda.device_of(cos):
        _shifts[count, 2](
            *rows,
            *rows[0].stride()[:2],
            fresh[0],
            *fresh[0].stride(),
            fresh[1],
            *fresh[1].stride(),
            *old,
            *old[0].stride()[:2],
            stretches.positions,
            stretches.sources,
            stretches.sizes,
            *turn,
            moved,
            lengths,
            count,
            **how,
        )
        of, length, most = stretches.weights.shape
        _move[of, triton.cdiv(length, _POSITIONS), 2 * heads](
            *rows,
            *rows[0].stride()[:2],
            moved,
            share_of(lengths),
            count,
            stretches.weights,
            stretches.firsts,
            stretches.counts,
            stretches.starts,
            stretches.lengths,
            stretches.fixed.view(torch.uint8),
            *turn,
            length,
            most,
            POSITIONS=_POSITIONS,
            OBSERVED=_OBSERVED,
            PRECISION="tf32x3",
            num_warps=8,
            **how,
        )
