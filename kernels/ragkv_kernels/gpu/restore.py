"""Decode, rotate and write in one pass: each number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.grid import Grid, Parts, split, typed

_TOKENS = 32


@triton.jit
def pair_of(pair, half, HEAD_DIM: tl.constexpr):
    """Return the two channels of a pair: those that turn together, then the rest by twos."""
    turns = pair < half
    first = tl.where(turns, pair, pair + half)
    second = tl.where(turns, pair + half, pair + HEAD_DIM // 2)
    return first, second


@triton.jit
def _code(codes, at, count, LEVELS: tl.constexpr, mask):
    """Return the codes of the numbers ``at``, of ``count`` in the layer, as float32."""
    if LEVELS == 256:
        code = tl.load(codes + at, mask=mask, other=0)
    else:
        bytes_ = (count + 1) // 2
        high = at >= bytes_
        both = tl.load(codes + tl.where(high, at - bytes_, at), mask=mask, other=0)
        code = tl.where(high, both >> 4, both & 15)
    return code.to(tl.float32)


@triton.jit(
    do_not_specialize=["count", "tokens", "groups", "key_span"],
    do_not_specialize_on_alignment=["key_low", "key_step", "value_unit", "value_step"],
)
def _restore(
    key_low,
    key_step,
    value_unit,
    value_step,
    key_codes,
    value_codes,
    keys,
    keys_head,
    keys_row,
    keys_channel,
    values,
    values_head,
    values_row,
    values_channel,
    rows,
    slots,
    count,
    cos,
    cos_row,
    cos_pair,
    sin,
    sin_row,
    sin_pair,
    half,
    tokens,
    groups,
    key_span,
    value_span,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    heads = tl.num_programs(1).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)
    here = index < count
    mask = here[:, None] & (pair < HEAD_DIM // 2)[None, :]
    row = tl.load(rows + index, mask=here, other=0)
    slot = tl.load(slots + index, mask=here, other=0)
    first, second = pair_of(pair, half, HEAD_DIM)

    source = (head * tokens + row)[:, None] * HEAD_DIM
    if LEVELS == 0:
        key_a = tl.load(key_codes + source + first[None, :], mask=mask, other=0.0).to(tl.float32)
        key_b = tl.load(key_codes + source + second[None, :], mask=mask, other=0.0).to(tl.float32)
        value_a = tl.load(value_codes + source + first[None, :], mask=mask, other=0.0)
        value_b = tl.load(value_codes + source + second[None, :], mask=mask, other=0.0)
    else:
        numbers = heads * tokens * HEAD_DIM
        grid = ((head * groups + row // key_span) * HEAD_DIM)[:, None]
        low = tl.load(key_low + grid + first[None, :], mask=mask, other=0.0).to(tl.float32)
        step = tl.load(key_step + grid + first[None, :], mask=mask, other=0.0).to(tl.float32)
        key_a = _code(key_codes, source + first[None, :], numbers, LEVELS, mask) * step + low
        low = tl.load(key_low + grid + second[None, :], mask=mask, other=0.0).to(tl.float32)
        step = tl.load(key_step + grid + second[None, :], mask=mask, other=0.0).to(tl.float32)
        key_b = _code(key_codes, source + second[None, :], numbers, LEVELS, mask) * step + low
        scale = tl.load(value_step + head // value_span * tokens + row, mask=here, other=0)
        scale = (scale.to(tl.float32) * tl.load(value_unit))[:, None]
        centre: tl.constexpr = (LEVELS - 1) / 2
        code = _code(value_codes, source + first[None, :], numbers, LEVELS, mask)
        value_a = (code - centre) * scale
        code = _code(value_codes, source + second[None, :], numbers, LEVELS, mask)
        value_b = (code - centre) * scale

    turns = mask & (pair < half)[None, :]
    c = tl.load(cos + index[:, None] * cos_row + pair[None, :] * cos_pair, mask=turns, other=1.0)
    s = tl.load(sin + index[:, None] * sin_row + pair[None, :] * sin_pair, mask=turns, other=0.0)
    target = keys + head * keys_head + slot[:, None] * keys_row
    kind = keys.dtype.element_ty
    tl.store(target + first[None, :] * keys_channel, (key_a * c - key_b * s).to(kind), mask=mask)
    tl.store(target + second[None, :] * keys_channel, (key_b * c + key_a * s).to(kind), mask=mask)
    target = values + head * values_head + slot[:, None] * values_row
    tl.store(target + first[None, :] * values_channel, value_a.to(kind), mask=mask)
    tl.store(target + second[None, :] * values_channel, value_b.to(kind), mask=mask)


def restore(
    data: torch.Tensor,
    tokens: int,
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rows: torch.Tensor,
    slots: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    grid: Grid | None,
) -> None:
    """See :func:`ragkv_kernels.restore`."""
    heads, _, width = keys.shape
    if len(rows) == 0:
        return
    shape = heads, tokens, width
    if grid is None:
        both = typed(data, keys.dtype)
        half = both.numel() // 2
        parts = Parts(both, both, both, both, both[:half], both[half:])
        spans = 1, 1, 1
    else:
        parts = split(data, shape, grid)
        spans = parts.key_low.shape[1], grid.key_span(tokens), grid.value_span(heads, width)
    cos, sin = table
    with torch.cuda.device_of(keys):
        _restore[triton.cdiv(len(rows), _TOKENS), heads](
            *parts,
            keys,
            *keys.stride(),
            values,
            *values.stride(),
            rows.contiguous(),
            slots.contiguous(),
            len(rows),
            cos,
            *cos.stride(),
            sin,
            *sin.stride(),
            cos.shape[1],
            tokens,
            *spans,
            LEVELS=0 if grid is None else grid.levels,
            HEAD_DIM=width,
            BLOCK_P=triton.next_power_of_2(width // 2),
            BLOCK_T=_TOKENS,
            enable_fp_fusion=False,
        )
