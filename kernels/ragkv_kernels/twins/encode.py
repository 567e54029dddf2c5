"""Quantise in torch, one step after another."""

from __future__ import annotations

import torch

from ragkv_kernels.grid import Encoded, Grid, divided, pack, spread


def encode(keys: torch.Tensor, values: torch.Tensor, *, grid: Grid) -> Encoded:
    """See :func:`ragkv_kernels.encode`."""
    plain, numbers = keys.float(), values.float()
    key_codes, low, step = _put_keys(plain, grid)
    value_codes, unit, value_step, largest_value = _put_values(numbers, grid)
    codes = pack(key_codes, grid.levels), pack(value_codes, grid.levels)
    flat = [part.reshape(-1).view(torch.uint8) for part in (low, step, unit, value_step)]
    largest = torch.stack([plain.abs().amax(), largest_value])
    return Encoded(torch.cat([*flat, *codes]), largest.nan_to_num(float("inf")).amax())


def _put_keys(keys: torch.Tensor, grid: Grid) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, and each group's lowest number and step, float16."""
    codes = torch.empty(keys.shape, dtype=torch.uint8, device=keys.device)
    lows, steps = [], []
    for span, groups in grid.key_spans(keys.shape[1]):
        group = keys[:, span].unflatten(1, (groups, -1))
        smallest, largest = group.amin(2, keepdim=True), group.amax(2, keepdim=True)
        # a little lower: rounding to float16 must not lift the grid off the smallest
        low = (smallest - smallest.abs() * 2.0**-11).half()
        step = divided(largest - low.float(), grid.levels - 1).half()
        places = (group - low.float()).div_(_divisor(step.float()))
        _write(places, codes[:, span].unflatten(1, (groups, -1)), grid)
        lows.append(low[:, :, 0])
        steps.append(step[:, :, 0])
    return codes, torch.cat(lows, dim=1), torch.cat(steps, dim=1)


def _put_values(
    values: torch.Tensor, grid: Grid
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Return codes, the layer's unit ``[1]``, each group's step, uint8, and the largest number."""
    heads, _, width = values.shape
    span, half = grid.value_span(heads, width), (grid.levels - 1) / 2
    largest = values.abs().amax(2)
    ideal = divided(torch.stack([group.amax(0) for group in largest.split(span)]), half)
    unit = divided(ideal.amax(), 255).view(1)
    step = (ideal / _divisor(unit)).ceil().clamp_max(255)
    places = (values / _divisor(spread(step, heads, span) * unit)[..., None]).add_(half)
    codes = torch.empty(values.shape, dtype=torch.uint8, device=values.device)
    _write(places, codes, grid)
    return codes, unit, step.to(torch.uint8), largest.amax()


def _write(places: torch.Tensor, codes: torch.Tensor, grid: Grid) -> None:
    codes.copy_(places.round_().clamp_(0, grid.levels - 1))


def _divisor(step: torch.Tensor) -> torch.Tensor:
    """Return steps to divide by: where all numbers are equal, the step is 0."""
    return step.where(step > 0, 1.0)
