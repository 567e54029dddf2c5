"""Rotate and write layers of many entries in one launch, wherever each of them lies."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
import triton
import triton.language as tl

from ragkv_kernels.gpu.restore import pair_of

_TOKENS = 32


@triton.jit(
    do_not_specialize=["count", "parts"],
    do_not_specialize_on_alignment=["places", "part_of", "rows", "slots"],
)
def _place(
    keys,
    keys_layer,
    keys_head,
    keys_row,
    values,
    values_layer,
    values_head,
    values_row,
    places,
    parts,
    part_of,
    rows,
    slots,
    count,
    cos,
    sin,
    table_row,
    table_pair,
    half,
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
    part = tl.load(part_of + index, mask=here, other=0)
    row = tl.load(rows + index, mask=here, other=0)
    slot = tl.load(slots + index, mask=here, other=0)
    first, second = pair_of(pair, half, HEAD_DIM, ADJACENT)
    kind = keys.dtype.element_ty

    key_at = tl.load(places + part, mask=here, other=0)
    value_at = tl.load(places + parts + part, mask=here, other=0)
    step = layer * tl.load(places + 2 * parts + part, mask=here, other=0)
    step += head * tl.load(places + 3 * parts + part, mask=here, other=0) + row * HEAD_DIM
    # places count from the buffer: an address that is made from a number would not be aligned
    from_keys = keys + (key_at + step)[:, None]
    from_values = values + (value_at + step)[:, None]
    key_a = tl.load(from_keys + first[None, :], mask=mask, other=0.0).to(tl.float32)
    key_b = tl.load(from_keys + second[None, :], mask=mask, other=0.0).to(tl.float32)
    value_a = tl.load(from_values + first[None, :], mask=mask, other=0.0)
    value_b = tl.load(from_values + second[None, :], mask=mask, other=0.0)

    turns = mask & (pair < half)[None, :]
    at = slot[:, None] * table_row + pair[None, :] * table_pair
    c = tl.load(cos + at, mask=turns, other=1.0)
    s = tl.load(sin + at, mask=turns, other=0.0)
    target = keys + layer * keys_layer + head * keys_head + slot[:, None] * keys_row
    tl.store(target + first[None, :], (key_a * c - key_b * s).to(kind), mask=mask)
    tl.store(target + second[None, :], (key_b * c + key_a * s).to(kind), mask=mask)
    target = values + layer * values_layer + head * values_head + slot[:, None] * values_row
    tl.store(target + first[None, :], value_a, mask=mask)
    tl.store(target + second[None, :], value_b, mask=mask)


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
    """See :func:`ragkv_kernels.place`."""
    del counts
    layers, heads, _, width = keys.shape
    if not len(rows) or not layers:
        return
    even = [_even(each) for each in parts]
    places = torch.from_numpy(np.array([_place_of(each, keys, values) for each in even]).T.copy())
    if keys.is_cuda:
        places = places.pin_memory()
    places = places.to(keys.device, non_blocking=True)
    cos, sin = table
    with torch.cuda.device_of(keys):
        _place[triton.cdiv(len(rows), _TOKENS), heads, layers](
            keys,
            *keys.stride()[:3],
            values,
            *values.stride()[:3],
            places,
            len(parts),
            part_of,
            rows,
            slots,
            len(rows),
            cos,
            sin,
            *cos.stride(),  # both have the same
            cos.shape[1],
            HEAD_DIM=width,
            ADJACENT=adjacent,
            BLOCK_P=triton.next_power_of_2(width // 2),
            BLOCK_T=_TOKENS,
            enable_fp_fusion=False,
        )


def _even(pair: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Return keys and values of the same strides, whose rows follow one another."""
    keys, values = pair
    if keys.stride() == values.stride() and keys.stride()[2:] == (keys.shape[3], 1):
        return pair
    return keys.contiguous(), values.contiguous()


def _place_of(
    pair: tuple[torch.Tensor, torch.Tensor], keys: torch.Tensor, values: torch.Tensor
) -> tuple[int, int, int, int]:
    """Return where keys and values begin, from the buffer's, and the steps of layer and head."""
    from_keys, from_values = pair
    size = keys.element_size()
    return (
        (from_keys.data_ptr() - keys.data_ptr()) // size,
        (from_values.data_ptr() - values.data_ptr()) // size,
        from_keys.stride(0),
        from_keys.stride(1),
    )
