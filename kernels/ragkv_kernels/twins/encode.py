"""Un-rotate and quantise in torch, one step behind the other."""

from __future__ import annotations

import torch

from ragkv_kernels.grid import Encoded, Grid, divided, pack
from ragkv_kernels.twins.restore import rotate


def encode(
    keys: torch.Tensor,
    values: torch.Tensor,
    table: tuple[torch.Tensor, torch.Tensor],
    *,
    grid: Grid,
) -> Encoded:
    """See :func:`ragkv_kernels.encode`."""
    cos, sin = table
    scale = cos.square() + sin.square()
    plain = rotate(keys.float(), cos / scale, -sin / scale)
    numbers = values.float()
    key_codes, low, step = _put_keys(plain, grid)
    value_codes, unit, value_step = _put_values(numbers, grid)
    codes = pack(key_codes, grid.levels), pack(value_codes, grid.levels)
    flat = [part.reshape(-1).view(torch.uint8) for part in (low, step, unit, value_step)]
    largest = torch.stack([plain.abs().amax(), numbers.abs().amax()])
    return Encoded(torch.cat([*flat, *codes]), largest.nan_to_num(float("inf")).amax())


def _put_keys(keys: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, and each group's lowest number and step, float16."""
    span = grid.key_span(keys.shape[1])
    codes, lows, steps = [], [], []
    for group in keys.split(span, dim=1):
        smallest, largest = group.amin(1, keepdim=True), group.amax(1, keepdim=True)
        # a little lower: rounding to float16 must not lift the grid off the smallest
        low = (smallest - smallest.abs() * 2.0**-11).half()
        step = divided(largest - low.float(), grid.levels - 1).half()
        codes.append(_codes((group - low.float()) / _divisor(step.float()), grid))
        lows.append(low)
        steps.append(step)
    return torch.cat(codes, dim=1), torch.cat(lows, dim=1), torch.cat(steps, dim=1)


def _put_values(
    values: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, the layer's unit ``[1]`` float32, and each group's step, uint8."""
    heads, _, width = values.shape
    span, half = grid.value_span(heads, width), (grid.levels - 1) / 2
    largest = values.abs().amax(2)
    wanted = divided(torch.stack([group.amax(0) for group in largest.split(span)]), half)
    unit = divided(wanted.amax(), 255).view(1)
    step = (wanted / _divisor(unit)).ceil().clamp_max(255)
    of_head = torch.arange(heads, device=values.device) // span
    codes = _codes(values / _divisor(step[of_head] * unit)[..., None] + half, grid)
    return codes, unit, step.to(torch.uint8)


def _codes(places: torch.Tensor, grid: Grid) -> torch.Tensor:
    return places.round().clamp(0, grid.levels - 1).to(torch.uint8)


def _divisor(step: torch.Tensor) -> torch.Tensor:
    """Return steps to divide by: where all numbers are equal, the step is 0."""
    return step.where(step > 0, 1.0)
