"""Quantise keys in one pass; quantise values beside them.

Values need the layer's largest step before the first code is made: a small kernel reads them
once for that, and the second read comes from the cache where the layer fits it.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from ragkv_kernels.grid import Encoded, Grid, divided, pack

_CHANNELS = 32
_TOKENS = 32


@triton.jit
def _code(places, LEVELS: tl.constexpr):
    """Return the nearest codes, ties to even: adding 1.5 * 2**23 leaves no room for a fraction."""
    places = tl.minimum(tl.maximum(places, 0.0), LEVELS - 1.0)
    return ((places + 12582912.0) - 12582912.0).to(tl.uint8)


@triton.jit
def _size(numbers, mask):
    """Return the largest absolute number; inf where one is not a number."""
    size = tl.where(numbers == numbers, tl.abs(numbers), float("inf"))
    return tl.max(tl.where(mask, size, 0.0))


@triton.jit
def _quantise(numbers, here, LEVELS: tl.constexpr):
    """Return codes ``[tokens, channels]`` and each channel's low and step, float16."""
    smallest = tl.min(tl.where(here[:, None], numbers, float("inf")), 0)
    largest = tl.max(tl.where(here[:, None], numbers, float("-inf")), 0)
    # a little lower: rounding to float16 must not lift the grid off the smallest
    low = (smallest - tl.abs(smallest) * 0.00048828125).to(tl.float16)
    step = tl.div_rn(largest - low.to(tl.float32), LEVELS - 1.0).to(tl.float16)
    wide = step.to(tl.float32)
    divisor = tl.where(wide > 0, wide, 1.0)[None, :] + tl.zeros_like(numbers)
    return _code(tl.div_rn(numbers - low.to(tl.float32)[None, :], divisor), LEVELS), low, step


@triton.jit(
    do_not_specialize=["tokens", "span"],
    do_not_specialize_on_alignment=["key_low", "key_step", "codes"],
)
def _encode_keys(
    keys,
    keys_head,
    keys_row,
    keys_channel,
    key_low,
    key_step,
    codes,
    sizes,
    tokens,
    span,
    apart,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TO_A_BYTE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    group = tl.program_id(0)
    channel = tl.program_id(1) * BLOCK_C + tl.arange(0, BLOCK_C)
    inside = tl.arange(0, BLOCK_T)
    token = group * span + inside
    here = (inside < span) & (token < tokens)
    exists = channel < HEAD_DIM
    mask = here[:, None] & exists[None, :]
    largest = 0.0
    bytes_ = tl.zeros([BLOCK_T, BLOCK_C], tl.uint8)
    for part in tl.static_range(TO_A_BYTE):  # int4: the head half the layer apart, too
        head = tl.program_id(2).to(tl.int64) + part * apart
        source = keys + head * keys_head + token[:, None] * keys_row
        plain = tl.load(source + channel[None, :] * keys_channel, mask=mask, other=0.0)
        plain = plain.to(tl.float32)
        largest = tl.maximum(largest, _size(plain, mask))
        code, low, step = _quantise(plain, here, LEVELS)
        grid = (head * tl.num_programs(0) + group) * HEAD_DIM
        tl.store(key_low + grid + channel, low, mask=exists)
        tl.store(key_step + grid + channel, step, mask=exists)
        bytes_ = bytes_ | (code << (4 * part))
    target = codes + (tl.program_id(2).to(tl.int64) * tokens + token)[:, None] * HEAD_DIM
    tl.store(target + channel[None, :], bytes_, mask=mask)
    program = (tl.program_id(2) * tl.num_programs(1) + tl.program_id(1)) * tl.num_programs(0)
    tl.store(sizes + program + group, largest)


@triton.jit(do_not_specialize=["tokens"])
def _size_values(
    values,
    values_head,
    values_row,
    values_channel,
    sizes,
    heads,
    tokens,
    span,
    HEAD_DIM: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    """Write the largest absolute value of each token in each group of heads."""
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    group = tl.program_id(1).to(tl.int64)
    channels = tl.arange(0, BLOCK_D)
    mask = (token < tokens)[:, None] & (channels < HEAD_DIM)[None, :]
    largest = tl.zeros([BLOCK_T], tl.float32)
    for head in range(group * span, tl.minimum(group * span + span, heads)):
        source = values + head * values_head + token[:, None] * values_row
        part = tl.load(source + channels[None, :] * values_channel, mask=mask, other=0.0)
        part = part.to(tl.float32)
        size = tl.where(part == part, tl.abs(part), float("inf"))
        largest = tl.maximum(largest, tl.max(size, 1))
    tl.store(sizes + group * tokens + token, largest, mask=token < tokens)


@triton.jit(
    do_not_specialize=["tokens"],
    do_not_specialize_on_alignment=["value_step", "value_unit", "codes"],
)
def _encode_values(
    values,
    values_head,
    values_row,
    values_channel,
    value_step,
    value_unit,
    codes,
    tokens,
    span,
    apart,
    LEVELS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    TO_A_BYTE: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_D: tl.constexpr,
):
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    channels = tl.arange(0, BLOCK_D)
    here = token < tokens
    mask = here[:, None] & (channels < HEAD_DIM)[None, :]
    unit = tl.load(value_unit)
    bytes_ = tl.zeros([BLOCK_T, BLOCK_D], tl.uint8)
    for part in tl.static_range(TO_A_BYTE):
        head = tl.program_id(1).to(tl.int64) + part * apart
        source = values + head * values_head + token[:, None] * values_row
        numbers = tl.load(source + channels[None, :] * values_channel, mask=mask, other=0.0)
        numbers = numbers.to(tl.float32)
        step = tl.load(value_step + head // span * tokens + token, mask=here, other=0)
        wide = step.to(tl.float32) * unit
        divisor = tl.where(wide > 0, wide, 1.0)[:, None] + tl.zeros_like(numbers)
        code = _code(tl.div_rn(numbers, divisor) + (LEVELS - 1) / 2, LEVELS)
        bytes_ = bytes_ | (code << (4 * part))
    target = codes + (tl.program_id(1).to(tl.int64) * tokens + token)[:, None] * HEAD_DIM
    tl.store(target + channels[None, :], bytes_, mask=mask)


def encode(keys: torch.Tensor, values: torch.Tensor, *, grid: Grid) -> Encoded:
    """See :func:`ragkv_kernels.encode`."""
    heads, tokens, width = keys.shape
    sizes = grid.sizes((heads, tokens, width))
    data = torch.empty(sum(sizes), dtype=torch.uint8, device=keys.device)
    low, step, unit, value_step, key_codes, value_codes = data.split(sizes)
    # of an odd number of heads one is cut in the middle: then the codes are packed behind
    to_a_byte = 2 if grid.levels == 16 and heads % 2 == 0 else 1
    packed = to_a_byte == 2 or grid.levels == 256
    codes = [key_codes, value_codes]
    if not packed:
        codes = [data.new_empty(heads * tokens * width) for _ in range(2)]
    programs = heads // to_a_byte
    with torch.cuda.device_of(keys):
        largest = _put_keys(keys, grid, (low, step, codes[0]), to_a_byte)
        seen = _put_values(values, grid, (unit, value_step, codes[1]), programs, to_a_byte)
    if not packed:
        key_codes.copy_(pack(codes[0], grid.levels))
        value_codes.copy_(pack(codes[1], grid.levels))
    return Encoded(data, torch.maximum(largest, seen))


def _put_keys(
    keys: torch.Tensor,
    grid: Grid,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    to_a_byte: int,
) -> torch.Tensor:
    """Fill the keys' parts and return their largest number."""
    heads, tokens, width = keys.shape
    low, step, codes = parts
    span = grid.key_span(tokens)
    programs = triton.cdiv(tokens, span), triton.cdiv(width, _CHANNELS), heads // to_a_byte
    sizes = keys.new_empty(programs, dtype=torch.float32)
    _encode_keys[programs](
        keys,
        *keys.stride(),
        low.view(torch.float16),
        step.view(torch.float16),
        codes,
        sizes,
        tokens,
        span,
        heads // to_a_byte,
        LEVELS=grid.levels,
        HEAD_DIM=width,
        TO_A_BYTE=to_a_byte,
        BLOCK_T=triton.next_power_of_2(span),
        BLOCK_C=_CHANNELS,
        num_warps=16 if span > 128 else 4,
        enable_fp_fusion=False,
    )
    return sizes.amax()


def _put_values(
    values: torch.Tensor,
    grid: Grid,
    parts: tuple[torch.Tensor, torch.Tensor, torch.Tensor],
    programs: int,
    to_a_byte: int,
) -> torch.Tensor:
    """Fill the values' parts and return their largest number."""
    heads, tokens, width = values.shape
    unit, step, codes = parts
    span, blocks = grid.value_span(heads, width), triton.cdiv(tokens, _TOKENS)
    channels = triton.next_power_of_2(width)
    sizes = values.new_empty(triton.cdiv(heads, span), tokens, dtype=torch.float32)
    _size_values[blocks, len(sizes)](
        values,
        *values.stride(),
        sizes,
        heads,
        tokens,
        span,
        HEAD_DIM=width,
        BLOCK_T=_TOKENS,
        BLOCK_D=channels,
        enable_fp_fusion=False,
    )
    ideal = divided(sizes, (grid.levels - 1) / 2)
    one = divided(ideal.amax(), 255)
    unit.view(torch.float32).copy_(one)
    steps = (ideal / one.where(one > 0, 1.0)).ceil().clamp_max(255)
    step.copy_(steps.to(torch.uint8).view(-1))
    _encode_values[blocks, programs](
        values,
        *values.stride(),
        step,
        unit.view(torch.float32),
        codes,
        tokens,
        span,
        programs,
        LEVELS=grid.levels,
        HEAD_DIM=width,
        TO_A_BYTE=to_a_byte,
        BLOCK_T=_TOKENS,
        BLOCK_D=channels,
        enable_fp_fusion=False,
    )
    return sizes.amax()
