"""Products of fewer bits than float32 for weights from a quantised file.

transformers loads a GGUF file's weights as float32, though neighbours are on a grid of few levels.
Steps of few rows are bound by reading the weights: 4-bit weights are packed again, to a sixth of
the bytes. Passes of many rows are bound by the products: bfloat16 ones take half the time on
processors that have them. Inputs, outputs, scales, and bfloat16 weights are rounded to 8 bits; sums
are float32. docs/log.md has the measurements.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import torch
from torch.nn import functional

from ragkv.model.implementation import (
    has_bfloat16_products,
    has_int4_products,
    onednn_linear,
    packed_weight,
)

_GROUP = 32
"""Neighbours along a weight's input that share a grid of at most 16 levels."""
INT4_ROWS = 8
"""Most rows for which 4-bit weights are as fast as bfloat16 ones."""
_FEWEST_ROWS = 4
"""With bfloat16 weights, fewer rows take longer than this number."""
_OFF_GRID = 1 / 16
"""Largest distance of a weight from its grid, in levels: scales are rounded."""
_PACKED_ROWS = 16
"""Number of outputs that are packed together."""
_LEAST_GROUP = 16
"""Neighbours that share a grid of more than 16 levels."""
_BLOCK = 1 << 16
"""Groups processed together, which fit a processor's cache."""
_SAMPLED = 32
"""Number of groups of a weight that decide whether it is quantised."""

_aten: Any = torch.ops.aten
_int4_product: Any = getattr(_aten, "_weight_int4pack_mm_for_cpu", None)


class QuantisedWeight:
    """A weight ``[out, in]`` float32 with copies of fewer bits, made on first use."""

    def __init__(self, weight: torch.Tensor) -> None:
        self.weight = weight.detach()

    def product(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor | None:
        """Return ``rows @ weight^T + bias``, ``[…, n, out]`` float32 from ``[…, n, in]``.

        None if float32 is faster on this processor.
        """
        count = rows.numel() // rows.shape[-1]
        flat, int4 = rows.reshape(count, -1), self.int4 if count <= INT4_ROWS else None
        if int4 is not None:
            return self.few(flat, bias).view(*rows.shape[:-1], -1)
        if not has_bfloat16_products():
            return None
        flat = functional.pad(flat.bfloat16(), (0, 0, 0, max(0, _FEWEST_ROWS - count)))
        out = onednn_linear(flat, self._bfloat16)[:count]
        product = out.float() if bias is None else out + bias  # float32, like bias
        return product.view(*rows.shape[:-1], -1)

    def few(self, rows: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
        """Return :meth:`product` for at most 8 rows ``[n, in]``; needs :attr:`int4`."""
        levels, scales = self.int4  # type: ignore[misc]
        out: torch.Tensor = _int4_product(rows.bfloat16(), levels, _GROUP, scales)
        return out.float() if bias is None else out + bias

    @cached_property
    def _bfloat16(self) -> torch.Tensor:
        """The weight in bfloat16, as oneDNN arranges it."""
        return packed_weight(self.weight.bfloat16())

    @cached_property
    def int4(self) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Levels, packed, and scales ``[in / 32, out, 2]``; None for other grids."""
        packs = has_int4_products() and len(self.weight) % _PACKED_ROWS == 0
        grid = _four_bits(self.weight) if packs else None
        if grid is None:
            return None
        levels, low, step = grid
        scales = torch.stack([step, low + 8 * step], dim=-1).transpose(0, 1).bfloat16()
        packed = _aten._convert_weight_to_int4pack_for_cpu(levels, 1)  # noqa: SLF001
        return packed, scales.contiguous()


def is_quantised(weight: torch.Tensor) -> bool:
    """Whether a sample of a weight ``[out, in]`` is on grids of at most 256 levels."""
    return weight.shape[1] % _GROUP == 0 and _on_grids(weight.detach(), _LEAST_GROUP, 256)


def _on_grids(weight: torch.Tensor, group: int, levels: int) -> bool:
    """Whether each group of neighbours in a sample is on a grid of at most ``levels`` levels."""
    groups = weight.reshape(-1, group)
    sample = groups[:: -(-len(groups) // _SAMPLED)]
    low, high = sample.aminmax(dim=1, keepdim=True)
    steps = torch.arange(1, levels)[:, None, None]
    exact = (sample - low) / (high - low).clamp_min(torch.finfo().tiny) * steps
    off = (exact - exact.round()).abs().amax(2)
    return bool((off.amin(0) < _OFF_GRID).all() and (high > low).any())


def _four_bits(
    weight: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor] | None:
    """Return ``levels, low, step`` of a weight ``levels * step + low``.

    ``levels`` are int32 0 to 15 ``[out, in]``, the others ``[out, in / 32]``. None unless every 32
    neighbours are on a grid of at most 16 levels, from their smallest to their largest.
    """
    if not _on_grids(weight, _GROUP, 16):
        return None
    grids = []
    for groups in torch.split(weight.reshape(-1, _GROUP), _BLOCK):
        low, high = groups.aminmax(dim=1)
        step = (high - low) / 15
        levels, fits = _levels(groups, low, step)
        for most in range(14, 0, -1):
            left = (~fits).nonzero()[:, 0]
            if not len(left):
                break
            step[left] = (high[left] - low[left]) / most
            levels[left], fits[left] = _levels(groups[left], low[left], step[left])
        if not fits.all():
            return None
        grids.append((levels, low, step))
    levels, low, step = (torch.cat(parts) for parts in zip(*grids, strict=True))
    return levels.view_as(weight), low.view(len(weight), -1), step.view(len(weight), -1)


def _levels(
    groups: torch.Tensor, low: torch.Tensor, step: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the nearest levels int32 ``[groups, 32]``, and which groups are on them."""
    exact = (groups - low[:, None]) / step.clamp_min(torch.finfo().tiny)[:, None]
    nearest = exact.round()
    return nearest.int(), exact.sub_(nearest).abs_().amax(1) < _OFF_GRID
