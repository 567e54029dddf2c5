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
_POSITIONS, _OBSERVED = 64, 32


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
    rows,
    rows_head,
    rows_row,
    fresh,
    fresh_head,
    fresh_row,
    fresh_channel,
    earlier,
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
    TURNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
):
    """Write one observed row's shift, its keys unrotated, and the shift's length."""
    at = tl.program_id(0).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)
    here = pair < HEAD_DIM // 2
    first, second = pair_of(pair, half, HEAD_DIM, ADJACENT)
    position = tl.load(positions + at)
    source = tl.load(sources + at)
    is_earlier = (source < 0).to(tl.int32)
    new = tl.where(source < 0, 0, source)
    known = tl.where(source < 0, -1 - source, 0)
    turns = here & (pair < half)
    c = tl.load(cos + position * table_row + pair * table_pair, mask=turns, other=1.0)
    s = tl.load(sin + position * table_row + pair * table_pair, mask=turns, other=0.0)
    scale = c * c + s * s
    c, s = c / scale, -s / scale
    total = 0.0
    for head in range(HEADS):
        row = rows + head * rows_head + position * rows_row
        now = fresh + head * fresh_head + new * fresh_row
        old = earlier + head * earlier_head + known * earlier_row
        a = _difference(now, first * fresh_channel, row, first, old, first, is_earlier, here)
        b = _difference(now, second * fresh_channel, row, second, old, second, is_earlier, here)
        if TURNS:
            turned = a * c - b * s
            b = b * c + a * s
            a = turned
        total += tl.sum(a * a, 0) + tl.sum(b * b, 0)
        into = out + (at * HEADS + head) * HEAD_DIM
        tl.store(into + first, a, mask=here)
        tl.store(into + second, b, mask=here)
    tl.store(lengths + at, tl.sqrt(total) / tl.load(sizes + at))


@triton.jit(
    do_not_specialize=["half", "length", "most"],
    do_not_specialize_on_alignment=["observed", "starts", "lengths", "fixed", "share", "weights"],
)
def _move(
    rows,
    rows_head,
    rows_row,
    moved,
    share,
    weights,
    observed,
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
    TURNS: tl.constexpr,
    BLOCK_P: tl.constexpr,
    POSITIONS: tl.constexpr,
    OBSERVED: tl.constexpr,
    PRECISION: tl.constexpr,
):
    """Add the predicted shift to some positions of a stretch, in one head."""
    stretch = tl.program_id(0)
    place = tl.program_id(1) * POSITIONS + tl.arange(0, POSITIONS)
    head = tl.program_id(2)
    pair = tl.arange(0, BLOCK_P)
    real = pair < HEAD_DIM // 2
    first, second = pair_of(pair, half, HEAD_DIM, ADJACENT)
    here = place < tl.load(lengths + stretch)
    position = tl.load(starts + stretch).to(tl.int32) + place
    here &= tl.load(fixed + position, mask=here, other=1) == 0
    a = tl.zeros([POSITIONS, BLOCK_P], tl.float32)
    b = tl.zeros([POSITIONS, BLOCK_P], tl.float32)
    for start in range(0, most, OBSERVED):
        index = start + tl.arange(0, OBSERVED)
        row = tl.load(observed + stretch * most + index, mask=index < most, other=-1).to(tl.int32)
        known = row >= 0
        row = tl.where(known, row, 0)
        weight = tl.load(
            weights + (stretch * length + place[:, None]) * most + index[None, :],
            mask=here[:, None] & known[None, :],
            other=0.0,
        )
        part = tl.load(share + row, mask=known, other=0.0)
        at = moved + ((row * HEADS + head) * HEAD_DIM)[:, None]
        mask = known[:, None] & real[None, :]
        to_a = tl.load(at + first[None, :], mask=mask, other=0.0) * part[:, None]
        to_b = tl.load(at + second[None, :], mask=mask, other=0.0) * part[:, None]
        a = tl.dot(weight, to_a, a, input_precision=PRECISION)
        b = tl.dot(weight, to_b, b, input_precision=PRECISION)
    if TURNS:
        turns = (here[:, None]) & (real & (pair < half))[None, :]
        at = position[:, None] * table_row + pair[None, :] * table_pair
        c = tl.load(cos + at, mask=turns, other=1.0)
        s = tl.load(sin + at, mask=turns, other=0.0)
        turned = a * c - b * s
        b = b * c + a * s
        a = turned
    target = rows + head.to(tl.int64) * rows_head + position[:, None].to(tl.int64) * rows_row
    mask = here[:, None] & real[None, :]
    to_a, to_b = target + first[None, :], target + second[None, :]
    a += tl.load(to_a, mask=mask, other=0.0).to(tl.float32)
    b += tl.load(to_b, mask=mask, other=0.0).to(tl.float32)
    tl.store(to_a, a.to(rows.dtype.element_ty), mask=mask)
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
        "BLOCK_P": triton.next_power_of_2(width // 2),
        "enable_fp_fusion": False,
    }
    moved = cos.new_empty(2, count, heads, width)
    lengths = cos.new_empty(2, count)
    with torch.cuda.device_of(cos):
        for index, (part, new) in enumerate(zip(rows, fresh, strict=True)):
            old = new if earlier is None else earlier[index]
            _shifts[(count,)](
                part,
                *part.stride()[:2],
                new,
                *new.stride(),
                old,
                *old.stride()[:2],
                stretches.positions,
                stretches.sources,
                stretches.sizes,
                *turn,
                moved[index],
                lengths[index],
                count,
                TURNS=index == 0,
                **how,
            )
        share = share_of(lengths)
        of, length, most = stretches.weights.shape
        for index, part in enumerate(rows):
            _move[of, triton.cdiv(length, _POSITIONS), heads](
                part,
                *part.stride()[:2],
                moved[index],
                share[index],
                stretches.weights,
                stretches.observed,
                stretches.starts,
                stretches.lengths,
                stretches.fixed.view(torch.uint8),
                *turn,
                length,
                most,
                TURNS=index == 0,
                POSITIONS=_POSITIONS,
                OBSERVED=_OBSERVED,
                # a shift is rounded to 16 bits anyway
                PRECISION="tf32x3" if part.dtype == torch.float32 else "tf32",
                num_warps=8,
                **how,
            )
