"""Decode, rotate and write in torch, one step behind the other."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ragkv_kernels.grid import Grid, split, spread, unpack


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
    decoded = keys.new_empty(layers, 2, heads, tokens, width)
    for layer, out in zip(data, decoded, strict=True):
        decode(layer, out, grid=grid)
    place(
        [(decoded[:, 0], decoded[:, 1])],
        keys,
        values,
        counts=[len(rows)],
        part_of=torch.zeros_like(rows),
        rows=rows,
        slots=slots,
        table=table,
        adjacent=adjacent,
    )


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
    del part_of
    cos, sin = table
    of_parts = zip(parts, rows.split(list(counts)), slots.split(list(counts)), strict=True)
    for (from_keys, from_values), which, where in of_parts:
        turned = rotate(from_keys[:, :, which].float(), cos[where], sin[where], adjacent=adjacent)
        keys[:, :, where] = turned.to(keys.dtype)
        values[:, :, where] = from_values[:, :, which]


def rotate(
    keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, *, adjacent: bool = False
) -> torch.Tensor:
    """Rotate float32 keys ``[..., tokens, head_dim]`` by ``[tokens, rotary_dim / 2]``."""
    width = 2 * cos.shape[1]
    pairs = keys[..., :width].unflatten(-1, (-1, 2) if adjacent else (2, -1))
    first, second = pairs.unbind(-1 if adjacent else -2)
    turned = torch.stack(
        [first * cos - second * sin, second * cos + first * sin], dim=-1 if adjacent else -2
    )
    return torch.cat([turned.flatten(-2), keys[..., width:]], dim=-1)


def decode(data: torch.Tensor, out: torch.Tensor, *, grid: Grid) -> None:
    """See :func:`ragkv_kernels.decode`."""
    _, heads, tokens, width = out.shape
    parts = split(data[None], (heads, tokens, width), grid)
    keys, values = (
        unpack(codes[0], heads * tokens * width, grid.levels).view(heads, tokens, width)
        for codes in (parts.key_codes, parts.value_codes)
    )
    first = 0
    for span, groups in grid.key_spans(tokens):
        low, step = (
            part[0, :, first : first + groups, None].float()
            for part in (parts.key_low, parts.key_step)
        )
        codes = keys[:, span].unflatten(1, (groups, -1))
        torch.add(codes * step, low, out=out[0, :, span].unflatten(1, (groups, -1)))
        first += groups
    steps = spread(parts.value_step[0], heads, grid.value_span(heads, width)).float()
    centre = torch.full((1,), (grid.levels - 1) / 2, dtype=torch.float32, device=data.device)
    torch.mul(values - centre, (steps * parts.value_unit)[..., None], out=out[1])
