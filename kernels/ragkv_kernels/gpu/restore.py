"""Decode, rotate and write layers in one pass: each number is read once and written once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.grid import Grid, split

_TOKENS = 32


@triton.jit
def pair_of(pair, half, HEAD_DIM: tl.constexpr, ADJACENT: tl.constexpr):
    """Return the two channels of a pair: those that turn together, then the rest by twos."""
    turns = pair < half
    first = tl.where(turns, pair * 2 if ADJACENT else pair, pair + half)
    second = tl.where(turns, pair * 2 + 1 if ADJACENT else pair + half, pair + HEAD_DIM // 2)
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
    do_not_specialize=["count", "tokens", "groups", "key_span", "from_keys_at", "from_values_at"],
    do_not_specialize_on_alignment=["key_low", "key_step", "value_unit", "value_step"],
)
def _restore(
    key_low,
    key_step,
    value_unit,
    value_step,
    data_layer,
    from_keys,
    from_keys_at,
    from_keys_layer,
    from_keys_head,
    from_keys_row,
    from_keys_channel,
    from_values,
    from_values_at,
    from_values_layer,
    from_values_head,
    from_values_row,
    from_values_channel,
    keys,
    keys_layer,
    keys_head,
    keys_row,
    keys_channel,
    values,
    values_layer,
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
    ADJACENT: tl.constexpr,
    BLOCK_P: tl.constexpr,
    BLOCK_T: tl.constexpr,
):
    index = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1).to(tl.int64)
    layer = tl.program_id(2).to(tl.int64)
    pair = tl.arange(0, BLOCK_P)
    here = index < count
    mask = here[:, None] & (pair < HEAD_DIM // 2)[None, :]
    row = tl.load(rows + index, mask=here, other=0)
    slot = tl.load(slots + index, mask=here, other=0)
    first, second = pair_of(pair, half, HEAD_DIM, ADJACENT)
    kind = keys.dtype.element_ty

    from_keys += layer * from_keys_layer
    from_values += layer * from_values_layer
    at = (head * from_keys_head + row * from_keys_row)[:, None]
    key_at_a = at + first[None, :] * from_keys_channel
    key_at_b = at + second[None, :] * from_keys_channel
    at = (head * from_values_head + row * from_values_row)[:, None]
    value_at_a = at + first[None, :] * from_values_channel
    value_at_b = at + second[None, :] * from_values_channel
    # the codes' offset depends on the number of tokens, so the compiler cannot assume alignment
    from_keys += from_keys_at
    from_values += from_values_at
    numbers = tl.num_programs(1).to(tl.int64) * tokens * HEAD_DIM
    grid = layer * (data_layer // 2) + ((head * groups + row // key_span) * HEAD_DIM)[:, None]
    low = tl.load(key_low + grid + first[None, :], mask=mask, other=0.0).to(tl.float32)
    step = tl.load(key_step + grid + first[None, :], mask=mask, other=0.0).to(tl.float32)
    key_a = (_code(from_keys, key_at_a, numbers, LEVELS, mask) * step + low).to(kind)
    low = tl.load(key_low + grid + second[None, :], mask=mask, other=0.0).to(tl.float32)
    step = tl.load(key_step + grid + second[None, :], mask=mask, other=0.0).to(tl.float32)
    key_b = (_code(from_keys, key_at_b, numbers, LEVELS, mask) * step + low).to(kind)
    # rounded as the codec rounds: a chunk is the same on every device
    key_a, key_b = key_a.to(tl.float32), key_b.to(tl.float32)
    steps = value_step + layer * data_layer + head // value_span * tokens
    unit = tl.load(value_unit + layer * (data_layer // 4))
    scale = (tl.load(steps + row, mask=here, other=0).to(tl.float32) * unit)[:, None]
    centre: tl.constexpr = (LEVELS - 1) / 2
    value_a = (_code(from_values, value_at_a, numbers, LEVELS, mask) - centre) * scale
    value_b = (_code(from_values, value_at_b, numbers, LEVELS, mask) - centre) * scale

    turns = mask & (pair < half)[None, :]
    c = tl.load(cos + slot[:, None] * cos_row + pair[None, :] * cos_pair, mask=turns, other=1.0)
    s = tl.load(sin + slot[:, None] * sin_row + pair[None, :] * sin_pair, mask=turns, other=0.0)
    target = keys + layer * keys_layer + head * keys_head + slot[:, None] * keys_row
    tl.store(target + first[None, :] * keys_channel, (key_a * c - key_b * s).to(kind), mask=mask)
    tl.store(target + second[None, :] * keys_channel, (key_b * c + key_a * s).to(kind), mask=mask)
    target = values + layer * values_layer + head * values_head + slot[:, None] * values_row
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
    adjacent: bool = False,
    grid: Grid,
) -> None:
    """See :func:`ragkv_kernels.restore`."""
    layers, heads, _, width = keys.shape
    if not len(rows) or not layers:
        return
    data = _aligned(data)
    *grids, key_codes, value_codes = split(data, (heads, tokens, width), grid)
    layout = data.stride(0), tokens * width, width, 1
    cos, sin = table
    with torch.cuda.device_of(keys):
        _restore[triton.cdiv(len(rows), _TOKENS), heads, layers](
            *grids,
            data.stride(0),
            data,
            key_codes.data_ptr() - data.data_ptr(),
            *layout,
            data,
            value_codes.data_ptr() - data.data_ptr(),
            *layout,
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
            grids[0].shape[2],
            grid.key_span(tokens),
            grid.value_span(heads, width),
            LEVELS=grid.levels,
            HEAD_DIM=width,
            ADJACENT=adjacent,
            BLOCK_P=triton.next_power_of_2(width // 2),
            BLOCK_T=_TOKENS,
            enable_fp_fusion=False,
        )


def _aligned(data: torch.Tensor) -> torch.Tensor:
    """Return layers' bytes, each layer's at a multiple of 16; without a copy where they are."""
    if data.stride(1) == 1 and not (data.stride(0) % 16 or data.data_ptr() % 16):
        return data
    layers, size = data.shape
    wide = data.new_empty(layers, -(-size // 16) * 16)
    wide[:, :size] = data
    return wide[:, :size]
