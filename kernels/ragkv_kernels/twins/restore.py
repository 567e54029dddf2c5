"""Decode, rotate and write in torch, one step behind the other."""

from __future__ import annotations

import torch

from ragkv_kernels.grid import Grid, split


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
    _, heads, _, width = keys.shape
    key, value = _decode(data, (heads, tokens, width), grid)
    decoded = key.to(keys.dtype), value.to(keys.dtype)
    move(decoded, keys, values, rows=rows, slots=slots, table=table, adjacent=adjacent)


def move(
    cached: tuple[torch.Tensor, torch.Tensor],
    keys: torch.Tensor,
    values: torch.Tensor,
    *,
    rows: torch.Tensor,
    slots: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    adjacent: bool = False,
) -> None:
    """See :func:`ragkv_kernels.move`."""
    cos, sin = (part[slots] for part in table)
    from_keys, from_values = cached
    turned = rotate(from_keys[:, :, rows].float(), cos, sin, adjacent=adjacent)
    keys[:, :, slots] = turned.to(keys.dtype)
    values[:, :, slots] = from_values[:, :, rows]


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


def _decode(
    data: torch.Tensor, shape: tuple[int, int, int], grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens, width = shape
    parts = split(data, shape, grid)
    group = torch.arange(tokens, device=data.device) // grid.key_span(tokens)
    low, step = (part[:, :, group].float() for part in (parts.key_low, parts.key_step))
    keys = _unpack(parts.key_codes, shape, grid) * step + low
    of_head = torch.arange(heads, device=data.device) // grid.value_span(heads, width)
    scale = parts.value_step[:, of_head].float() * parts.value_unit[:, None]
    values = (_unpack(parts.value_codes, shape, grid) - (grid.levels - 1) / 2) * scale[..., None]
    return keys, values


def _unpack(codes: torch.Tensor, shape: tuple[int, int, int], grid: Grid) -> torch.Tensor:
    if grid.levels == 16:
        codes = torch.cat([codes & 15, codes >> 4], dim=1)[:, : shape[0] * shape[1] * shape[2]]
    return codes.view(len(codes), *shape).float()
