"""Decode, rotate and write in torch, one step behind the other."""

from __future__ import annotations

import torch

from ragkv_kernels.grid import Grid, split, typed


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
    shape = keys.shape[0], tokens, keys.shape[2]
    if grid is None:
        decoded_keys, decoded_values = typed(data, keys.dtype).view(2, *shape).float()
    else:
        decoded_keys, decoded_values = _decode(data, shape, grid)
    keys[:, slots] = rotate(decoded_keys[:, rows], *table).to(keys.dtype)
    values[:, slots] = decoded_values[:, rows].to(values.dtype)


def rotate(keys: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Rotate float32 keys ``[kv_heads, tokens, head_dim]`` by ``[tokens, rotary_dim / 2]``."""
    half = cos.shape[1]
    first, second, rest = keys.split([half, half, keys.shape[2] - 2 * half], dim=2)
    return torch.cat([first * cos - second * sin, second * cos + first * sin, rest], dim=2)


def _decode(
    data: torch.Tensor, shape: tuple[int, int, int], grid: Grid
) -> tuple[torch.Tensor, torch.Tensor]:
    heads, tokens, width = shape
    parts = split(data, shape, grid)
    group = torch.arange(tokens, device=data.device) // grid.key_span(tokens)
    low, step = (part[:, group].float() for part in (parts.key_low, parts.key_step))
    keys = _unpack(parts.key_codes, shape, grid) * step + low
    of_head = torch.arange(heads, device=data.device) // grid.value_span(heads, width)
    scale = parts.value_step[of_head].float() * parts.value_unit
    values = (_unpack(parts.value_codes, shape, grid) - (grid.levels - 1) / 2) * scale[..., None]
    return keys, values


def _unpack(codes: torch.Tensor, shape: tuple[int, int, int], grid: Grid) -> torch.Tensor:
    if grid.levels == 16:
        codes = torch.cat([codes & 15, codes >> 4])[: shape[0] * shape[1] * shape[2]]
    return codes.view(shape).float()
